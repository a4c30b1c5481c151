"""Parses the grammar of a call into a `Grammar`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

# White space in JSON: a space, or a line break and an indent. If it is unbounded, some models never stop.
JSON_DEFAULTS: Any = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,40}"}
MAX_CHOICES = 2**14  # each takes more than four bytes of the grammar's text
GRAMMAR_TYPES = (*get_args(GrammarKind), "json_object")


def read(field: str, value: Any) -> Grammar:
    """Parses `{"type": T, "value": V}`; returns a `Grammar` unchanged.

    Types and their values: `json_schema`, a schema as an object or as JSON text; `json_object`, no value; `regex`, a
    string; `choice`, a list of strings; `lark`, a string.

    Args:
      field: name of the caller's field, for error messages.

    Raises:
      InvalidRequest: the value is malformed; the error names the field.
    """
    if isinstance(value, Grammar):
        return value
    if not isinstance(value, Mapping) or not {"type"} <= value.keys() <= {"type", "value"}:
        raise InvalidRequest(field, 'must be an object {"type": ..., "value": ...}')
    kind, content = value["type"], value.get("value")
    match kind:
        case "json_schema":
            return json_schema(field, content)
        case "json_object":
            if content is not None:
                raise InvalidRequest(field, "of type json_object has no value; a schema is of type json_schema")
            return json_object(field)
        case "choice":
            return choice(field, content)
        case "regex" | "lark":
            return text(field, kind, content)
    raise InvalidRequest(field, f"is of type {str(kind)[:60]!r}; it must be {', '.join(GRAMMAR_TYPES)}")


def json_object(field: str) -> Grammar:
    """A grammar that allows any JSON object."""
    return Grammar(kind="json_schema", text='{"type":"object"}', field=field)


def json_schema(field: str, schema: Any) -> Grammar:
    """A grammar that allows the JSON that matches a schema, given as an object or as text."""
    if isinstance(schema, str):
        _check_size(field, schema)
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise InvalidRequest(field, "is nested too deeply") from None
        except ValueError as problem:
            raise InvalidRequest(field, f"is no JSON: {problem}") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(field, f"has a {type(schema).__name__} for a JSON schema; it must be an object")
    try:
        # Keys are not sorted: properties are generated in the order of the schema.
        written = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except (TypeError, ValueError) as problem:
        raise InvalidRequest(field, f"is no JSON: {problem}") from None
    return Grammar(kind="json_schema", text=written, field=field)


def calls(field: str, schemas: Mapping[str, Any], *, parallel: bool) -> Grammar:
    """A grammar that allows a JSON list of calls, `{"name": ..., "arguments": ...}`.

    Args:
      schemas: of the arguments, by the name of the function.
      parallel: whether the list may have more than one.
    """
    # Each schema is a grammar of its own, so that its references stay its own.
    lines = [
        'start: "[" call ' + ('(", " call)* ' if parallel else "") + '"]"',
        "call: " + " | ".join(f"call_{i}" for i in range(len(schemas))),
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        beginning = f'{{"name": {json.dumps(name)}, "arguments": '
        written = json_schema(field, {"x-guidance": JSON_DEFAULTS} | dict(schema)).text
        lines += [f'call_{i}: {json.dumps(beginning)} args_{i} "}}"', f"args_{i}: %json {written}"]
    return text(field, "lark", "\n".join(lines))


def choice(field: str, options: Any) -> Grammar:
    """A grammar that allows one of several strings."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InvalidRequest(field, "must be a list of strings, at least one")
    if len(options) > MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(options)} strings; at most {MAX_CHOICES} are allowed")
    if not all(isinstance(option, str) and option for option in options):
        raise InvalidRequest(field, "must be a list of strings, none of them empty")
    return Grammar(kind="choice", text=json.dumps(list(options)), field=field)


def text(field: str, kind: GrammarKind, content: Any) -> Grammar:
    """A grammar that is written as text: a regular expression or a Lark grammar."""
    if not isinstance(content, str) or not content:
        raise InvalidRequest(field, "must be a string, and not an empty one")
    return Grammar(kind=kind, text=content, field=field)


def _check_size(field: str, content: str) -> None:
    if len(content) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has {len(content)} characters; at most {MAX_GRAMMAR_BYTES} bytes are allowed")
