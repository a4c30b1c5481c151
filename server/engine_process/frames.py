"""How the front process and the engine process speak: frames of a length, a kind and a body, on a socket that no other
process can reach.

The socket is one of a nameless pair that the front made and the engine process inherited: there is no path that a third
could open. What is no frame all the same (a bug, or bytes that something printed to the wrong place) ends the
connection.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator
from typing import Any

_HEAD = struct.Struct("<IB")  # bytes of the body, kind
HEAD_BYTES = _HEAD.size
MAX_BODY = 64 * 2**20  # bytes: an iteration that scores a thousand prompt tokens with 20 alternatives each has one


class FrameKind(enum.IntEnum):
    """What a frame says. The body is JSON where nothing else is said."""

    # From the front
    START = 1  # the job
    SUBMIT = 2  # a request
    ABORT = 3  # its name
    STOP = 4  # end: every request is given up
    # From the engine process
    PROGRESS = 16  # what is being done, how much of it, of how much
    READY = 17  # the facts
    REFUSED = 18  # why it cannot start, in a sentence for who started it
    ITERATION = 19  # see `iterations`; binary
    FAILED = 20  # the engine has failed
    ALIVE = 21  # of a host that has no callers: seconds after which it is lost if this does not come again


class BadFrame(ValueError):
    """What has come is not what the other side would send."""


class TooLarge(ValueError):
    """More than one frame may hold."""


def frame(kind: FrameKind, body: bytes) -> bytes:
    """One frame. Raises TooLarge for a body that would not be read."""
    if len(body) > MAX_BODY:
        raise TooLarge(f"{len(body)} bytes, more than the {MAX_BODY} that one message holds")
    return _HEAD.pack(len(body), kind) + body


def json_frame(kind: FrameKind, value: Any) -> bytes:
    """One frame with plain data in it."""
    return frame(kind, json.dumps(value, separators=(",", ":")).encode())


def parse_json(body: bytes) -> Any:
    """The plain data of a frame. Raises BadFrame."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise BadFrame(f"no JSON: {problem}") from None


def read_head(head: bytes) -> tuple[int, FrameKind]:
    """(bytes of the body, kind). Raises BadFrame."""
    size, number = _HEAD.unpack(head)
    if size > MAX_BODY:
        raise BadFrame(f"a frame of {size} bytes, more than {MAX_BODY}")
    try:
        return size, FrameKind(number)
    except ValueError:
        raise BadFrame(f"a frame of kind {number}, which is none") from None


class Splitter:
    """Cuts what comes in pieces into frames."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """The frames that are whole now. Raises BadFrame."""
        pieces = self._pieces
        pieces += data
        at = 0
        try:
            while len(pieces) - at >= HEAD_BYTES:
                size, kind = read_head(bytes(pieces[at : at + HEAD_BYTES]))
                end = at + HEAD_BYTES + size
                if len(pieces) < end:
                    return
                body = bytes(memoryview(pieces)[at + HEAD_BYTES : end])
                at = end
                yield kind, body
        finally:
            del pieces[:at]
