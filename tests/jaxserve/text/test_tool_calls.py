"""Calls of tools in answers: each family's format, in one piece and one character at a time."""

import json
import random
from typing import Any

import pytest

from jaxserve.text.tool_calls import Piece, ToolParser
from jaxserve.text.tool_forms import FORMS, form_of, read_arguments, read_list

SCHEMAS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "zip": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {},
}
XML = "<tool_call>\n<function=get_weather>\n<parameter=%s>%s</parameter>\n</function>\n</tool_call>"
PARIS = '{"city": "Paris, \\"FR\\" }]", "days": [1, {"n": -2.5e3}]}'
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
LISTED = '[{"name": "get_weather", "arguments": %s}, {"name": "add", "arguments": {}}]'
READERS = {name: form.read for name, form in FORMS.items()} | {"list": read_list}


def read(form: str, text: str, sizes: random.Random | None = None, most: int | None = None) -> list[Piece]:
    """The pieces of a text, given whole or in parts of random sizes; neighbours of one kind are joined."""
    parser = ToolParser(READERS[form], SCHEMAS, most)
    pieces, at = [], 0
    while at < len(text):
        size = len(text) if sizes is None else sizes.choice((1, 1, 2, 7))
        pieces += parser.push(text[at : at + size])
        at += size
    pieces += parser.flush()
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].kind == piece.kind != "name":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def content(text: str) -> list[Piece]:
    return [Piece("content", text)]


def call(name: str, arguments: str) -> list[Piece]:
    return [Piece("name", name), Piece("arguments", arguments)]


EXPECTED: list[tuple[str, str, list[Piece]]] = [
    ("hermes", "Just text, with <tool_cal and < in it. ", content("Just text, with <tool_cal and < in it. ")),
    ("hermes", HERMES % PARIS, call("get_weather", PARIS)),
    ("hermes", "Let me see.\n" + HERMES % PARIS + "\n", content("Let me see.") + call("get_weather", PARIS)),
    (
        "hermes",
        HERMES % PARIS + "\n" + '<tool_call>{"arguments": {"a": 1}, "id": null, "name": "add"}</tool_call>\n',
        call("get_weather", PARIS) + call("add", '{"a": 1}'),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', call("add", "{}")),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', call("add", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "add", "argu', call("add", "")),
    ("hermes", "<tool_call>nothing</tool_call>", []),
    ("hermes", '<tool_call><tool_call>{"name": "add"}</tool_call>', content("<tool_call>") + call("add", "{}")),
    ("hermes", "<tool_call>", []),
    (
        "qwen3_coder",
        "Well.\n" + XML % ("city", "\nParis\n"),
        content("Well.") + call("get_weather", '{"city": "Paris"}'),
    ),
    ("qwen3_coder", XML % ("zip", "75001") + "\n", call("get_weather", '{"zip": "75001"}')),
    ("qwen3_coder", XML % ("days", "\n3\n") * 2, call("get_weather", '{"days": 3}') * 2),
    ("qwen3_coder", XML % ("x", '{"a": [1, <b>]}'), call("get_weather", '{"x": "{\\"a\\": [1, <b>]}"}')),
    ("qwen3_coder", XML % ("x", '{"a": [true]}'), call("get_weather", '{"x": {"a": [true]}}')),
    ("qwen3_coder", "<tool_call><function=add></function></tool_call>", call("add", "{}")),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        call("add", '{"a": 1, "b": 2}'),
    ),
    ("qwen3_coder", "<tool_call><function=other></function></tool_call>", []),
    ("qwen3_coder", "<tool_call><function=add><param", [Piece("name", "add")]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', call("get_weather", PARIS)),
    (
        "llama3_json",
        '\n{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}\n',
        call("add", '{"a": 1}') + call("add", '{"a": 2}'),
    ),
    ("llama3_json", '{"name": "Alice", "age": 30}', []),
    ("llama3_json", '{"a": {"name": "add"}}', []),
    ("llama3_json", "Hello {", []),
    ("llama3_json", '{"name": "add", "parameters": {}} said he', call("add", "{}") + content("said he")),
    ("mistral", "[TOOL_CALLS]" + LISTED % PARIS, call("get_weather", PARIS) + call("add", "{}")),
    (
        "mistral",
        "Well. [TOOL_CALLS] " + LISTED % "{}",
        content("Well.") + call("get_weather", "{}") + call("add", "{}"),
    ),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{PARIS}[TOOL_CALLS]add{{}}",
        call("get_weather", PARIS) + call("add", "{}"),
    ),
    ("mistral", "[TOOL_CALLS][]", []),
    (
        "pythonic",
        "[add(a=1, b='x, ]', c=[{'k': (1, None, True)}]), get_weather()]",
        call("add", '{"a": 1, "b": "x, ]", "c": [{"k": [1, null, true]}]}') + call("get_weather", "{}"),
    ),
    ("pythonic", "[1, 2]", []),
    ("pythonic", "[add(1)]", []),
    ("pythonic", "[add(a=open('x'))]", []),
    ("pythonic", "[add(a=1", []),
    ("pythonic", "Hello [add(a=1)]", []),
    ("list", LISTED % PARIS, call("get_weather", PARIS) + call("add", "{}")),
]


@pytest.mark.parametrize(("form", "text", "expected"), EXPECTED)
def test_pieces_are_the_same_however_the_text_comes(form: str, text: str, expected: list[Piece]) -> None:
    """No expected pieces: all of it is text."""
    expected = [piece for piece in expected or content(text) if piece.text]
    assert read(form, text) == expected
    for seed in range(5):
        assert read(form, text, random.Random(seed)) == expected


@pytest.mark.parametrize("form", READERS)
def test_any_text_without_a_call_is_returned_as_it_is(form: str) -> None:
    draw = random.Random(7)
    words = ["<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', '"name"', ":", ",", "\\", " ", "\n", "a", "(", ")"]
    words += ["[TOOL_CALLS]", '"arguments"', "[ARGS]", "'"]
    for _ in range(500):
        text = "".join(draw.choices(words, k=draw.randint(0, 12)))
        assert "".join(piece.text for piece in read(form, text, draw)) == text
        assert all(piece.kind == "content" for piece in read(form, text))


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolParser(FORMS["hermes"].read, SCHEMAS)
    assert parser.push('<tool_call>{"name": "add"') == [Piece("name", "add")]
    assert parser.push(', "arguments": {"a": "lo') == [Piece("arguments", '{"a": "lo')]
    assert parser.push('ng"}') == [Piece("arguments", 'ng"}')]


def test_calls_after_the_last_one_wanted_are_dropped() -> None:
    for seed in (None, random.Random(1)):
        assert read("list", LISTED % PARIS, seed, most=1) == call("get_weather", PARIS)


def test_a_call_by_name_is_all_arguments() -> None:
    parser = ToolParser(read_arguments, {"add": {}})
    pieces = [*parser.push('{"a"'), *parser.push(": 1}"), *parser.flush()]
    assert pieces == [Piece("name", "add"), Piece("arguments", '{"a"'), Piece("arguments", ": 1}")]


@pytest.mark.parametrize(
    ("sign", "form"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("{{- '[TOOL_CALLS][' }}", "mistral"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("{{ messages }}", None),
    ],
)
def test_a_chat_template_tells_its_format(sign: str, form: str | None) -> None:
    assert form_of(f"{{% if tools %}}\n{sign}\n{{% endif %}}") == form


def test_long_arguments_take_linear_time() -> None:
    value: Any = {"text": "x" * 300_000}
    (name, arguments) = read("hermes", HERMES % json.dumps(value))
    assert (name.text, json.loads(arguments.text)) == ("get_weather", value)
