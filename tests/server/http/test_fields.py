"""Fields of HTTP bodies: what changes nothing is taken, what would change the answer is refused, and what is read."""

import logging
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from jaxserve.text.chat_template import ChatTemplate
from server.http import call as http_call
from server.http.body import IgnoredLog
from server.http.schemas import ChatBody, CompletionBody
from tests.server.conftest import Served
from tests.server.fake_engine import EOS
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "abc", "max_tokens": 4},
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    "/generate": {"inputs": "abc"},
    "/tokenize": {"prompt": "abc"},
}
HARMLESS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "parallel_tool_calls": True,
    "service_tier": "flex",
    "store": True,
    "metadata": {"a": {"b": 1}},
    "user": 7,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "documents": [],
    "detokenize": True,
    "modalities": ["text"],
    "reasoning_effort": "none",
    "typical_p": 1.0,
    "min_p": 0.0,
    "n": 1,
    "best_of": 1,
    "echo": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "include_stop_str_in_output": False,
}
UNLIKE: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "documents": [{"text": "a"}],
    "detokenize": False,
    "modalities": ["audio"],
    "reasoning_effort": "high",
    "chat_template": "{{ messages }}",
    "logits_processors": ["a"],
    "include_stop_str_in_output": True,
    "continue_final_message": True,
    "grammar": "a",
}


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "_ignored_log", IgnoredLog())


async def answer_to(it: Served, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=it.url) as client:
        return await client.post(path, json=RIGHT[path] | body)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_fields_that_change_nothing_are_taken(serve_http: Serve, path: str) -> None:
    async def scenario(it: Served) -> None:
        plain = await ask(it, path, **RIGHT[path])
        fields = dict.fromkeys({*CompletionBody.model_fields, *ChatBody.model_fields} - RIGHT[path].keys())
        for more in (HARMLESS, dict.fromkeys(HARMLESS), dict.fromkeys(UNLIKE), fields):
            answer = await answer_to(it, path, **more)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain["choices"]
            assert "warning" not in answer.headers

    serve_http(scenario)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("name", UNLIKE)
def test_a_known_field_that_would_change_the_answer_is_refused(serve_http: Serve, path: str, name: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, path, **RIGHT[path], **{name: UNLIKE[name]})
        assert (status, answer["error"]["param"]) == (400, name), answer

    serve_http(scenario)


@pytest.mark.parametrize("path", RIGHT)
def test_an_unknown_field_is_named_in_a_header_and_logged_once(
    serve_http: Serve, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def scenario(it: Served) -> None:
        for _ in range(2):
            answer = await answer_to(it, path, **{"nonsense": {"a": 1}, "odd\nnamé": 1})
            assert answer.status_code == 200, answer.text
            assert answer.headers["warning"] == '299 jaxserve "ignored fields: nonsense, odd?nam?"'
        assert "warning" not in (await answer_to(it, path)).headers

    with caplog.at_level(logging.WARNING):
        serve_http(scenario)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert lines == [f"calls have the field {name}, which is ignored" for name in (r"'nonsense'", r"'odd\nnamé'")]


def test_names_are_bounded(serve_http: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        answer = await answer_to(it, COMPLETION, **{f"{i}" + "x" * 1000: 1 for i in range(200)})
        assert answer.status_code == 200
        assert 1000 < len(answer.headers["warning"]) < 2000
        assert answer.headers["warning"].endswith(', ..."')

    serve_http(scenario)
    assert len([record for record in caplog.records if "ignored" in record.getMessage()]) == 100
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_fields_within_objects_are_named_with_their_path(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await answer_to(it, COMPLETION, stream=True, stream_options={"include_obfuscation": False})
        assert answer.headers["warning"] == '299 jaxserve "ignored fields: stream_options.include_obfuscation"'
        answer = await answer_to(it, "/generate", parameters={"max_new_tokens": 1, "odd": 1})
        assert answer.headers["warning"] == '299 jaxserve "ignored fields: parameters.odd"'
        structured = {"regex": "a+", "structural_tag": {"a": 1}}
        status, refused = await post(it, COMPLETION, prompt="a", structured_outputs=structured)
        assert (status, refused["error"]["param"]) == (400, "structured_outputs.structural_tag")

    serve_http(scenario)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_usage_comes_with_each_chunk(serve_http: Serve, path: str) -> None:
    async def scenario(it: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = RIGHT[path] | {"stream": True, "n": 2}
        found = [event async for event in events(it, path, **body, stream_options=options)]
        assert found.pop() is None
        counts = [event["usage"]["completion_tokens"] for event in found]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == 8
        assert counts[0] < 8
        assert len({event["usage"]["prompt_tokens"] for event in found}) == 1
        assert all(
            event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + count
            for event, count in zip(found, counts, strict=True)
        )
        plain = [event async for event in events(it, path, **body, stream_options={"continuous_usage_stats": True})]
        assert all("usage" not in event for event in plain[:-1])

    serve_http(scenario)


def test_token_ids_are_returned(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        (choice,) = (await ask(it, COMPLETION, prompt="abcé", max_tokens=5, return_token_ids=True))["choices"]
        ids = list("abcé".encode())
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, ids)
        answer = await ask(it, CHAT, messages=MESSAGES, max_tokens=3, return_token_ids=True)
        prompt = list(b"<user>Hi<bot>")
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, prompt[:3])
        for path, body, expected in (
            (COMPLETION, {"prompt": "abcé"}, ids),
            (CHAT, {"messages": [{"role": "é", "content": ""}]}, list("<é>".encode())),
        ):
            asked = body | {"max_tokens": len(expected), "stream": True, "return_token_ids": True}
            found = [event async for event in events(it, path, **asked)][:-1]
            choices = [event["choices"][0] for event in found]
            assert [token for each in choices for token in each.get("token_ids", ())] == expected
            told = [
                event for event in found if "prompt_token_ids" in event or "prompt_token_ids" in event["choices"][0]
            ]
            assert told == found[:1]
        plain = await ask(it, COMPLETION, **RIGHT[COMPLETION])
        assert plain["choices"][0].keys().isdisjoint({"token_ids", "prompt_token_ids"})

    serve_http(scenario)


def test_special_tokens_are_shown_on_request(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        for path, body in (
            (COMPLETION, {"prompt": "a<eos>b"}),
            (CHAT, {"messages": [{"role": "<eos>", "content": ""}]}),
        ):
            asked = body | {"max_tokens": 3, "ignore_eos": True}
            texts = []
            for shown in (True, False):
                (choice,) = (await ask(it, path, **asked, skip_special_tokens=shown))["choices"]
                texts.append(choice.get("text") or choice["message"]["content"])
            assert texts == (["ab", "a<eos>b"] if path == COMPLETION else ["<>", "<<eos>>"])
        ended = await ask(it, COMPLETION, prompt="a<eos>b", skip_special_tokens=False)
        assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("a", "stop")
        status, refused = await post(it, COMPLETION, prompt="a", use_beam_search=True, skip_special_tokens=False)
        assert (status, refused["error"]["param"]) == (400, "skip_special_tokens")

    serve_http(scenario)


def test_prompts_are_truncated_from_the_left(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, COMPLETION, prompt="abcdef", max_tokens=2, truncate_prompt_tokens=3, echo=True)
        assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == ("defde", 3)
        answer = await ask(it, COMPLETION, prompt="a" * 70, max_tokens=10, truncate_prompt_tokens=-1)
        assert answer["usage"] | {"prompt_tokens_details": 0} == {
            "prompt_tokens": 54,
            "completion_tokens": 10,
            "total_tokens": 64,
            "prompt_tokens_details": 0,
        }
        answer = await ask(it, CHAT, messages=MESSAGES, truncate_prompt_tokens=5)
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["message"]["content"].startswith("<bot><bot>")
        for wrong in (0, -2, True):
            status, refused = await post(it, COMPLETION, prompt="a", truncate_prompt_tokens=wrong)
            assert (status, refused["error"]["param"]) == (400, "truncate_prompt_tokens")

    serve_http(scenario, max_context=64)


def test_template_variables_reach_the_template(serve_http: Serve) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ style }}{{ reasoning_effort }}", {"bos_token": "<s>"})

    async def scenario(it: Served) -> None:
        async def text(**fields: Any) -> str:
            answer = await ask(it, CHAT, messages=MESSAGES, max_tokens=9, **fields)
            return answer["choices"][0]["message"]["content"]

        assert await text() == "HiHiHiHiH"
        assert await text(chat_template_kwargs={"style": ", you", "unread": 1}) == "Hi, youHi"
        assert await text(reasoning_effort="low") == "HilowHilo"
        assert await text(chat_template_kwargs={"reasoning_effort": "no"}, reasoning_effort="low") == "HinoHinoH"
        for taken in ("messages", "tools", "add_generation_prompt", "bos_token"):
            status, refused = await post(it, CHAT, messages=MESSAGES, chat_template_kwargs={taken: 1})
            assert (status, refused["error"]["param"]) == (400, "messages")
            assert taken in refused["error"]["message"]

    serve_http(scenario, chat_template=template)


def test_special_tokens_are_added_on_request(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        tokenizer = it.engine.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode
        added = lambda text, *, special_tokens=True: [*encode(text), *([EOS] if special_tokens else [])]  # noqa: E731
        monkeypatch.setattr(tokenizer, "encode", added)
        for path in (COMPLETION, CHAT):
            default, with_them, without = [
                (await ask(it, path, **RIGHT[path] | fields))["usage"]["prompt_tokens"]
                for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            ]
            assert with_them == without + 1
            assert default == (with_them if path == COMPLETION else without)

    serve_http(scenario)
