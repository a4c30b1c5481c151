"""Frames between the front process and the engine process: a length and a protobuf message.

The front makes an unnamed socket pair and the engine process inherits one end, so no other process can connect. Bytes
that are not a frame, for example output printed to the wrong descriptor, end the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEAD = struct.Struct("<I")  # bytes of the message
HEAD_BYTES = _HEAD.size
MAX_BODY = 64 * 2**20  # bytes: enough to score a thousand prompt tokens with 20 alternatives each


class BadFrame(ValueError):
    """The bytes received are not what the other side would send."""


class TooLarge(ValueError):
    """A message is larger than one frame may be."""


def frame(body: bytes) -> bytes:
    """A frame with a serialized message. Raises TooLarge."""
    if len(body) > MAX_BODY:
        raise TooLarge(f"{len(body)} bytes, more than the {MAX_BODY} that one message holds")
    return _HEAD.pack(len(body)) + body


class Splitter:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that are complete after these bytes. Raises BadFrame."""
        pieces = self._pieces
        pieces += data
        at = 0
        try:
            while len(pieces) - at >= HEAD_BYTES:
                (size,) = _HEAD.unpack_from(pieces, at)
                if size > MAX_BODY:
                    raise BadFrame(f"a frame of {size} bytes; at most {MAX_BODY} are allowed")
                end = at + HEAD_BYTES + size
                if len(pieces) < end:
                    return
                body = bytes(memoryview(pieces)[at + HEAD_BYTES : end])
                at = end
                yield body
        finally:
            del pieces[:at]
