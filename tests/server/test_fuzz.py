"""Hostile callers of the gRPC port: nothing crashes, nothing leaks, and whoever behaves is served."""

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.chat_template import ChatTemplate
from server.grpc.server import ROUTER_SERVICES, SERVICE
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as engine_pb
from tests.server import fuzz
from tests.server.conftest import Served

Serve = Callable[..., None]
TEMPLATE = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
BATCH = 25  # hostile calls to one server
MANNERS = ("wait", "cancel", "half-close", "say nothing", "deadline")


async def assert_nothing_is_left(it: Served) -> None:
    await it.app.handler.calls.wait_until_none()
    await it.until(lambda: it.engine.load().slots_used == it.engine.load().waiting == 0)
    admission = it.app.handler.admission
    assert (admission.reserved_requests, admission.reserved_tokens, admission._waiting) == (0, 0, {})
    assert it.engine.is_healthy


async def behave(it: Served, over: asyncio.Event) -> int:
    """Good requests until it is over; returns how many."""
    served = 0
    while not over.is_set():
        answer = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=7))
        assert answer.text == "abcabca"
        served += 1
    return served


def attacked(serve: Serve, hostile: list[tuple[str, bytes, str]], resets: int) -> None:
    async def scenario(it: Served) -> None:
        over = asyncio.Event()
        good = asyncio.create_task(behave(it, over))
        await fuzz.attack(it.address, hostile)
        await fuzz.reset_connections(it.address, resets)
        over.set()
        assert await good > 0
        await assert_nothing_is_left(it)

    # The library logs each message that is none, with a traceback.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    serve(scenario, chat_template=TEMPLATE)


@settings(fuzz.together, max_examples=10)
@given(hostile=st.lists(fuzz.calls, min_size=BATCH, max_size=BATCH))
def test_hostile_calls(serve: Serve, hostile: list[tuple[str, bytes, str]]) -> None:
    attacked(serve, hostile, resets=20)


@pytest.mark.weekly
@settings(fuzz.together, max_examples=400)
@given(hostile=st.lists(fuzz.calls, min_size=BATCH, max_size=BATCH))
def test_ten_thousand_hostile_calls(serve: Serve, hostile: list[tuple[str, bytes, str]]) -> None:
    attacked(serve, hostile, resets=20)


def test_readers_who_never_read_hold_nobody_up(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        # A window of 64 KiB that does not grow, and large messages: the server's writes block before long.
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
        async with grpc.aio.insecure_channel(it.address, options=window) as channel:
            stub: Any = InferenceStub(channel)
            endless = pb.GenerateRequest(prompt="abc", max_tokens=100_000, logprobs=20)
            calls = [stub.GenerateStream(endless) for _ in range(20)]
            await it.until(lambda: it.engine.iterations > 5000)  # megabytes, far more than its buffers hold
            good = it.stub.Generate(pb.GenerateRequest(prompt="xy", max_tokens=4, priority=9))
            for call in calls:
                call.cancel()
            assert (await good).text == "xyxy"
        await assert_nothing_is_left(it)

    serve(scenario, max_context=2 * 10**6)


@pytest.mark.long
def test_memory_does_not_grow_with_hostile_calls(serve: Serve) -> None:
    hostile = [
        (method, pb.GenerateRequest(prompt=prompt, max_tokens=most).SerializeToString(), manner)
        for method in (f"/{SERVICE}/Generate", f"/{SERVICE}/GenerateStream")
        for prompt, most in (("abc", 50), ("", 1), ("abc", -1), ("x" * 5000, 5))
        for manner in MANNERS
    ]
    hostile += [
        (f"/{ROUTER_SERVICES[0]}/Generate", message.SerializeToString(), manner)
        for message in (
            engine_pb.GenerateRequest(text="abc", stream=True, request_id="a"),
            engine_pb.GenerateRequest(text="", request_id="a"),
            engine_pb.GenerateRequest(tokenized=engine_pb.TokenizedInput(input_ids=[999])),
        )
        for manner in MANNERS
    ]
    abort = engine_pb.AbortRequest(request_ids=["a"]).SerializeToString()
    hostile.insert(len(hostile) // 2, (f"/{ROUTER_SERVICES[0]}/Abort", abort, "wait"))

    def of_ours() -> int:
        gc.collect()
        modules = [str(type(each).__module__) for each in gc.get_objects()]
        kept = ("jaxserve.iteration", "jaxserve.stats")  # what the live view keeps is bounded by itself
        return sum(each.startswith(("server.", "jaxserve.")) and each not in kept for each in modules)

    async def scenario(it: Served) -> None:
        gc.freeze()  # what other tests have left, which may be millions of objects
        counts = []
        for _ in range(12):
            await fuzz.attack(it.address, hostile)
            for _ in range(4):  # the library may hold the last calls, with all that they refer to, until others come
                await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=7))
            await assert_nothing_is_left(it)
            counts.append(of_ours())
        assert min(counts[-4:]) <= min(counts[:4]) + 5, counts

    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    try:
        serve(scenario)
    finally:
        gc.unfreeze()
