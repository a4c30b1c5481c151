"""Parses JSON that strangers send, within bounds that are checked before it is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import pydantic

from server.errors import ApiError, ErrorKind
from server.limits import MAX_VALUES

MAX_NESTED = 2**16  # lists and objects
_MAX_FIELDS = 512  # of one object
_PIECE = 2**16  # bytes that are looked at in one step, so that other threads run in between

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def parse(body: bytes, model: type[_Model]) -> tuple[dict[str, Any], _Model]:
    """A body as JSON has it, and as a value of the model. Raises ApiError."""
    check_size(body)
    try:
        value = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ApiError(ErrorKind.INVALID, "the body is not JSON: nested too deeply") from None
    except ValueError as problem:  # also text that is not UTF-8
        raise ApiError(ErrorKind.INVALID, f"the body is not JSON: {problem}") from None
    try:
        return value, model.model_validate(value)
    except pydantic.ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        field = str(first["loc"][0]) if first["loc"] else None
        text = f"{path}: {first['msg']}" if path else first["msg"]
        raise ApiError(ErrorKind.INVALID, text, field=field) from None


def check_size(body: bytes) -> None:
    """ApiError for a JSON text with too much in it to parse in a few milliseconds."""
    if _values(body) <= MAX_VALUES and _nested(body) <= MAX_NESTED:
        return  # even if the commas and brackets in its strings count
    values = nested = 0
    for part in _outside_strings(body):
        values += _values(part)
        nested += _nested(part)
        if values > MAX_VALUES:
            raise ApiError(ErrorKind.INVALID, f"the body has more than {MAX_VALUES} values")
        if nested > MAX_NESTED:
            raise ApiError(ErrorKind.INVALID, f"the body has more than {MAX_NESTED} lists and objects")


def _values(part: bytes) -> int:
    return part.count(b",") + _nested(part)


def _nested(part: bytes) -> int:
    return part.count(b"[") + part.count(b"{")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """A JSON text without its strings, in parts."""
    start, in_string = 0, False
    while start < len(body):
        piece = body[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape is not split
            piece = body[start : start + len(piece) + 1]
        start += len(piece)
        parts = (_ESCAPE.sub(b"", piece) if b"\\" in piece else piece).split(b'"')
        yield b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_FIELDS:
        raise ValueError(f"an object with {len(pairs)} fields")
    return dict(pairs)
