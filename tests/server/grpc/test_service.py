"""The gRPC service over a real connection, on an engine whose answers can be worked out by hand."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from jaxserve.config import EngineConfig
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served, collect, refusal
from tests.server.fake_engine import EOS

Serve = Callable[..., None]
LONG = 1500  # tokens: more than any test waits for


def test_generate_answers_whole(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=5, request_id="mine"))
        assert answer.text == "abcab"
        assert list(answer.token_ids) == list(b"abcab")
        assert answer.finish_reason == pb.FINISH_REASON_LENGTH
        assert answer.request_id == "mine"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 5, 0)
        assert not answer.logprobs

    serve(scenario)


def test_stream_joins_to_the_unary_answer(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abc", max_tokens=7, seed=5, logprobs=2, prompt_logprobs=1)
        call = it.stub.GenerateStream(request)
        messages = []
        for i in range(7):
            await it.until(lambda: it.engine.load().running + it.engine.load().waiting == 1)
            await it.step()
            messages.append(await call.read())
            assert list(messages[-1].token_ids) == [b"abcabca"[i]]
        assert await call.read() is grpc.aio.EOF
        assert [message.finish_reason for message in messages[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * 6
        assert not any(message.HasField("usage") or message.HasField("seed") for message in messages[:-1])

        joined, text = pb.GenerateResponse(), ""
        for message in messages:
            text += message.text
            joined.MergeFrom(message)
        joined.text = text
        it.engine.release()
        whole = await it.stub.Generate(request)
        assert whole.usage.cached_tokens == 2  # the fake has heard this prompt before
        whole.usage.cached_tokens, whole.request_id = 0, joined.request_id
        assert joined == whole

    serve(scenario, held=True)


def test_logprobs_come_as_asked(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        plain = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=3, logprobs=0, prompt_logprobs=0))
        assert list(plain.logprobs) == [0.0, -0.25, -0.5]
        assert not plain.top_logprobs
        assert list(plain.prompt_logprobs) == [-0.25, -0.5]
        assert not plain.prompt_top_logprobs
        more = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2, logprobs=3, prompt_logprobs=1))
        assert [list(top.token_ids) for top in more.top_logprobs] == [[0, 1, 2], [1, 2, 3]]
        assert [list(top.logprobs) for top in more.top_logprobs] == [[0.0, -0.125, -0.25]] * 2
        assert [list(top.token_ids) for top in more.prompt_top_logprobs] == [[1], [2]]

    serve(scenario)


def test_a_seed_is_drawn_and_reported_unless_nothing_is_drawn(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        def ask(**fields: Any) -> Any:
            return it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=1, **fields))

        first, second = await ask(), await ask()
        assert first.seed != second.seed
        assert (await ask(seed=-(2**63))).seed == -(2**63)
        assert not (await ask(temperature=0.0)).HasField("seed")

    serve(scenario)


def test_characters_are_never_split(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        prompt = "é€😀x"
        messages = await collect(it.stub.GenerateStream(pb.GenerateRequest(prompt=prompt, max_tokens=30)))
        assert "".join(message.text for message in messages) == prompt * 3
        assert all("\ufffd" not in message.text for message in messages)
        assert sum(len(message.token_ids) for message in messages) == 30

    serve(scenario)


def test_stop_strings(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abcde", max_tokens=LONG, stop=["cdx", "dea"])
        messages = await collect(it.stub.GenerateStream(request))
        assert "".join(message.text for message in messages) == "abc"
        assert all(message.text in ("", "a", "b", "c", "ab", "bc", "abc") for message in messages)
        assert messages[-1].finish_reason == pb.FINISH_REASON_STOP
        assert messages[-1].usage.completion_tokens == 6  # the token that completed "dea" included
        await it.until(lambda: it.engine.load().slots_used == 0)

    serve(scenario)


def test_eos_and_stop_tokens_have_no_text(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        ids = pb.TokenIds(ids=[97, 98, EOS])
        ended = await it.stub.Generate(pb.GenerateRequest(prompt_token_ids=ids))
        assert (ended.text, list(ended.token_ids)) == ("ab", [97, 98, EOS])
        assert ended.finish_reason == pb.FINISH_REASON_EOS
        stopped = await it.stub.Generate(pb.GenerateRequest(prompt_token_ids=ids, stop_token_ids=[98]))
        assert (stopped.text, list(stopped.token_ids)) == ("a", [97, 98])
        assert stopped.finish_reason == pb.FINISH_REASON_STOP
        on = await it.stub.Generate(pb.GenerateRequest(prompt_token_ids=ids, ignore_eos=True, max_tokens=4))
        assert list(on.token_ids) == [97, 98, EOS, 97]

    serve(scenario)


def test_samples_come_in_one_answer_or_by_their_index(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abc", max_tokens=4, n=3, seed=7, prompt_logprobs=0)
        whole = await it.stub.Generate(request)
        assert [sample.index for sample in whole.samples] == [0, 1, 2]
        assert {sample.text for sample in whole.samples} == {"abca"}
        assert [list(sample.prompt_logprobs) for sample in whole.samples] == [[-0.25, -0.5]] * 3
        assert [(sample.seed, sample.usage.completion_tokens) for sample in whole.samples] == [(7, 4)] * 3
        assert (whole.text, whole.request_id != "") == ("", True)
        parts = [pb.GenerateResponse(index=index) for index in range(3)]
        for message in await collect(it.stub.GenerateStream(request)):
            text = parts[message.index].text + message.text
            parts[message.index].MergeFrom(message)
            parts[message.index].text = text
        for part, sample in zip(parts, whole.samples, strict=True):
            part.request_id, part.usage.cached_tokens = "", sample.usage.cached_tokens
            assert part == sample

    serve(scenario)


def test_the_best_samples_are_answered_with(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        whole = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2, best_of=3))
        assert (whole.text, list(whole.logprobs)) == ("ab", [])
        assert it.engine.load().generated_tokens == 6
        two = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2, n=2, best_of=3, logprobs=0))
        assert [list(sample.logprobs) for sample in two.samples] == [[0.0, -0.25]] * 2

    serve(scenario)


def test_a_beam_search_answers_with_the_best_and_their_scores(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        # Whatever stands before, token i has logprob -i / 8 here.
        request = pb.GenerateRequest(
            prompt="abc", max_tokens=3, n=2, best_of=4, use_beam_search=True, length_penalty=2.0, logprobs=1
        )
        whole = await it.stub.Generate(request)
        assert [list(sample.token_ids) for sample in whole.samples] == [[0, 0, 0], [0, 0, 1]]
        assert [sample.score for sample in whole.samples] == [0.0, -0.125 / 36]
        assert [list(sample.logprobs) for sample in whole.samples] == [[0.0] * 3, [0.0, 0.0, -0.125]]
        assert [len(sample.top_logprobs) for sample in whole.samples] == [3, 3]
        assert not whole.samples[0].HasField("seed")
        one = await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=3, use_beam_search=True))
        assert (list(one.token_ids), one.score, one.finish_reason) == ([0, 0, 0], 0.0, pb.FINISH_REASON_LENGTH)
        await it.until(lambda: it.engine.load().slots_used == 0)
        for method, fields, field in (
            (it.stub.GenerateStream, {}, "use_beam_search"),
            (it.stub.Generate, {"top_p": 0.5}, "top_p"),
            (it.stub.Generate, {"n": 11}, "n"),
        ):
            wrong = pb.GenerateRequest(prompt="abc", use_beam_search=True, **fields)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (collect(method(wrong)) if method is it.stub.GenerateStream else method(wrong))
            (violation,) = refusal(caught.value, error_details_pb2.BadRequest()).field_violations
            assert violation.field == field

    serve(scenario)


def test_least_tokens_and_priority_reach_the_engine(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        request = pb.GenerateRequest(prompt="abc", max_tokens=LONG, stop=["c"], min_tokens=4)
        assert (await it.stub.Generate(request)).text == "abcab"
        seen, submit = [], it.engine.submit
        it.engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]  # type: ignore
        fields = {"min_tokens": 1, "bad_words": ["xy"], "priority": 5, "cache_salt": "mine"}
        await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=2, **fields))
        (request,) = seen
        assert (request.priority, request.cache_salt, request.sampling.min_tokens) == (5, "mine", 1)
        assert request.sampling.bad_word_tokens == (tuple(b"xy"), tuple(b" xy"))

    serve(scenario)


def test_two_callers_may_send_the_same_request_id(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        calls = [it.stub.Generate(pb.GenerateRequest(prompt=p, max_tokens=3, request_id="same")) for p in ("ab", "cd")]
        await it.until(lambda: it.engine.load().waiting == 2)
        it.engine.release()
        assert [(await call).text for call in calls] == ["aba", "cdc"]

    serve(scenario, held=True)


def test_prefixes_are_shared_under_the_same_salt_only(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        async def cached(salt: str) -> int:
            answer = await it.stub.Generate(pb.GenerateRequest(prompt="abcd", max_tokens=1, cache_salt=salt))
            return answer.usage.cached_tokens

        assert [await cached(salt) for salt in ("", "", "mine", "mine", "")] == [0, 3, 0, 3, 3]

    serve(scenario)


def test_without_a_tokenizer_token_ids_are_served(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await it.stub.Generate(pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2]), max_tokens=3))
        assert (answer.text, list(answer.token_ids)) == ("", [1, 2, 1])
        assert not (await it.stub.GetModel(pb.GetModelRequest())).has_tokenizer
        for call in (it.stub.Tokenize(pb.TokenizeRequest(text="a")), it.stub.Detokenize(pb.DetokenizeRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    serve(scenario, tokenizer=None)


def test_tokenize_and_detokenize(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        text = "Grüße, 世界 " * 2000  # long enough to be tokenised aside
        tokens = (await it.stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
        assert bytes(tokens) == text.encode()
        assert (await it.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens))).text == text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, 257]))
        assert refusal(caught.value, error_details_pb2.BadRequest()).field_violations[0].field == "token_ids"

    serve(scenario, max_context=10_000)


def test_model_and_load_are_told(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        model = await it.stub.GetModel(pb.GetModelRequest())
        assert (model.name, model.version, model.family, model.vocab_size) == ("echo", "1.2.3", "fake", 257)
        assert (model.max_context, list(model.eos_token_ids), model.has_tokenizer) == (2048, [EOS], True)
        assert [bucket.tokens for bucket in model.buckets] == [16]
        calls = [it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=9)) for _ in range(3)]
        await it.until(lambda: it.engine.load().waiting == 3)
        await it.step(2)
        load = await it.stub.GetLoad(pb.GetLoadRequest())
        assert (load.running, load.max_rows, load.waiting, load.waiting_tokens) == (2, 2, 1, 3)
        assert (load.slots_used, load.generated_tokens, load.iterations) == (2 * (3 + 2), 4, 2)
        assert load.compiled_after_ready == 0
        it.engine.release()
        await asyncio.gather(*calls)

    serve(scenario, held=True, config=EngineConfig(max_rows=2))
