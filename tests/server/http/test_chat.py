"""`/v1/chat/completions`."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
PATH = "/v1/chat/completions"
CHAT = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TEXT = "<system>Be<user>Hi<bot>"  # what the template makes of it


def test_a_chat_is_answered_by_its_template(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, messages=CHAT, max_completion_tokens=8)
        assert (answer["object"], answer["system_fingerprint"]) == ("chat.completion", "jaxserve-1.2.3")
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT[:8], "refusal": None}
        assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
        assert answer["usage"]["prompt_tokens"] == len(TEXT)
        bare = await ask(it, PATH, messages=CHAT, max_tokens=30, add_generation_prompt=False, n=2)
        assert [one["message"]["content"] for one in bare["choices"]] == [(TEXT[:-5] * 2)[:30]] * 2

    serve_http(scenario)


def test_an_answer_is_sent_back(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, messages=CHAT, max_tokens=3)
        messages = [*CHAT, answer["choices"][0]["message"]]
        again = await ask(it, PATH, messages=messages, max_tokens=40, add_generation_prompt=False)
        assert again["choices"][0]["message"]["content"].startswith("<system>Be<user>Hi<assistant><sy")

    serve_http(scenario)


def test_chat_without_a_limit_fills_the_context(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, messages=CHAT)
        assert answer["usage"]["total_tokens"] == 64

    serve_http(scenario, max_context=64)


def test_a_chats_logprobs(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, messages=CHAT, max_tokens=2, logprobs=True, top_logprobs=1, prompt_logprobs=0)
        first, second = answer["choices"][0]["logprobs"]["content"]
        top = {"token": "\x00", "logprob": 0.0, "bytes": [0]}
        assert first == {"token": "<", "logprob": 0.0, "bytes": [60], "top_logprobs": [top]}
        assert (second["token"], second["logprob"]) == ("s", -0.25)
        assert len(answer["prompt_logprobs"]) == len(TEXT)
        assert answer["prompt_logprobs"][1] == {"115": {"logprob": -0.25, "decoded_token": "s"}}

    serve_http(scenario)


def test_a_stream_begins_with_the_role(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        found = [event async for event in events(it, PATH, messages=CHAT, max_tokens=4, logprobs=True, stream=True)]
        assert found.pop() is None
        deltas = [event["choices"][0]["delta"] for event in found]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT[:4]
        scored = [event["choices"][0]["logprobs"] for event in found[1:]]
        assert "".join(token["token"] for each in scored for token in each["content"]) == TEXT[:4]
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert found[0]["object"] == "chat.completion.chunk"

    serve_http(scenario)


def test_a_stream_for_tgis_client_has_every_field(serve_http: Serve) -> None:
    """And no [DONE], which text_generation.Client would take for JSON."""

    async def scenario(it: Served) -> None:
        found = [event async for event in events(it, PATH, messages=CHAT, max_tokens=4, model="tgi", stream=True)]
        deltas = [event["choices"][0]["delta"] for event in found]
        assert all((delta["role"], delta["tool_calls"]) == ("assistant", None) for delta in deltas)
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT[:4]

    serve_http(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": CHAT, "tools": [{}]}, "tools"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_a_wrong_chat_is_refused_by_name(serve_http: Serve, body: dict[str, Any], param: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, **body)
        assert (status, answer["error"]["param"]) == (400, param)

    serve_http(scenario)


def test_a_checkpoint_without_a_template_says_so(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, messages=CHAT)
        assert status == 400
        assert "need a chat template" in answer["error"]["message"]

    serve_http(scenario, chat_template=None)
