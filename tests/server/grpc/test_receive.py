"""Messages that do not arrive, and connections without a call."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from server.grpc import receive
from server.grpc import server as grpc_server
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served

Serve = Callable[..., None]
METHODS = (
    "/jaxserve.v1.Inference/Generate",
    "/jaxserve.v1.Inference/GenerateStream",
    "/jaxserve.v1.Inference/Tokenize",
)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code()


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_does_not_come_is_not_waited_for(
    serve: Serve, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(it: Served) -> None:
        silent: Any = it.channel.stream_stream(method)()
        assert await code_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
        ended: Any = it.channel.stream_stream(method)(iter(()))
        assert await code_of(ended) is grpc.StatusCode.INVALID_ARGUMENT
        assert (await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=1))).text == "a"

    monkeypatch.setattr(receive, "MESSAGE_SECONDS", 0.05)
    serve(scenario)


def test_messages_that_wait_to_be_parsed_have_a_budget(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        for size, code in ((70_000, grpc.StatusCode.INVALID_ARGUMENT), (110_000, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.stub.Generate(pb.GenerateRequest(prompt="a" * size))
            assert caught.value.code() is code

    monkeypatch.setattr(receive, "MAX_UNFINISHED_BYTES", 100_000)
    serve(scenario)


def test_unfinished_messages_have_one_budget(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        silent: list[Any] = [it.channel.stream_stream(METHODS[0])() for _ in range(19)]
        codes = [asyncio.create_task(code_of(call)) for call in silent]
        done: set[Any] = set()
        while len(done) < 3:
            done, _ = await asyncio.wait(codes, timeout=0.05)
        assert {each.result() for each in done} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert len(done) == 3  # the others are within the budget
        assert (await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=1))).text == "a"
        for call in silent:
            call.cancel()
        await asyncio.gather(*codes, return_exceptions=True)

    monkeypatch.setattr(receive, "_SLOW_SECONDS", 0.05)
    serve(scenario)


def test_an_idle_connection_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another, which has a call under way for longer, is not."""

    async def scenario(it: Served) -> None:
        under_way = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2))
        await it.until(lambda: it.engine.load().waiting == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.address.rpartition(":")[2]))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # and empty settings
        told = await reader.read(-1)
        assert told.endswith(b"connection idle"), told  # the reason in the GOAWAY frame
        writer.close()
        it.engine.release()
        assert (await under_way).text == "ab"

    monkeypatch.setattr(grpc_server, "IDLE_SECONDS", 0.05)
    serve(scenario, held=True)
