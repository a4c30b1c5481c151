"""`/v1/completions` over a real connection, on an engine whose answers can be worked out by hand."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.fake_engine import EOS
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
PATH = "/v1/completions"


def test_a_completion_is_answered_whole(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, model="echo", prompt="abc", max_tokens=5, user="someone")
        assert answer["choices"] == [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}]
        assert (answer["object"], answer["model"]) == ("text_completion", "echo")
        assert answer["id"].startswith("cmpl-")
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        ended = await ask(it, PATH, prompt=[97, EOS])
        assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("a", "stop")
        assert len((await ask(it, PATH, prompt="abc"))["choices"][0]["text"]) == 16

    serve_http(scenario)


@pytest.mark.parametrize("prompt", [["ab", "xyz"], [[97, 98], [120, 121, 122]]])
def test_prompts_come_in_batches_with_samples_of_each(serve_http: Serve, prompt: Any) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, prompt=prompt, max_tokens=3, n=2)
        assert [choice["text"] for choice in answer["choices"]] == ["aba", "aba", "xyz", "xyz"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 12)

    serve_http(scenario)


def test_best_of_answers_with_the_likeliest_samples(serve_http: Serve) -> None:
    from jaxserve.generation.completion import Completion
    from jaxserve.generation.samples import best

    def completion(*logprobs: float) -> Completion:
        return Completion(request_id="", text="", token_ids=(1,) * len(logprobs), finish_reason=None, logprobs=logprobs)

    long, short, worst = completion(-1.0, -1.0, -1.0), completion(-2.0), completion(-3.0)
    assert best([worst, short, long], 2) == [long, short]  # by the mean: a sum would favour the short one

    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, prompt="ab", max_tokens=3, n=1, best_of=4)
        assert [choice["text"] for choice in answer["choices"]] == ["aba"]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 12  # all four were generated

    serve_http(scenario)


def test_logprobs_are_told_token_by_token(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, prompt=[97, 0xC3, 0xA9], max_tokens=3, logprobs=2)
        assert answer["choices"][0]["text"] == "aé"
        told = answer["choices"][0]["logprobs"]
        assert told["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
        assert told["token_logprobs"] == [0.0, -0.25, -0.5]
        assert told["text_offset"] == [0, 1, 11]
        # The fake's alternatives are never the token it says, which is among them all the same.
        assert told["top_logprobs"][0] == {"\x00": 0.0, "\x01": -0.125, "a": 0.0}

    serve_http(scenario)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(serve_http: Serve, max_tokens: int) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, prompt="abc", max_tokens=max_tokens, logprobs=1, echo=True)
        (choice,) = answer["choices"]
        assert choice["text"] == "abc" + "ab"[:max_tokens]
        assert choice["logprobs"]["tokens"] == list("abc" + "ab"[:max_tokens])
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, 0.0, -0.25][: 3 + max_tokens]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][1] == {"\x01": 0.0, "b": -0.25}
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4][: 3 + max_tokens]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens

        streamed: dict[str, Any] = {"text": "", "tokens": [], "token_logprobs": [], "text_offset": []}
        async for event in events(it, PATH, prompt="abc", max_tokens=max_tokens, logprobs=1, echo=True, stream=True):
            for piece in event["choices"] if event else ():
                streamed["text"] += piece["text"]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    streamed[name] += piece["logprobs"][name]
        assert streamed.pop("text") == choice["text"]
        assert streamed == {name: choice["logprobs"][name] for name in streamed}

    serve_http(scenario)


def test_prompt_logprobs_are_told_by_token_id(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        (choice,) = (await ask(it, PATH, prompt="ab", max_tokens=1, prompt_logprobs=1))["choices"]
        assert choice["prompt_logprobs"] == [
            None,
            {"98": {"logprob": -0.25, "decoded_token": "b"}, "1": {"logprob": 0.0, "decoded_token": "\x01"}},
        ]

    serve_http(scenario)


def test_stream_joins_to_the_whole_answer(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        body = {"prompt": ["ab", "é"], "max_tokens": 4, "stop": "bab", "stream": True}
        texts, reasons, last = ["", ""], [None, None], []
        async for event in events(it, PATH, **body, stream_options={"include_usage": True}):
            last = [*last[-1:], event]
            for choice in event["choices"] if event else ():
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
        assert (texts, reasons) == (["a", "éé"], ["stop", "length"])
        assert last[1] is None  # [DONE]
        assert last[0]["choices"] == []
        assert (last[0]["usage"]["prompt_tokens"], last[0]["usage"]["completion_tokens"]) == (4, 8)
        async for event in events(it, PATH, **body):
            assert event is None or ("usage" not in event and event["choices"])

    serve_http(scenario)


def test_an_iteration_is_a_chunk_while_it_runs(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        stream = events(it, PATH, prompt="abc", max_tokens=3, stream=True)
        heard = ""
        for expected in ("a", "ab", "abc"):
            coming = asyncio.create_task(anext(stream))  # pyright: ignore[reportArgumentType]
            await it.until(lambda: it.engine.load().running + it.engine.load().waiting == 1)
            await it.step()
            heard += (await coming)["choices"][0]["text"]
            assert heard == expected
        await stream.aclose()

    serve_http(scenario, held=True)


def test_any_number_is_a_seed() -> None:
    from server.http.schemas import seed_of

    assert [seed_of(seed) for seed in (0, 7, -1, 2**64 - 1)] == [0, 7, -1, 2**64 - 1]
    hashed = [seed_of(seed) for seed in (0.1, 0.2, 1.0, 2**64, 1e300)]
    assert len({*hashed}) == 5
    assert all(0 <= seed < 2**64 for seed in hashed)
    assert seed_of(0.1) == hashed[0]


def test_logprobs_that_json_has_no_number_for() -> None:
    from server.http import logprobs

    assert [logprobs.finite(value) for value in (-math.inf, -1.0, None)] == [-9999.0, -1.0, None]


def test_every_sample_has_the_scores_of_the_prompt(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        asked = {"prompt": "abc", "max_tokens": 2, "n": 2, "echo": True, "logprobs": 0}
        answer = await ask(it, PATH, **asked)
        lines = [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
        assert lines == [("abcab", [None, -0.25, -0.5, 0.0, -0.25])] * 2
        texts, scores = ["", ""], [[], []]
        async for event in events(it, PATH, **asked, stream=True):
            for choice in (event or {"choices": []})["choices"]:
                texts[choice["index"]] += choice["text"]
                scores[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        assert list(zip(texts, scores, strict=True)) == lines

    serve_http(scenario)


def test_a_beam_search(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        # Whatever stands before, token i has logprob -i / 8 here.
        beams = {"use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 3}
        answer = await ask(it, PATH, prompt=["abc", "de"], **beams, logprobs=1, length_penalty=0.5)
        assert [choice["text"] for choice in answer["choices"]] == ["\0\0\0", "\0\0\1"] * 2
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][1]["logprobs"]["token_logprobs"] == [0.0, 0.0, -0.125]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 12)
        chat = await ask(it, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **CHAT_BEAMS)
        assert [choice["message"]["content"] for choice in chat["choices"]] == ["\0\0", "\0\1"]
        for field, wrong in (
            ("stream", {"stream": True, "best_of": None}),
            ("echo", {"echo": True}),
            ("stop", {"stop": "x"}),
            ("n", {"n": 11, "best_of": None}),
            ("length_penalty", {"use_beam_search": False, "length_penalty": 2.0}),
            ("early_stopping", {"early_stopping": "never"}),
        ):
            status, refused = await post(it, PATH, **({"prompt": "abc"} | beams | wrong))
            assert (status, refused["error"]["param"]) == (400, field), refused
        await it.until(lambda: it.engine.load().slots_used == 0)

    serve_http(scenario)


CHAT_BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 2, "early_stopping": True}


def test_what_vllm_adds_is_known_by_its_names(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, prompt="abc", max_tokens=99, min_tokens=4, stop="c")
        assert answer["choices"][0]["text"] == "abcab"
        seen, submit = [], it.engine.submit
        it.engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]  # type: ignore
        fields = {"bad_words": ["x"], "min_tokens": 2, "stop_token_ids": [7], "priority": 3, "cache_salt": "mine"}
        await ask(it, PATH, prompt="abc", max_tokens=3, timeout=60, **fields)
        (request,) = seen
        assert (request.priority, request.cache_salt, request.sampling.stop_token_ids) == (3, "mine", (7,))
        assert (request.sampling.min_tokens, request.sampling.bad_word_tokens) == (2, ((120,), (32, 120)))
        chat = {"messages": [{"role": "user", "content": "a"}], "min_tokens": 200, "ignore_eos": True}
        await ask(it, "/v1/chat/completions", **chat)  # goes on to the end of the context
        assert (seen[1].sampling.min_tokens, seen[1].sampling.max_tokens) == (200, 2048 - len(seen[1].prompt))

    serve_http(scenario)


def test_a_call_may_say_how_long_it_waits(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, refused = await post(it, PATH, prompt="abc", max_tokens=2, timeout=0.01)
        assert (status, refused["error"]["type"]) == (504, "timeout_error")
        await it.until(lambda: it.engine.load().waiting == 0)
        for wrong in (0, -1, 1e9, "soon"):
            status, refused = await post(it, PATH, prompt="abc", timeout=wrong)
            assert (status, refused["error"]["param"]) == (400, "timeout")

    serve_http(scenario, held=True)
