"""Calls of tools in the form of OpenAI's chats: as deltas of a stream, and in a message."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Any

from jaxserve.text.tool_calls import Piece

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # templates of Mistral take ids of nine letters and digits only


class CallDeltas:
    """The deltas of one answer. Its calls are numbered and get ids."""

    def __init__(self) -> None:
        self.calls = 0

    def of(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """The fields of a delta for each piece."""
        return [self._delta(piece) for piece in pieces]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == "content":
            return {"content": piece.text}
        if piece.kind == "arguments":
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece.text}}]}
        self.calls += 1
        return {"tool_calls": [{"index": self.calls - 1} | new_call(piece.text)]}


def new_call(name: str) -> dict[str, Any]:
    """A call of a tool that has no arguments yet."""
    return {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def new_call_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The content and the calls of a message; its content is null if it has calls and no text."""
    content, calls = "", []
    for piece in pieces:
        match piece.kind:
            case "content":
                content += piece.text
            case "name":
                calls.append(new_call(piece.text))
            case "arguments":
                calls[-1]["function"]["arguments"] += piece.text
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}
