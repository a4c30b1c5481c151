"""vLLM's gRPC protocol over a real connection, as routers speak it, on an engine whose answers can be worked out."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from jaxserve.config import EngineConfig
from jaxserve.request import Grammar
from jaxserve.tokenizer import Tokenizer
from server.auth import ApiKeys
from server.generation import Life
from server.grpc_server import ROUTER_SERVICES
from server.proto.jaxserve.v1 import inference_pb2
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server.conftest import Served
from tests.server.fake_engine import EOS, WAIT_SECONDS
from tests.server.routers import wire
from tests.server.test_service import refusal

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
        assert [life.request.sampling.sample_index for life in lives] == [0, 1, 2]
        assert {life.call.protocol for life in lives} == {"vllm"}

    lives: list[Life] = []
    serve(lambda it: _watched(it, lives, scenario))


def test_what_is_not_given_is_what_vllm_has(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        assert bytes((await complete(it, ask("ab"))).output_ids) == b"ab" * 7  # to the end of the context
        sampling = lives[0].request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
        given = ask("ab", temperature=0, top_p=0.5, top_k=3, min_p=0.25, max_tokens=1, seed=-4, ignore_eos=True)
        given.sampling_params.logit_bias[97] = 1.5
        await complete(it, given)
        sampling = lives[1].request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.25)
        assert (sampling.seed, sampling.logit_bias, sampling.ignore_eos) == (-4, ((97, 1.5),), True)

    lives: list[Life] = []
    serve(lambda it: _watched(it, lives, scenario), max_context=16)


def test_prompts_are_cut_at_their_beginning(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        assert bytes((await complete(it, ask("abcdef", truncate_prompt_tokens=2, max_tokens=4))).output_ids) == b"efef"
        long = await complete(it, ask("ab" * 20, truncate_prompt_tokens=-1, max_tokens=6))
        assert (long.prompt_tokens, bytes(long.output_ids)) == (10, b"ababab")
        for wrong in (0, -2):
            with pytest.raises(grpc.aio.AioRpcError, match="truncate_prompt_tokens: is"):
                await complete(it, ask(truncate_prompt_tokens=wrong, max_tokens=1))

    serve(scenario, max_context=16)


def test_a_constraint_is_a_grammar_and_the_least_tokens_are_kept(serve: Serve) -> None:
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
            assert (lives[-1].request.sampling.grammar, lives[-1].request.sampling.min_tokens) == (expected, 2)
        await complete(it, ask("ab", min_tokens=10))  # more than a request without a limit would begin with
        assert (lives[-1].request.sampling.min_tokens, lives[-1].request.sampling.max_tokens) == (10, 14)

    lives: list[Life] = []
    serve(lambda it: _watched(it, lives, scenario), max_context=16)


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

        given = lives[0].request.sampling
        assert (given.temperature, given.top_p, given.top_k, given.repetition_penalty) == (0.5, 0.25, 7, 2)
        assert (given.max_tokens, given.stop, given.stop_token_ids, given.ignore_eos) == (2, ("x",), (120,), True)
        assert (given.logprobs, given.prompt_logprobs, given.seed, lives[0].call.id) == (1, 0, 9, "mine")

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

    lives: list[Life] = []
    serve(lambda it: _watched(it, lives, scenario), held=True)


# Abort


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


def test_a_call_whose_reader_has_stopped_reading_is_aborted_in_the_engine(serve: Serve) -> None:
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


# Refusals


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("tokenized", pb.GenerateRequest()),
        ("prompt", ask("")),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput())),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[257]))),
        ("prompt_token_ids", pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1]))),
        ("max_tokens", ask(max_tokens=0)),
        ("max_tokens", ask(max_tokens=2048)),
        ("temperature", ask(temperature=-1)),
        ("temperature", ask(temperature=float("nan"))),
        ("top_p", ask(top_p=1.5)),
        ("min_p", ask(min_p=float("inf"))),
        ("n", ask(n=129)),
        ("logprobs", ask(logprobs=-1)),
        ("prompt_logprobs", ask(prompt_logprobs=21)),
        ("stop", ask(stop=["x"] * 17)),
        ("stop_token_ids", ask(stop_token_ids=[2**31])),
        ("logit_bias", ask(logit_bias={97: 101})),
        ("structural_tag", ask(structural_tag="{}")),
        ("regex", ask(regex="(a")),
        ("json_schema", ask(json_schema="{")),
        ("choice", ask(choice=pb.ChoiceConstraint())),
        ("min_tokens", ask(max_tokens=2, min_tokens=3)),
        ("mm_inputs", pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs())),
        ("kv_transfer_params", pb.GenerateRequest(text="a", kv_transfer_params=pb.KvTransferParams())),
        ("kv_transfer_params_json", pb.GenerateRequest(text="a", kv_transfer_params_json="{}")),
        ("data_parallel_rank", pb.GenerateRequest(text="a", data_parallel_rank=1)),
        ("request_id", ask(request_id="x" * 257)),
    ],
)
def test_a_wrong_field_is_named(serve: Serve, field: str, request_: pb.GenerateRequest) -> None:
    async def scenario(it: Served) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(it, request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = refusal(caught.value, error_details_pb2.BadRequest()).field_violations
        assert violation.field == field

    serve(scenario)


def test_other_calls_refuse_what_they_cannot_do(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        stub: Any = VllmEngineStub(it.channel)
        for call in (
            stub.Abort(pb.AbortRequest(request_ids=["a"] * 5000)),
            stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for method in ("Embed", "GetTokenizer", "SubscribeKvEvents"):  # of the interface, and not of the subset
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{method}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    serve(scenario)


def test_a_full_queue_a_rate_and_an_end_are_told_as_to_anybody(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\nrate = 0.001\nburst = 2\n[other]\nkeys = ["key-of-other"]\n')
    team, other = ({"metadata": [("authorization", f"Bearer key-of-{name}")]} for name in ("team", "other"))

    async def scenario(it: Served) -> None:
        async def code(**call: Any) -> Any:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(it, ask(max_tokens=1), **call)
            return caught.value

        stub: Any = VllmEngineStub(it.channel)
        first = stub.Generate(ask(request_id="mine", max_tokens=LONG), **team)
        await it.until(lambda: it.engine.load().waiting == 1)
        full = await code(**team)
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal(full, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds() > 0
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]), **other)  # whose id it is not
        await it.step()
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]), **team)
        told = (await first.read()).complete
        assert (told.finish_reason, bytes(told.output_ids)) == ("abort", b"a")
        it.engine.release()
        assert bytes((await complete(it, ask(max_tokens=1), **team)).output_ids) == b"a"
        rate = await code(**team)
        assert (rate.code(), "team may make" in rate.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        it.surface.door.close("the server is stopping")
        assert (await code(**other)).code() is grpc.StatusCode.UNAVAILABLE

    serve(scenario, held=True, config=EngineConfig(max_queued_requests=1), surface={"keys": ApiKeys(keys)})


def test_no_rpc_of_a_router_is_open_without_a_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[team]\nkeys = ["key-of-team"]\n')
    methods = {
        "vllm.grpc.engine.VllmEngine": "Generate HealthCheck Abort GetModelInfo GetServerInfo GetLoads Embed",
        "inference.GRPCInferenceService": "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer",
    }
    assert tuple(methods) == ROUTER_SERVICES

    async def scenario(it: Served) -> None:
        for service, names in methods.items():
            for name in names.split():
                for metadata in ((), (("authorization", "Bearer nobodys-key"),)):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await it.channel.unary_unary(f"/{service}/{name}")(b"", metadata=metadata)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub: Any = VllmEngineStub(it.channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest(), metadata=[("x-api-key", "key-of-team")])).healthy

    serve(scenario, surface={"keys": ApiKeys(keys)})


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


async def _watched(it: Served, lives: list[Life], scenario: Callable[[Served], Any]) -> None:
    """Runs a scenario and keeps what observers are told of its requests."""

    class Seen:
        def started(self, life: Life) -> None:
            lives.append(life)

        def tokens(self, *_: Any) -> None: ...
        def ended(self, *_: Any) -> None: ...
        def refused(self, *_: Any) -> None: ...

    it.surface.door.observers.append(Seen())
    await scenario(it)
