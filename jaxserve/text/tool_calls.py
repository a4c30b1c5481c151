"""Finds calls of tools in an answer.

A format of calls (`tool_forms`) is a generator that gets one character at a time, so a streamed answer and a whole one
are read alike. What cannot be read as a call of a known tool is text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal, NamedTuple

SPACE = " \t\r\n"

Reader = Generator[None, str, Any]  # gets one character at a time, and "" at the end of the text


class Piece(NamedTuple):
    """A piece of an answer: text, a begun call's name, or more of its arguments (JSON)."""

    kind: Literal["content", "name", "arguments"]
    text: str


class Broken(Exception):
    """This is no call."""


class ToolParser:
    """Reads the answer to one request.

    Args:
      read: the format: a `Form.read`, `read_list` or `read_arguments`.
      schemas: JSON schemas of the tools' arguments, by name.
      most: most calls; later ones are dropped. None: any number.

    Attributes:
      calls: number of calls so far.
    """

    def __init__(
        self, read: Callable[[ToolParser], Reader], schemas: Mapping[str, Any], most: int | None = None
    ) -> None:
        self.schemas, self.calls = schemas, 0
        self._most = most
        self._found: list[tuple[Literal["content", "name", "arguments"], list[str]]] = []
        self._space = ""  # held back: before a call, it is not text
        self._tape: list[str] | None = None  # what may be a call or text
        self._again: list[str] = []  # characters to read again, last first
        self._reader = read(self)
        next(self._reader)

    def push(self, text: str) -> list[Piece]:
        """The pieces that more text completes."""
        for character in text:
            self._send(character)
        return self._taken()

    def flush(self) -> list[Piece]:
        """The last pieces, at the end of the text."""
        with contextlib.suppress(StopIteration):
            while True:
                self._send("")
        if not self.calls:
            self._put("content", self._space)
        return self._taken()

    def _send(self, character: str) -> None:
        self._again.append(character)
        while self._again:
            character = self._again.pop()
            if self._tape is not None:
                self._tape.append(character)
            self._reader.send(character)

    def _put(self, kind: Literal["content", "name", "arguments"], text: str) -> None:
        if self._found and self._found[-1][0] == kind != "name":
            self._found[-1][1].append(text)
        elif text:
            self._found.append((kind, [text]))

    def _taken(self) -> list[Piece]:
        found, self._found = self._found, []
        return [Piece(kind, "".join(texts)) for kind, texts in found]

    # For formats

    def content(self, text: str) -> None:
        """More text of the answer."""
        for character in text:
            self._space += character
            if character not in SPACE:
                self._put("content", self._space)
                self._space = ""

    def begin(self, name: str) -> None:
        """A call begins. Raises Broken if there is no such tool."""
        if name not in self.schemas:
            raise Broken
        self._space = ""
        self.calls += 1
        if self._most is None or self.calls <= self._most:
            self._put("name", name)

    def arguments(self, text: str) -> None:
        """More of the latest call's arguments."""
        if self._most is None or self.calls <= self._most:
            self._put("arguments", text)

    @contextlib.contextmanager
    def attempt(self, before: str = "") -> Iterator[None]:
        """The block reads a call; if it finds none, that is read again as text after `before`."""
        calls, self._tape = self.calls, []
        try:
            yield
        except Broken:
            if self.calls == calls:
                self.content(before)
                self._again += reversed(self._tape)
        finally:
            self._tape = None

    def unread(self, character: str) -> None:
        """Puts back the character that was read last."""
        self._again.append(character)
        if self._tape:
            self._tape.pop()

    def text_until(self, marker: str) -> Reader:
        """Reads text. Returns whether the marker ended it, and not the end of the answer."""
        held = ""
        while character := (yield):
            held += character
            while not marker.startswith(held):
                self.content(held[0])
                held = held[1:]
            if held == marker:
                return True
        self.content(held)
        return False

    def text(self) -> Reader:
        """Reads text to the end of the answer."""
        while character := (yield):
            self.content(character)
