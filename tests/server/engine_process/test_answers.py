"""Calls are answered as if the engine were in the server's process."""

import asyncio

import grpc

from jaxserve.scheduler.prefix_changes import BlocksStored, CacheCleared
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import collect
from tests.server.engine_process.conftest import Remote
from tests.server.engine_process.test_supervisor import LONG, RunRemote, ask, refusal, retry_seconds


def test_answers_come_as_from_an_engine_in_this_process(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        whole = await it.stub.Generate(ask("abé", logprobs=2, prompt_logprobs=1, seed=5))
        assert list(whole.token_ids) == list("abéabé".encode())[:7]
        assert list(whole.logprobs) == [-(i % 8) / 4 for i in range(7)]
        assert len(whole.top_logprobs) == 7
        assert list(whole.prompt_logprobs) == [-0.25, -0.5, -0.75]
        pieces = await collect(it.stub.GenerateStream(ask("xy", 100)))
        assert "".join(piece.text for piece in pieces) == "xy" * 50
        many = await asyncio.gather(*(it.stub.Generate(ask(f"{n:03}", 30)) for n in range(40)))
        assert [each.text for each in many] == [f"{n:03}" * 10 for n in range(40)]
        await it.until(lambda: it.engine.load().running == 0)
        load = await it.stub.GetLoad(pb.GetLoadRequest())
        assert (load.running, load.waiting, load.max_rows) == (0, 0, 4)
        assert load.generated_tokens == 7 + 100 + 40 * 30
        assert (await it.stub.GetModel(pb.GetModelRequest())).device == "abacus"
        live = (await it.http.get("/live")).json()
        assert live["about"]["rows"] == 4
        assert any(chunks for *_, chunks, _ in live["iterations"])
        while 'jaxserve_iteration_tokens_sum{model_name="echo"} 1307.0' not in (await it.http.get("/metrics")).text:
            pass  # the last iteration's record comes behind its events
        assert it.engine.load().outstanding_tokens == 0

    run_remote(scenario)


def test_kv_events_come_and_a_new_engine_has_no_blocks(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        await it.stub.Generate(ask("sixteen letters."))
        log = it.app.handler.kv_events
        assert log is not None
        batches = log.follow(0)
        (stored,) = (await anext(batches)).changes
        assert isinstance(stored, BlocksStored)
        assert (bytes(stored.tokens.tolist()), stored.parent, len(stored.digests)) == (b"sixteen letters.", None, 4)
        it.supervisor.give_up("a test")
        assert (await anext(batches)).changes == (CacheCleared(),)
        await it.stub.Generate(ask("sixteen letters."))
        assert (await anext(batches)).changes == (stored,)

    run_remote(scenario)


def test_bad_requests_are_refused_by_the_front(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        error = await refusal(it.stub.Generate(pb.GenerateRequest(prompt="a", stop_token_ids=[999])))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "stop_token_ids: has token id 999" in str(error.details())
        assert (await it.stub.Generate(ask())).text == "abcabca"

    run_remote(scenario)


def test_a_cancelled_call_gives_its_slots_back(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        call = it.stub.GenerateStream(ask(max_tokens=LONG))
        await call.read()
        await it.until(lambda: it.engine.load().slots_used > 0)
        call.cancel()
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert not it.engine._requests

    run_remote(scenario)


def test_overload_is_refused_within_the_bounds(run_remote: RunRemote) -> None:
    async def scenario(it: Remote) -> None:
        long = it.stub.GenerateStream(ask(max_tokens=LONG))
        await long.read()
        calls = [asyncio.ensure_future(it.stub.Generate(ask())) for _ in range(3)]
        await it.until(lambda: it.engine.load().waiting == 3)
        error = await refusal(it.stub.Generate(ask()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(error) is not None
        calls.pop().cancel()
        await it.until(lambda: it.engine.load().waiting == 2)
        long.cancel()
        assert [(await call).text for call in calls] == ["abcabca"] * 2

    run_remote(scenario, restarts=None, config={"max_queued_requests": 3, "max_rows": 1})
