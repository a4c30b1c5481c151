"""Tools of chats: what the template is told, what callers get of the answer, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sampling_params import Grammar
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tool_forms import FORMS
from tests.server.conftest import Served
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add"}}
TOOLS = [WEATHER, ADD]
ARGUMENTS = ['{"city": "Paris, é"}', '{"a": [1, 2]}']
# The engine repeats its prompt, which with this template is the last message: so a test says what the answer is.
HERMES = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1].content }}"
CALLS = "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>\n'
    for name, arguments in zip(("weather", "add"), ARGUMENTS, strict=True)
)
LISTED = '[{"name": "weather", "arguments": {"city": "Paris, é"}}, {"name": "add", "arguments": {"a": [1, 2]}}]'
NAMED = {"type": "function", "function": {"name": "add"}}


def answered(text: str) -> dict[str, Any]:
    """The fields of a call that is answered by a text."""
    return {"messages": [{"role": "user", "content": text + "<eos>"}], "max_tokens": 500}


def called(message: Any) -> list[tuple[str, str]]:
    for call in message["tool_calls"]:
        assert (call["type"], len(call["id"]), call["id"].isalnum()) == ("function", 9, True)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def streamed(found: list[Any]) -> tuple[dict[str, Any], str]:
    """The message and the finish reason that the chunks of a stream add up to."""
    assert found.pop() is None
    message: dict[str, Any] = {"content": ""}
    for event in found:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):  # the first of a call: its id, its name, and no arguments yet
                assert call["function"]["arguments"] == ""
                calls.append(call)
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, found[-1]["choices"][0]["finish_reason"]


async def both(it: Served, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of a call, which are the same in a stream."""
    (choice,) = (await ask(it, PATH, **body))["choices"]
    message, reason = streamed([event async for event in events(it, PATH, **body, stream=True)])
    whole = choice["message"]
    assert (message["content"], reason) == (whole["content"] or "", choice["finish_reason"])
    assert ("tool_calls" in message) == ("tool_calls" in whole)
    if "tool_calls" in whole:
        assert called(message) == called(whole)
        ids = [call["id"] for each in (message, whole) for call in each["tool_calls"]]
        assert len(set(ids)) == len(ids)
    return whole, reason


def test_calls_that_the_model_decides_on(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        expected = list(zip(("weather", "add"), ARGUMENTS, strict=True))
        message, reason = await both(it, **answered(CALLS), tools=TOOLS)
        assert (message["content"], called(message), reason) == (None, expected, "tool_calls")
        message, reason = await both(it, **answered("See:\n" + CALLS), tools=TOOLS, tool_choice="auto", logprobs=True)
        assert (message["content"], called(message), reason) == ("See:", expected, "tool_calls")
        message, _ = await both(it, **answered(CALLS), tools=TOOLS, parallel_tool_calls=False)
        assert called(message) == expected[:1]
        message, reason = await both(it, **answered("It rains. "), tools=TOOLS)
        assert (message["content"], "tool_calls" in message, reason) == ("It rains. ", False, "stop")
        for unread in ({"tools": TOOLS, "tool_choice": "none"}, {}):
            message, reason = await both(it, **answered(CALLS), **unread)
            assert (message["content"], "tool_calls" in message, reason) == (CALLS, False, "stop")
        cut = answered(CALLS) | {"max_tokens": 60}
        message, reason = await both(it, **cut, tools=TOOLS)
        assert (called(message)[0][0], reason) == ("weather", "length")

    serve_http(scenario, chat_template=ChatTemplate(HERMES, {}))


def test_the_form_of_the_checkpoint_is_read(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        tokenizer = it.engine.tokenizer
        assert tokenizer is not None
        assert tokenizer.chat_template is not None
        texts = {
            "hermes": CALLS,
            "qwen3_coder": "<tool_call><function=weather><parameter=city>Paris, é</parameter></function></tool_call>",
            "llama3_json": '{"name": "weather", "parameters": {"city": "Paris, é"}}',
            "mistral": "[TOOL_CALLS]" + LISTED,
            "pythonic": '[weather(city="Paris, é")]',
        }
        assert texts.keys() == FORMS.keys()
        for form, text in texts.items():
            tokenizer.chat_template.tool_form = form
            message, _ = await both(it, **answered(text), tools=TOOLS)
            assert called(message)[0] == ("weather", ARGUMENTS[0])

    serve_http(scenario, chat_template=ChatTemplate(HERMES, {}))


def test_special_tokens_are_read_where_the_form_has_them(serve_http: Serve) -> None:
    template = ChatTemplate("{# [TOOL_CALLS] #}{% if tools %}{% endif %}{{ messages[-1].content }}", {})

    async def scenario(it: Served) -> None:
        asked = {"messages": [{"role": "user", "content": "a<eos>b"}], "max_tokens": 3, "ignore_eos": True}
        assert (await both(it, **asked, tools=TOOLS))[0]["content"] == "a<eos>b"
        assert (await both(it, **asked))[0]["content"] == "ab"

    serve_http(scenario, chat_template=template)


def test_calls_that_are_required(serve_http: Serve) -> None:
    """The template knows of no tools, and the grammar alone makes the calls: this engine does not follow it."""

    async def scenario(it: Served) -> None:
        requests = []
        submit = it.engine.submit
        it.engine.submit = lambda request, sink: (requests.append(request), submit(request, sink))[1]  # pyright: ignore[reportAttributeAccessIssue]
        asked = {"tools": TOOLS, "add_generation_prompt": False, "max_tokens": 500}
        assert it.engine.tokenizer is not None
        said = lambda text: [{"role": "user", "content": text + "<eos>"}]  # noqa: E731
        it.engine.tokenizer.chat_template = ChatTemplate("{{ messages[-1].content }}", {})
        message, reason = await both(it, messages=said(LISTED), **asked, tool_choice="required")
        assert reason == "tool_calls"
        assert called(message) == list(zip(("weather", "add"), ARGUMENTS, strict=True))
        message, reason = await both(it, messages=said('{"a": 1}'), **asked, tool_choice=NAMED)
        assert (message["content"], called(message), reason) == (None, [("add", '{"a": 1}')], "tool_calls")
        grammars = [request.sampling.grammar for request in requests[::2]]
        assert [grammar.kind for grammar in grammars] == ["lark", "json_schema"]
        assert grammars[1] == Grammar(kind="json_schema", text='{"type":"object","properties":{}}')

    serve_http(scenario)


def test_the_template_is_told_of_tools_calls_and_results(serve_http: Serve) -> None:
    template = ChatTemplate("{# <tool_call> #}{{ tools | tojson }}{{ messages | tojson }}{{ '<eos>' }}", {})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS[0]}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
    ]

    async def scenario(it: Served) -> None:
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
        message, _ = await both(it, messages=messages, tools=[strict, ADD], max_tokens=1000)
        tools, at = json.JSONDecoder().raw_decode(message["content"])
        known = json.loads(message["content"][at:])
        assert known[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "weather", "arguments": {"city": "Paris, é"}}}],
        }
        assert known[2] == messages[2] | {"name": "weather"}
        closed = SCHEMA | {"additionalProperties": False, "required": ["city"]}
        assert tools[0]["function"] == WEATHER["function"] | {"parameters": closed}  # type: ignore[operator]
        bare = {"type": "object", "properties": {}}
        assert tools[1]["function"] == {"name": "add", "description": "", "parameters": bare}
        message, _ = await both(it, messages=messages, tools=[strict], tool_choice="none", max_tokens=1000)
        assert message["content"].startswith("null[")

    serve_http(scenario, chat_template=template)


def test_an_answer_with_calls_is_sent_back(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        message, _ = await both(it, **answered(CALLS), tools=TOOLS)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in message["tool_calls"]]
        again, _ = await both(it, messages=[message, *results, *answered("It is 4.")["messages"]], tools=TOOLS)
        assert again["content"] == "It is 4."

    serve_http(scenario, chat_template=ChatTemplate(HERMES, {}))


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [3]}, "tools", "3"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "retrieval"),
        ({"tools": [{"type": "function"}]}, "tools", "None"),
        (function(name="a b"), "tools", "a b"),
        (function(description=7), "tools", "7"),
        (function(parameters="x"), "tools", "'x'"),
        (function(strict="yes"), "tools", "yes"),
        ({"tools": [ADD, ADD]}, "tools", "'add' twice"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "129"),
        (function(parameters={"type": "strin"}) | {"tool_choice": "required"}, "tools", "Invalid type: strin"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "any"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "'sub', which is not among the tools",
        ),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "and tools are both given"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages", "a function with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages",
            "'f' whose arguments are no JSON object",
        ),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 3}]}, "messages", "tool_call_id is 3"),
    ],
)
def test_what_is_wrong_is_refused_by_name(serve_http: Serve, fields: dict[str, Any], param: str, told: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, **answered("a") | fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert told in answer["error"]["message"]

    serve_http(scenario, chat_template=ChatTemplate(HERMES, {}))


def test_a_model_that_cannot_be_told_of_tools_says_so(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        tokenizer = it.engine.tokenizer
        assert tokenizer is not None
        for source, told in (("{{ messages }}", "chat template"), ("{{ tools }}{{ messages }}", "--tool-parser")):
            tokenizer.chat_template = ChatTemplate(source, {})
            status, answer = await post(it, PATH, **answered("a"), tools=TOOLS)
            assert (status, answer["error"]["param"]) == (400, "tools")
            assert told in answer["error"]["message"]
            assert (await post(it, PATH, **answered("a"), tools=TOOLS, tool_choice="required"))[0] == 200

    serve_http(scenario, chat_template=ChatTemplate(HERMES, {}))
