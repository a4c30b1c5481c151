"""vLLM's gRPC protocol over a real connection, as routers speak it, on an engine whose answers can be worked out."""

import asyncio
from typing import Any

import grpc
import pytest

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import Grammar
from server.call import RequestTiming
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.compat import wire
from tests.server.compat.vllm_calls import Serve, ask, complete, generate, step_by_step, watched
from tests.server.conftest import Served
from tests.server.fake_engine import EOS

# Answers


def test_a_stream_has_chunks_and_then_the_whole(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        *chunks, last = await step_by_step(it, stub.Generate(ask(stream=True, max_tokens=4)), 4)
        for token, message in zip(b"abca", chunks, strict=True):
            assert list(message.chunk.token_ids) == [token]
            assert (message.chunk.prompt_tokens, message.chunk.completion_tokens, message.chunk.index) == (3, 1, 0)
        whole = last.complete
        assert (bytes(whole.output_ids), whole.finish_reason) == (b"abca", "length")
        assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (3, 4, 0)
        assert whole.WhichOneof("matched_stop") is None

    serve(scenario, held=True)


def test_without_stream_there_is_one_message_a_sample(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = ask(max_tokens=2, n=3)
        request.tokenized.input_ids.extend(b"xy")  # takes the text's place
        messages = await generate(it, request)
        assert sorted(message.complete.index for message in messages) == [0, 1, 2]
        assert all(bytes(message.complete.output_ids) == b"xy" for message in messages)
        assert [timing.request.sampling.sample_index for timing in timings] == [0, 1, 2]
        assert {timing.call.protocol for timing in timings} == {"vllm"}

    timings: list[RequestTiming] = []
    serve(lambda it: watched(it, timings, scenario))


def test_what_is_not_given_is_what_vllm_has(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        assert bytes((await complete(it, ask("ab"))).output_ids) == b"ab" * 7  # to the end of the context
        sampling = timings[0].request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
        given = ask("ab", temperature=0, top_p=0.5, top_k=3, min_p=0.25, max_tokens=1, seed=-4, ignore_eos=True)
        given.sampling_params.logit_bias[97] = 1.5
        await complete(it, given)
        sampling = timings[1].request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.25)
        assert (sampling.seed, sampling.logit_bias, sampling.ignore_eos) == (-4, ((97, 1.5),), True)

    timings: list[RequestTiming] = []
    serve(lambda it: watched(it, timings, scenario), max_context=16)


def test_prompts_are_cut_at_their_beginning(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        assert bytes((await complete(it, ask("abcdef", truncate_prompt_tokens=2, max_tokens=4))).output_ids) == b"efef"
        long = await complete(it, ask("ab" * 20, truncate_prompt_tokens=-1, max_tokens=6))
        assert (long.prompt_tokens, bytes(long.output_ids)) == (10, b"ababab")
        for wrong in (0, -2):
            with pytest.raises(grpc.aio.AioRpcError, match="truncate_prompt_tokens: is"):
                await complete(it, ask(truncate_prompt_tokens=wrong, max_tokens=1))

    serve(scenario, max_context=16)


def test_constraint_and_min_tokens(serve: Serve) -> None:
    schema = '{"type": "null"}'
    forms: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"json_schema": schema}, Grammar(kind="json_schema", text='{"type":"null"}')),
        ({"json_object": True}, Grammar(kind="json_schema", text='{"type":"object"}')),
        ({"json_object": False}, None),
        ({"regex": "a+"}, Grammar(kind="regex", text="a+")),
        ({"grammar": 'start: "a"'}, Grammar(kind="lark", text='start: "a"')),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, Grammar(kind="choice", text='["a", "b"]')),
    ]

    async def scenario(it: Served) -> None:
        for sampling, expected in forms:
            await complete(it, ask(max_tokens=3, min_tokens=2, **sampling))
            assert (timings[-1].request.sampling.grammar, timings[-1].request.sampling.min_tokens) == (expected, 2)
        await complete(it, ask("ab", min_tokens=10))  # more than a request without a limit would begin with
        assert (timings[-1].request.sampling.min_tokens, timings[-1].request.sampling.max_tokens) == (10, 14)

    timings: list[RequestTiming] = []
    serve(lambda it: watched(it, timings, scenario), max_context=16)


def test_logprobs_come_as_asked(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        call = stub.Generate(ask(stream=True, max_tokens=2, logprobs=2, prompt_logprobs=1))
        first, second, whole = await step_by_step(it, call, 2)
        first, second, whole = first.chunk, second.chunk, whole.complete
        for told in (first.input_logprobs, whole.input_logprobs):
            assert list(told.token_ids) == list(b"abc")
            assert [each.HasField("value") for each in told.token_logprobs] == [False, True, True]
            assert [each.value for each in told.token_logprobs] == [0, -0.25, -0.5]
            assert [list(each.token_ids) for each in told.top_logprobs] == [[], [1], [2]]
        assert not second.HasField("input_logprobs")
        assert list(first.output_logprobs.token_logprobs) == [0]
        assert list(second.output_logprobs.token_logprobs) == [-0.25]
        assert list(whole.output_logprobs.token_logprobs) == [0, -0.25]
        assert list(whole.output_logprobs.token_ids) == list(b"ab")
        assert [list(each.token_ids) for each in whole.output_logprobs.top_logprobs] == [[0, 1], [1, 2]]
        assert [list(each.values) for each in whole.output_logprobs.top_logprobs] == [[0, -0.125]] * 2
        it.engine.release()
        plain = await complete(it, ask(max_tokens=2, logprobs=0))
        assert (len(plain.output_logprobs.token_logprobs), len(plain.output_logprobs.top_logprobs)) == (2, 0)
        assert not (await complete(it, ask(max_tokens=2))).HasField("output_logprobs")

    serve(scenario, held=True)


def test_what_ended_an_answer_is_told(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        async def ending(request: pb.GenerateRequest) -> tuple[bytes, str, object]:
            told = await complete(it, request)
            which = told.WhichOneof("matched_stop")
            return bytes(told.output_ids), told.finish_reason, getattr(told, which) if which else None

        assert await ending(ask("abcde", stop=["x", "cd", "de"])) == (b"abcd", "stop", "cd")
        assert await ending(ask("abcde", stop_token_ids=[ord("b")])) == (b"ab", "stop", ord("b"))
        assert await ending(ask("abcde", max_tokens=3, stop=["x"])) == (b"abc", "length", None)
        request = ask(max_tokens=9)
        request.tokenized.input_ids.extend([97, EOS])
        told = await complete(it, request)
        assert (list(told.output_ids), told.finish_reason, told.WhichOneof("matched_stop")) == ([97, EOS], "stop", None)

    serve(scenario)


def test_numbers_on_the_wire_are_the_published_ones(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        tokenized = wire.of_bytes(1, b"not read") + wire.of_bytes(2, wire.packed(*b"abc"))
        sampling = wire.of_float(1, 0.5) + wire.of_float(2, 0.25) + wire.of_varint(3, 7) + wire.of_float(7, 2)
        sampling += wire.of_varint(8, 2) + wire.of_bytes(10, b"x") + wire.of_bytes(11, wire.packed(120))
        sampling += wire.of_varint(14, 1) + wire.of_varint(22, 1) + wire.of_varint(23, 0) + wire.of_varint(24, 9)
        request = wire.of_bytes(1, b"mine") + wire.of_bytes(2, tokenized) + wire.of_bytes(4, sampling)
        call = it.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(request + wire.of_varint(5, 1))
        first, second, last = map(wire.fields, await step_by_step(it, call, 2))
        it.engine.release()

        given = timings[0].request.sampling
        assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (0.5, 0.25, 7, 2)
        assert (given.max_tokens, given.stop, given.stop_token_ids, given.ignore_eos) == (2, ("x",), (120,), True)
        assert (given.logprobs, given.prompt_logprobs, given.seed, timings[0].call.id) == (1, 0, 9, "mine")

        assert first.keys() == second.keys() == {1}
        chunk = wire.fields(second[1])
        assert (wire.unpacked(chunk[1]), chunk[2], chunk[3]) == ([98], 3, 1)
        scored = wire.fields(chunk[5])
        assert (wire.floats(scored[1]), wire.unpacked(scored[2])) == ([-0.25], [98])
        top = wire.fields(scored[3])
        assert (wire.floats(top[1]), wire.unpacked(top[2])) == ([0.0], [1])
        prompt = wire.fields(wire.fields(first[1])[6])
        assert wire.unpacked(prompt[2]) == list(b"abc")
        assert prompt[1][0] == b""  # of the first token there is none

        assert last.keys() == {2}
        whole = wire.fields(last[2])
        assert (wire.unpacked(whole[1]), whole[2], whole[3], whole[4]) == (list(b"ab"), b"length", 3, 2)
        assert 5 not in whole  # no cached tokens, and the first sample

        stopping = wire.of_bytes(2, wire.of_bytes(2, wire.packed(*b"abc")))
        call = it.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        (told,) = [message async for message in call(stopping + wire.of_bytes(4, wire.of_bytes(10, b"bc")))]
        assert wire.fields(wire.fields(told)[2])[11] == b"bc"
        (told,) = [message async for message in call(stopping + wire.of_bytes(4, wire.of_bytes(11, b"b")))]
        assert wire.fields(wire.fields(told)[2])[10] == ord("b")

        health = await it.channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")(b"")
        assert wire.fields(health) == {1: 1, 2: b"serving"}
        info = wire.fields(await it.channel.unary_unary("/vllm.grpc.engine.VllmEngine/GetModelInfo")(b""))
        assert (info[1], info[2], info[3], info[4], info[6], info[8]) == (b"echo", 1, 2048, 257, b"echo", b"fake")
        loads = wire.fields(await it.channel.unary_unary("/vllm.grpc.engine.VllmEngine/GetLoads")(b""))
        load = wire.fields(loads[4])
        assert (loads[2], loads[3], load[6], load[11]) == (b"1.2.3", 1, 8192, 4)

    timings: list[RequestTiming] = []
    serve(lambda it: watched(it, timings, scenario), held=True)


# What is told of model and server


def test_model_server_and_loads_are_told(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.model_path, model.model_type) == ("echo", "echo", "fake")
        assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (2048, 257, [EOS])
        assert (model.is_generation, model.supports_vision) == (True, False)
        before = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (before.active_requests, before.last_receive_timestamp, before.server_type) == (0, 0, "jaxserve")
        calls = [asyncio.create_task(generate(it, ask(max_tokens=9))) for _ in range(3)]
        await it.until(lambda: it.engine.load().waiting == 3)
        await it.step(2)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.data_parallel_size) == (3, False, 1)
        assert server.last_receive_timestamp > 0 < server.uptime_seconds
        loads = await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        assert (loads.version, loads.dp_rank_count, len(loads.loads)) == ("1.2.3", 1, 1)
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
        assert (load.num_used_tokens, load.max_total_num_tokens, load.max_running_requests) == (10, 8192, 2)
        assert (load.token_usage, load.utilization) == (10 / 8192, 1)
        assert load.cache_hit_rate == 2 / 6  # the second prompt was the first one's
        it.engine.release()
        await asyncio.gather(*calls)

    serve(scenario, held=True, config=EngineConfig(max_rows=2))


def test_health_follows_the_engine(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        it.engine.fail()
        await it.until(lambda: not it.engine.is_healthy)
        told = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (told.healthy, told.message) == (False, "the engine has failed")
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused

    serve(scenario)
