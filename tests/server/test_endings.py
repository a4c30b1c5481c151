"""How calls and servers end: cancellation, deadlines, readers who stop reading, failed engines, drains."""

import asyncio
import http.client
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from server.grpc.server import ROUTER_SERVICES, SERVICE
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.conftest import Served, collect
from tests.server.fake_engine import WAIT_SECONDS

Serve = Callable[..., None]
LONG = 1500  # tokens: more than any test waits for


# Endings that the caller chooses


def test_cancel_frees_slots_within_an_iteration(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.GenerateStream(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        await it.step()
        await call.read()
        assert it.engine.load().slots_used == 4
        call.cancel()
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert it.engine.iterations == 1
        await it.app.handler.calls.wait_until_none()

    serve(scenario, held=True)


def test_a_cancelled_call_that_waits_leaves_the_queue(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        call.cancel()
        await it.until(lambda: it.engine.load().waiting == 0)

    serve(scenario, held=True)


@pytest.mark.parametrize("streams", [False, True])
def test_a_deadline_gives_the_slots_back(serve: Serve, streams: bool) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abc", max_tokens=LONG)
        call = it.stub.GenerateStream(request, timeout=0.2) if streams else it.stub.Generate(request, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (collect(call) if streams else call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await it.until(lambda: len(it.engine.aborted) == 1)
        await it.app.handler.calls.wait_until_none()

    serve(scenario, held=True)


@pytest.mark.parametrize(
    "timeout", [None, pytest.param(5.0, marks=pytest.mark.long)]
)  # seconds in which a busy machine has begun to answer
def test_stopped_reader_delays_no_other_call(
    serve: Serve, timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(it: Served) -> None:
        # A window of 64 KiB that does not grow, and large messages: the server's write blocks before long.
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
        async with grpc.aio.insecure_channel(it.address, options=window) as channel:
            request = pb.GenerateRequest(prompt="abc", max_tokens=10**6, logprobs=20)
            call = InferenceStub(channel).GenerateStream(request, timeout=timeout)
            await call.read()
            other = await it.stub.Generate(pb.GenerateRequest(prompt="xy", max_tokens=2000))
            assert other.text == "xy" * 1000
            if timeout is None:
                call.cancel()
            await it.app.handler.calls.wait_until_none()
            await it.until(lambda: it.engine.load().slots_used == 0)
            assert len(it.engine.aborted) == 1

    serve(scenario, max_context=2 * 10**6)
    assert not caplog.records


# The server's own end


async def health(it: Served, service: str = "") -> int:
    answer = await HealthStub(it.channel).Check(HealthCheckRequest(service=service))
    return answer.status


def test_health_follows_the_engine(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        assert [await health(it, name) for name in ("", SERVICE)] == [HealthCheckResponse.SERVING] * 2
        watch = HealthStub(it.channel).Watch(HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        it.engine.fail()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert await health(it) == HealthCheckResponse.NOT_SERVING
        watch.cancel()

    serve(scenario)


def test_a_failed_engine_ends_its_calls_and_takes_no_new_ones(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        it.engine.fail()
        for late in (call, it.stub.Generate(pb.GenerateRequest(prompt="abc"))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    serve(scenario, held=True)


def test_an_engine_that_dies_without_a_word_ends_its_calls(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.GenerateStream(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        it.engine.fail(silently=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    serve(scenario, held=True)


def test_health_of_a_wedged_engine(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        watch = HealthStub(it.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        call = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=3))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(pb.GenerateRequest(prompt="abc"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no iteration" in str(caught.value.details())

        def health_status() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", it.http_port or 0, timeout=WAIT_SECONDS)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            return status

        assert await asyncio.to_thread(health_status) == 503
        it.engine.release()
        assert (await call).text == "abc"
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        assert await asyncio.to_thread(health_status) == 200
        watch.cancel()

    serve(scenario, held=True, http_port=0, app={"stall_seconds": 0.05})


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_a_wedged_engine_that_nobody_restarts_fail(
    serve: Serve, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.app._RECOVERY_SECONDS", 0.1)

    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abc", max_tokens=LONG)
        call = it.stub.GenerateStream(request) if streams else it.stub.Generate(request)
        waiting = it.stub.Generate(request)
        await it.until(lambda: it.engine.load().waiting == 2)
        await it.step()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (collect(call) if streams else call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no iteration" in str(caught.value.details())
        with pytest.raises(grpc.aio.AioRpcError, match="no iteration"):
            await waiting
        it.engine.release()  # it returns, and drops what nobody waits for
        await it.until(lambda: not it.engine.load().running + it.engine.load().waiting)
        await it.app.check_health()
        assert (await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=1))).text == "a"

    serve(scenario, held=True, app={"stall_seconds": 0.1})


def test_reflection_shows_the_services(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        def services() -> set[str]:
            with grpc.insecure_channel(it.address) as channel:
                return set(ProtoReflectionDescriptorDatabase(channel).get_services())

        shown = await asyncio.to_thread(services)
        assert shown >= {SERVICE, *ROUTER_SERVICES, "grpc.health.v1.Health"}

    serve(scenario)


def test_drain_refuses_new_calls_and_lets_running_ones_finish(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=3))
        await it.until(lambda: it.engine.load().waiting == 1)
        watch = HealthStub(it.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        draining = asyncio.create_task(it.app.drain(WAIT_SECONDS))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(pb.GenerateRequest(prompt="abc"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await it.stub.GetLoad(pb.GetLoadRequest())).waiting == 1
        it.engine.release()
        assert (await call).text == "abc"
        watch.cancel()
        assert await draining == 0

    serve(scenario, held=True)


def test_drain_cuts_short_what_does_not_end_in_time(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        call = it.stub.GenerateStream(pb.GenerateRequest(prompt="abc", max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        await it.step()
        assert (await call.read()).text == "a"
        assert await it.app.drain(0.01) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await it.until(lambda: it.engine.load().slots_used == 0)

    serve(scenario, held=True)
