"""`/v1/responses`."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from jaxserve.text.chat_template import ChatTemplate
from tests.server.conftest import Served
from tests.server.http.http_calls import ask, post

Serve = Callable[..., None]
PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
CALL = 'See: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
# The engine repeats its prompt: a test says in the last message what the answer is.
ECHO = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1].content }}"
WHOLE = "{{ messages | tojson }}<eos>"


async def streamed(it: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has the name of its type, and they are numbered."""
    found = []
    async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
        lines = (await client.post(PATH, json=body | {"stream": True})).text.split("\n\n")
    assert lines.pop() == ""
    for line in lines:
        name, data = line.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: Any) -> Any:
    """A response without what differs between two of them."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {name: value for name, value in response.items() if name not in ("id", "created_at", "usage")} | {
        "output": items
    }


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"input": "abc<eos>", "include": ["message.output_text.logprobs"], "top_logprobs": 1}, ["message"]),
        ({"input": CALL + "<eos>", "tools": TOOLS}, ["message", "function_call"]),
        (
            {"input": CALL + CALL + "<eos>", "tools": TOOLS, "parallel_tool_calls": False},
            ["message", "function_call", "message"],
        ),
        (
            {"input": '{"a": 1}<eos>', "tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}},
            ["function_call"],
        ),
        ({"input": "abcdef", "max_output_tokens": 3}, ["message"]),
        ({"input": "<eos>"}, ["message"]),
    ],
)
def test_a_stream_adds_up_to_the_whole_response(serve_http: Serve, fields: dict[str, Any], kinds: list[str]) -> None:
    async def scenario(it: Served) -> None:
        whole = await ask(it, PATH, **fields)
        assert [item["type"] for item in whole["output"]] == kinds
        found = await streamed(it, **fields)
        assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
        assert found[0]["response"]["output"] == []
        assert without_ids(found[-1]["response"]) == without_ids(whole)
        is_cut = "max_output_tokens" in fields
        assert found[-1]["type"] == ("response.incomplete" if is_cut else "response.completed")
        assert whole["status"] == found[-1]["type"].removeprefix("response.")
        for index, item in enumerate(found[-1]["response"]["output"]):
            own = [event for event in found if event.get("output_index") == index]
            assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
            assert own[0]["item"]["status"] == "in_progress"
            assert own[-1]["item"] == item
            deltas = [event for event in own if event["type"].endswith(".delta")]
            text = "".join(event["delta"] for event in deltas)
            assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            if item["type"] == "message":
                assert [each for event in deltas for each in event["logprobs"]] == item["content"][0]["logprobs"]

    serve_http(scenario, chat_template=ChatTemplate(ECHO, {}))


@pytest.mark.parametrize(
    ("text", "fields", "scored"),
    [
        ("abc<eos>", {}, ["a", "b", "c", "<eos>"]),
        ("é<eos>", {}, ["bytes:\\xc3", "bytes:\\xa9", "<eos>"]),
        ("<eos>", {}, ["<eos>"]),
        (CALL + "<eos>", {"tools": TOOLS}, ["S", "e", "e", ":"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_do_not_depend_on_what_comes_together(
    serve_http: Serve, text: str, fields: dict[str, Any], scored: list[str], stream: bool
) -> None:
    body = {"input": text, "include": ["message.output_text.logprobs"], "stream": stream} | fields

    async def scenario(it: Served) -> None:
        for together in (1, 2, 5, 100):
            call = asyncio.create_task(streamed(it, **body) if stream else ask(it, PATH, **body))
            await it.until(lambda: it.engine.load().waiting == 1)
            while it.engine.load().waiting + it.engine.load().running:
                it.engine.step(together - 1)  # on the server's own loop, which hears of nothing until the next one
                await it.step()
            answer = await call
            (part,) = (answer[-1]["response"] if stream else answer)["output"][0]["content"]
            assert [token["token"] for token in part["logprobs"]] == scored, together

    serve_http(scenario, held=True, chat_template=ChatTemplate(ECHO, {}))


def test_what_a_response_says(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        asked = {"input": "abc<eos>", "metadata": {"a": "b"}, "store": True, "temperature": 0.5}
        answer = await ask(it, PATH, **asked, include=["message.output_text.logprobs"], top_logprobs=1)
        (part,) = answer["output"][0]["content"]
        assert (part["text"], [token["token"] for token in part["logprobs"][:3]]) == ("abc", list("abc"))
        assert len(part["logprobs"][0]["top_logprobs"]) == 1
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (4, 4, 8)
        told = {name: answer[name] for name in ("object", "metadata", "store", "temperature", "model")}
        assert told == {
            "object": "response",
            "metadata": {"a": "b"},
            "store": False,
            "temperature": 0.5,
            "model": "echo",
        }

    serve_http(scenario, chat_template=ChatTemplate(ECHO, {}))


def test_items_become_messages(serve_http: Serve) -> None:
    items = [
        {"role": "developer", "content": "Be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": "4"},
    ]

    async def scenario(it: Served) -> None:
        answer = await ask(it, PATH, input=items, instructions="Help")
        calls = [
            {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}
            for name, arguments in (("c1", {"a": 1}), ("c2", {}))
        ]
        assert json.loads(answer["output"][0]["content"][0]["text"]) == [
            {"role": "system", "content": "Help"},
            {"role": "system", "content": "Be"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "A", "tool_calls": calls},
            {"role": "tool", "content": "4", "tool_call_id": "c2", "name": "add"},
        ]

    serve_http(scenario, chat_template=ChatTemplate(WHOLE, {}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_served_is_refused_by_name(serve_http: Serve, fields: dict[str, Any], param: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, **{"input": "a"} | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer

    serve_http(scenario, chat_template=ChatTemplate(ECHO, {}))


def test_references_to_what_is_not_stored_are_refused(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, input=[{"type": "item_reference", "id": "msg_1"}])
        assert (status, answer["error"]["param"]) == (400, "input")
        assert "with store false" in answer["error"]["message"]

    serve_http(scenario, chat_template=ChatTemplate(ECHO, {}))


def test_a_schema_constrains_the_text(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        requests = []
        submit = it.engine.submit
        it.engine.submit = lambda request, sink: (requests.append(request), submit(request, sink))[1]  # pyright: ignore[reportAttributeAccessIssue]
        schema = {"type": "object", "properties": {}}
        await ask(it, PATH, input="a<eos>", text={"format": {"type": "json_schema", "name": "b", "schema": schema}})
        assert requests[0].sampling.grammar.text == '{"type":"object","properties":{}}'

    serve_http(scenario, chat_template=ChatTemplate(ECHO, {}))
