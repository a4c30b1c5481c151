"""Calls of vLLM's gRPC protocol, as routers make them."""

from collections.abc import Callable
from typing import Any

import grpc

from server.call import Observer, RequestTiming
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.conftest import Served

Serve = Callable[..., None]
LONG = 1500  # tokens: more than any test waits for


def ask(text: str = "abc", request_id: str = "", stream: bool = False, **sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**sampling)
    return pb.GenerateRequest(request_id=request_id, text=text, sampling_params=params, stream=stream)


async def generate(it: Served, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
    stub: Any = VllmEngineStub(it.channel)
    return [message async for message in stub.Generate(request, **call)]


async def step_by_step(it: Served, call: Any, iterations: int) -> list[Any]:
    """The messages of a stream on a held engine: a chunk for each iteration, then the whole."""
    messages = []
    for _ in range(iterations):
        await it.until(lambda: it.engine.load().running + it.engine.load().waiting == 1)
        await it.step()
        messages.append(await call.read())
    messages.append(await call.read())
    assert await call.read() is grpc.aio.EOF
    return messages


async def complete(it: Served, request: pb.GenerateRequest, **call: Any) -> pb.GenerateComplete:
    (message,) = await generate(it, request, **call)
    return message.complete


async def watched(it: Served, timings: list[RequestTiming], scenario: Callable[[Served], Any]) -> None:
    """Runs a scenario and keeps what observers are told of its requests."""

    class Seen(Observer):
        def started(self, timing: RequestTiming) -> None:
            timings.append(timing)

    it.app.handler.observers.append(Seen())
    await scenario(it)
