"""Calls of vLLM's protocol that end before their answers: aborted by their ids, or left."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from jaxserve.config import EngineConfig
from jaxserve.text.tokenizer import Tokenizer
from server.proto.jaxserve.v1 import inference_pb2
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.compat.vllm_calls import LONG, Serve, ask
from tests.server.conftest import Served
from tests.server.fake_engine import WAIT_SECONDS


def test_abort_ends_the_calls_of_an_id_and_no_other(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        doomed = [stub.Generate(ask(request_id="doomed", stream=stream, max_tokens=LONG)) for stream in (True, False)]
        other = stub.Generate(ask("xy", request_id="other", max_tokens=3))
        own = it.stub.Generate(inference_pb2.GenerateRequest(prompt="pq", max_tokens=3, request_id="doomed"))
        await it.until(lambda: it.engine.load().waiting == 4)
        await it.step(2)
        assert list((await doomed[0].read()).chunk.token_ids) == [97]
        assert list((await doomed[0].read()).chunk.token_ids) == [98]
        await stub.Abort(pb.AbortRequest(request_ids=["doomed", "nobody's"]))
        for call in doomed:
            told = (await call.read()).complete
            assert (told.finish_reason, bytes(told.output_ids), told.prompt_tokens) == ("abort", b"ab", 3)
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        await it.until(lambda: len(it.engine.aborted) == 2)
        it.engine.release()
        assert bytes((await other.read()).complete.output_ids) == b"xyx"
        assert (await own).text == "pqp"  # another protocol's ids are its own
        await stub.Abort(pb.AbortRequest(request_ids=["doomed"]))  # again, to no effect

    serve(scenario, held=True)


def test_a_finished_sample_is_not_aborted_with_the_others(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        call = stub.Generate(ask("ab", request_id="a", max_tokens=2, n=2))
        await it.until(lambda: it.engine.load().waiting == 2)
        await it.step(2)  # one row: the first sample is whole
        assert (await call.read()).complete.finish_reason == "length"
        await stub.Abort(pb.AbortRequest(request_ids=["a"]))
        told = (await call.read()).complete
        assert (told.index, told.finish_reason) == (1, "abort")
        assert await call.read() is grpc.aio.EOF

    serve(scenario, held=True, config=EngineConfig(max_rows=1))


def test_a_call_is_aborted_while_its_prompt_is_tokenised(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def slowly(self: Tokenizer, *args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert go_on.wait(WAIT_SECONDS)
        return encode(self, *args, **kwargs)

    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        monkeypatch.setattr(Tokenizer, "encode", slowly)
        call = stub.Generate(ask("x" * 10_001, request_id="a", max_tokens=LONG))
        answer = asyncio.create_task(call.read())
        assert await asyncio.to_thread(reached.wait, WAIT_SECONDS)
        await stub.Abort(pb.AbortRequest(request_ids=["a"]))
        go_on.set()
        assert (await answer).complete.finish_reason == "abort"

    serve(scenario, held=True, max_context=20_000)


def test_abort_of_a_call_with_a_stopped_reader(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
        async with grpc.aio.insecure_channel(it.address, options=window) as channel:
            stub: Any = VllmEngineStub(channel)
            call = stub.Generate(ask(request_id="a", stream=True, max_tokens=10**6, logprobs=20))
            await it.until(lambda: it.engine.iterations > 5000)  # megabytes, far more than its buffers hold
            await VllmEngineStub(it.channel).Abort(pb.AbortRequest(request_ids=["a"]))
            await it.until(lambda: it.engine.load().slots_used == 0)
            call.cancel()

    serve(scenario, max_context=2 * 10**6)


def test_a_caller_who_leaves_frees_its_slots(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        call = stub.Generate(ask(stream=True, max_tokens=LONG))
        await it.until(lambda: it.engine.load().waiting == 1)
        await it.step()
        await call.read()
        call.cancel()
        await it.until(lambda: len(it.engine.aborted) == 1)
        assert it.engine.load().slots_used == 0

    serve(scenario, held=True)
