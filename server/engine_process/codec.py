"""Values as plain data (what JSON holds) and back, by their types alone.

Whatever is a dataclass, a NamedTuple, an enum, a tuple, a path or a number and says so in its annotations can cross to
another process; nothing that is read names code. A dataclass leaves out the fields that have their defaults.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
_SCALARS = (int, float, str, bool)


class Codec(NamedTuple):
    """To plain data and back; `decode` raises ValueError for what is not of the type."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode(kind: type[_T], value: _T) -> Any:
    """The plain data of a value of this type."""
    return codec(kind).encode(value)


def decode(kind: type[_T], data: Any) -> _T:
    """The value of plain data. Raises ValueError where it is not one of this type."""
    return codec(kind).decode(data)


@functools.cache
def codec(kind: Any) -> Codec:
    """The codec of a type. Raises TypeError for a type that cannot cross."""
    if kind in _SCALARS:
        return Codec(_same, functools.partial(_scalar, kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return Codec(_same, functools.partial(_one_of, arguments))
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _sequence(arguments[0]) if arguments[1:] == (...,) else _fixed(arguments, tuple)
    if kind is bytes:
        return Codec(lambda value: base64.b64encode(value).decode(), _bytes)
    if isinstance(kind, type):
        if issubclass(kind, Path):
            return Codec(str, lambda data: Path(_scalar(str, data)))
        if issubclass(kind, enum.Enum):
            return Codec(lambda value: value.value, kind)
        if dataclasses.is_dataclass(kind):
            return _dataclass(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            hints = typing.get_type_hints(kind)
            return _fixed(tuple(hints[name] for name in kind._fields), lambda values: kind(*values))  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(f"{kind} cannot be made plain data")


def _same(value: Any) -> Any:
    return value


def _scalar(kind: type, data: Any) -> Any:
    if type(data) is kind:
        return data
    if kind is float and type(data) is int:
        return float(data)
    raise ValueError(f"{_short(data)} is no {kind.__name__}")


def _bytes(data: Any) -> bytes:
    return base64.b64decode(_scalar(str, data), validate=True)


def _one_of(choices: tuple[Any, ...], data: Any) -> Any:
    if data in choices:
        return data
    raise ValueError(f"{_short(data)} is none of {choices}")


def _union(kinds: tuple[Any, ...]) -> Codec:
    """Of None and one other type: more could not be told apart."""
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) != 1:
        raise TypeError(f"{kinds} cannot be told apart as plain data")
    inner = codec(others[0])
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda data: None if data is None else inner.decode(data),
    )


def _sequence(kind: Any) -> Codec:
    inner = codec(kind)
    if kind in (int, str):  # prompts: no call for each of their tokens

        def scalars(data: Any) -> tuple[Any, ...]:
            if type(data) is not list or not set(map(type, data)) <= {kind}:
                raise ValueError(f"{_short(data)} is no list of {kind.__name__}")
            return tuple(data)

        return Codec(list, scalars)
    return Codec(
        lambda values: [inner.encode(value) for value in values],
        lambda data: tuple(inner.decode(each) for each in _list(data)),
    )


def _fixed(kinds: tuple[Any, ...], make: Callable[[Any], Any]) -> Codec:
    inner = [codec(kind) for kind in kinds]

    def decoded(data: Any) -> Any:
        if len(_list(data)) != len(inner):
            raise ValueError(f"{_short(data)} has not {len(inner)} entries")
        return make([each.decode(part) for each, part in zip(inner, data, strict=True)])

    return Codec(lambda values: [each.encode(value) for each, value in zip(inner, values, strict=True)], decoded)


def _dataclass(kind: Any) -> Codec:
    hints = typing.get_type_hints(kind)
    fields = [(f.name, f.default, codec(hints[f.name])) for f in dataclasses.fields(kind)]
    inner = {name: each for name, _, each in fields}

    def encoded(value: Any) -> dict[str, Any]:
        parts = [(name, getattr(value, name), default, each) for name, default, each in fields]
        return {name: each.encode(part) for name, part, default, each in parts if not _equal(part, default)}

    def decoded(data: Any) -> Any:
        if type(data) is not dict or not data.keys() <= inner.keys():
            raise ValueError(f"{_short(data)} has not the fields of {kind.__name__}")
        try:
            return kind(**{name: inner[name].decode(part) for name, part in data.items()})
        except TypeError as problem:  # a field without a default is missing
            raise ValueError(f"no {kind.__name__}: {problem}") from None

    return Codec(encoded, decoded)


def _equal(value: Any, default: Any) -> bool:
    """Whether a field may be left out: 0 is not False, and what is no number equals nothing."""
    return type(value) is type(default) and value == default and not (type(value) is float and math.isnan(value))


def _list(data: Any) -> list[Any]:
    if type(data) is not list:
        raise ValueError(f"{_short(data)} is no list")
    return data


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."
