"""Strict parsing of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest, shown

MAX_MESSAGES = 2048  # most messages in a chat, and parts in one content
_MAX_NAME = 64  # most characters in a role or a name
_FIELDS = ("role", "content", "name")


def read(messages: Any) -> list[dict[str, str]]:
    """Validates messages and returns them for a chat template: role, content and perhaps name.

    A content is a string, or a list of `{"type": "text", "text": ...}` parts as OpenAI's clients send them; the parts
    are joined. Reading the result again returns it unchanged. Other fields may be there if they are null or empty: an
    answer has some of them, and is sent back as a message.

    Raises:
      InvalidRequest: naming `messages`.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _wrong(f"is {shown(messages)}; it must be a list of messages, each with role and content")
    if not messages:
        raise _wrong("is empty; a chat needs at least one message")
    if len(messages) > MAX_MESSAGES:
        raise _wrong(f"has more than {MAX_MESSAGES} entries")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise _wrong(f"holds {shown(message)}; each message must have role and content")
    for field, value in message.items():
        if field not in _FIELDS and not (value is None or value in ("", [], {})):
            raise _wrong(f"has a message with {shown(field)}, which is not served; role, content and name are")
    found = {"role": _name(message, "role"), "content": _content(message.get("content"))}
    if not found["role"]:
        raise _wrong("has a message whose role is empty")
    if message.get("name") is not None:
        found["name"] = _name(message, "name")
    return found


def _name(message: Mapping[str, Any], field: str) -> str:
    value = message.get(field)
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise _wrong(
            f"has a message whose {field} is {shown(value)}; it must be a string of at most {_MAX_NAME} characters"
        )
    return value


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise _wrong(f"has a message whose content is {shown(content)}; it must be a string")
    if len(content) > MAX_MESSAGES:
        raise _wrong(f"has a message whose content has more than {MAX_MESSAGES} parts")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise _wrong(f"has a message whose content holds {shown(part)}; each part must be text")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest("messages", message)
