"""Reading what a caller says of the text it wants: a value of some form becomes a `Grammar`, in one spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

GRAMMAR_TYPES = (*get_args(GrammarKind), "json_object")


def read(field: str, value: Any) -> Grammar:
    """A grammar of `{"type": T, "value": V}`; one that is a Grammar already is itself.

    Types and their values: `json_schema`, a schema as an object or as its JSON; `json_object`, none; `regex`, a
    string; `choice`, a list of strings; `lark`, a string.

    Raises:
      InvalidRequest: naming the field.
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
    """Any JSON object."""
    return Grammar(kind="json_schema", text='{"type":"object"}', field=field)


def json_schema(field: str, schema: Any) -> Grammar:
    """A JSON text that a schema describes; the schema as an object, or as its JSON."""
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
        # In the order of the caller, which is that of the properties in the text.
        written = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except (TypeError, ValueError) as problem:
        raise InvalidRequest(field, f"is no JSON: {problem}") from None
    return Grammar(kind="json_schema", text=written, field=field)


def choice(field: str, options: Any) -> Grammar:
    """One of several strings."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InvalidRequest(field, "must be a list of strings, at least one")
    if not all(isinstance(option, str) and option for option in options):
        raise InvalidRequest(field, "must be a list of strings, none of them empty")
    return Grammar(kind="choice", text=json.dumps(list(options)), field=field)


def text(field: str, kind: GrammarKind, content: Any) -> Grammar:
    """A grammar that is a text: a regular expression, or Lark."""
    if not isinstance(content, str) or not content:
        raise InvalidRequest(field, "must be a string, and not an empty one")
    return Grammar(kind=kind, text=content, field=field)


def _check_size(field: str, content: str) -> None:
    if len(content) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"has {len(content)} characters; at most {MAX_GRAMMAR_BYTES} bytes are allowed")
