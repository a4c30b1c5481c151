"""Protobuf's wire format by hand, so that tests hold the numbers of a published interface rather than our own file."""

from __future__ import annotations

import struct
from typing import Any


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def of_varint(field: int, number: int) -> bytes:
    return varint(field << 3) + varint(number)


def of_bytes(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def of_float(field: int, number: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", number)


def packed(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def unpacked(content: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(content):
        number, at = _varint_at(content, at)
        numbers.append(number)
    return numbers


def floats(content: bytes) -> list[float]:
    return [number for (number,) in struct.iter_unpack("<f", content)]


def fields(content: bytes) -> dict[int, Any]:
    """By number: whole numbers, doubles and bytes; of a field that comes several times a list of them."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(content):
        tag, at = _varint_at(content, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint_at(content, at)
        elif kind == 1:
            (value,), at = struct.unpack("<d", content[at : at + 8]), at + 8
        else:
            assert kind == 2, f"field {number} has wire type {kind}"
            length, at = _varint_at(content, at)
            value, at = content[at : at + length], at + length
            assert len(value) == length
        found.setdefault(number, []).append(value)
    return {number: values[0] if len(values) == 1 else values for number, values in found.items()}


def _varint_at(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
