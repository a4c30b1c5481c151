"""The formats in which families of models write calls of tools."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxserve.text.tool_calls import SPACE, Broken, Reader, ToolParser

_LONGEST = 2**16  # characters of a call in Python's form, which is read at its end

Put = Callable[[str], None]


def _read_hermes(out: ToolParser) -> Reader:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, between texts."""
    while (yield from out.text_until("<tool_call>")):
        with out.attempt("<tool_call>"):
            yield from _call(out)
            yield from _word("</tool_call>")


def _read_qwen3_coder(out: ToolParser) -> Reader:
    """Between texts: `<tool_call><function=f><parameter=a>text</parameter>...</tool_call>`."""
    while (yield from out.text_until("<tool_call>")):
        with out.attempt("<tool_call>"):
            yield from _word("<function=")
            name = yield from _until(">")
            out.begin(name)
            before = "{"
            while (tag := (yield from _one_of("<parameter=", "</function>"))) == "<parameter=":
                key = yield from _until(">")
                value = yield from _until("</parameter>")
                out.arguments(f"{before}{json.dumps(key)}: {_as_json(value, _schema_of(out.schemas[name], key))}")
                before = ", "
            assert tag == "</function>"
            out.arguments("{}" if before == "{" else "}")
            yield from _word("</tool_call>")


def _read_llama(out: ToolParser) -> Reader:
    """`{"name": "f", "parameters": {...}}; {...}`, at the beginning of the answer."""
    more = True
    while more:
        more = False
        with out.attempt():
            yield from _call(out)
            more = True
        if more and (end := (yield from _nonspace())) not in (";", ","):
            out.unread(end)
            more = False
    yield from out.text()


def _read_mistral(out: ToolParser) -> Reader:
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` a call."""
    marker = "[TOOL_CALLS]"
    while (yield from out.text_until(marker)):
        with out.attempt(marker):
            first = yield from _nonspace()
            out.unread(first)
            yield from _list(out) if first == "[" else _call_by_name(out)


def _read_pythonic(out: ToolParser) -> Reader:
    """`[f(a=1, b="x"), g()]`, at the beginning of the answer."""
    with out.attempt():
        yield from _word("[")
        end = ","
        while end != "]":
            text, end = yield from _python_call()
            name, arguments = _evaluated(text)
            out.begin(name)
            out.arguments(arguments)
    yield from out.text()


def read_list(out: ToolParser) -> Reader:
    """`[{"name": "f", "arguments": {...}}, ...]`, the form of required calls."""
    with out.attempt():
        yield from _list(out)
    yield from out.text()


def read_arguments(out: ToolParser) -> Reader:
    """The arguments of the only tool, the form of a call that is required by name."""
    (name,) = out.schemas
    out.begin(name)
    while character := (yield):
        out.arguments(character)


class Form(NamedTuple):
    """A format of calls.

    Attributes:
      sign: found in chat templates with tools in this format.
      special_tokens: whether its markers are special tokens.
    """

    read: Callable[[ToolParser], Reader]
    sign: str
    special_tokens: bool = False


FORMS = {
    "hermes": Form(_read_hermes, r"(?s)\A(?!.*<function=)(?!.*<arg_key>).*<tool_call>"),
    "qwen3_coder": Form(_read_qwen3_coder, r"(?s)<tool_call>.*<function="),
    "llama3_json": Form(_read_llama, r'"parameters": dictionary of argument name'),
    "mistral": Form(_read_mistral, r"\[TOOL_CALLS\]", special_tokens=True),
    "pythonic": Form(_read_pythonic, r"\[func_name1\("),
}


def form_of(template: str) -> str | None:
    """The name of the format that a chat template writes calls in; None if it is not known."""
    return next((name for name, form in FORMS.items() if re.search(form.sign, template)), None)


# Parts of formats


def _nonspace() -> Reader:
    while (character := (yield)) and character in SPACE:
        pass
    return character


def _word(word: str) -> Reader:
    """Reads exactly this, after white space."""
    if (yield from _nonspace()) != word[0]:
        raise Broken
    for expected in word[1:]:
        if (yield) != expected:
            raise Broken


def _one_of(*words: str) -> Reader:
    """Reads one of these, after white space, and returns it."""
    text = yield from _nonspace()
    while text not in words:
        if not any(word.startswith(text) for word in words) or not (character := (yield)):
            raise Broken
        text += character
    return text


def _until(end: str) -> Reader:
    """Reads text to this end, and returns it without."""
    text: list[str] = []
    while "".join(text[-len(end) :]) != end:
        if not (character := (yield)):
            raise Broken
        text.append(character)
    return "".join(text[: -len(end)])


def _schema_of(schema: Any, key: str) -> Any:
    """The schema of one argument; None if there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _as_json(value: str, schema: Any) -> str:
    """The JSON of an argument in plain text: a string, unless its schema has another type."""
    value = value.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        if kind is not None or not isinstance(read, str):
            return json.dumps(read, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _list(out: ToolParser) -> Reader:
    """A JSON list of calls."""
    yield from _word("[")
    end = ","
    while end == ",":
        yield from _call(out)
        end = yield from _nonspace()
    if end != "]":
        raise Broken


def _call(out: ToolParser) -> Reader:
    """A JSON object with the name and the arguments of a call."""
    yield from _word("{")
    begun, given, arguments, end = False, False, [], ","
    while end == ",":
        yield from _word('"')
        key = yield from _string()
        yield from _word(":")
        if key == "name" and not begun:
            yield from _word('"')
            out.begin((yield from _string()))
            begun = True
            out.arguments("".join(arguments))
        elif key in ("arguments", "parameters"):
            yield from _value(out, out.arguments if begun else arguments.append)
            given = True
        else:
            yield from _value(out, lambda _: None)
        end = yield from _nonspace()
    if end != "}" or not begun:
        raise Broken
    if not given:
        out.arguments("{}")


def _call_by_name(out: ToolParser) -> Reader:
    """The name of a tool, perhaps markers, and its arguments."""
    name = ""
    while (character := (yield)) != "{":
        if not character:
            raise Broken
        name += character
    out.begin(name.partition("[")[0].strip())
    out.unread(character)
    yield from _value(out, out.arguments)


def _value(out: ToolParser, put: Put) -> Reader:
    """A JSON value, as text. A string is its content: some models write arguments so."""
    character = yield from _nonspace()
    if character == '"':
        put((yield from _string()))
    elif character in ("{", "["):
        put(character)
        yield from _nested(put)
    else:
        while character and character not in ",}]" + SPACE:
            put(character)
            character = yield
        out.unread(character)


def _nested(put: Put) -> Reader:
    """The rest of an object or list."""
    depth = 1
    while depth:
        character = yield
        put(character)
        if character == '"':
            yield from _quoted('"', put)
        elif not character:
            raise Broken
        depth += (character in "{[") - (character in "}]")


def _quoted(quote: str, put: Put) -> Reader:
    """The rest of a string, with the quote that ends it."""
    character = ""
    while character != quote:
        character = yield
        put(character)
        if character == "\\":
            put((yield))
        elif not character:
            raise Broken


def _string() -> Reader:
    """The content of a JSON string after its first quote."""
    text: list[str] = ['"']
    yield from _quoted('"', text.append)
    try:
        return json.loads("".join(text), strict=False)
    except ValueError:
        raise Broken from None


def _python_call() -> Reader:
    """The text of a call in Python's form, and what follows it: a comma or a bracket."""
    text: list[str] = []
    depth = 0
    while len(text) < _LONGEST:
        character = yield
        if not depth and character in ("", ",", "]"):
            return "".join(text), character
        text.append(character)
        if character in ('"', "'"):
            yield from _quoted(character, text.append)
        elif not character:
            break
        depth += (character in "([{") - (character in ")]}")
    raise Broken


def _evaluated(text: str) -> tuple[str, str]:
    """The name and the arguments (JSON) of a call in Python's form."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Broken
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Broken from None
