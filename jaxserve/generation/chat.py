"""Strict parsing of chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest, shown

MAX_MESSAGES = 2048  # most messages in a chat, and parts in one content
_MAX_NAME = 64  # most characters in a role or a name
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


def read(messages: Any) -> list[dict[str, Any]]:
    """Validates messages and returns them for a chat template.

    They have a role, content, and perhaps a name and tool calls.

    A content is a string, or a list of `{"type": "text", "text": ...}` parts as OpenAI's clients send them; the parts
    are joined. An assistant's message may have `tool_calls`, whose arguments become objects, and the answer of a tool
    has `tool_call_id`. Reading the result again returns it unchanged. Other fields may be there if they are null or
    empty: an answer has some of them, and is sent back as a message.

    Raises:
      InvalidRequest: naming `messages`.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _wrong(f"is {shown(messages)}; it must be a list of messages, each with role and content")
    if not messages:
        raise _wrong("is empty; a chat needs at least one message")
    if len(messages) > MAX_MESSAGES:
        raise _wrong(f"has more than {MAX_MESSAGES} entries")
    found, names = [_message(message) for message in messages], {}
    for message in found:  # some templates want the name of the tool with its answer, which OpenAI's API leaves out
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return found


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"holds {shown(message)}; each message must have role and content")
    for field, value in message.items():
        if field not in _FIELDS and not (value is None or value in ("", [], {})):
            raise _wrong(f"has a message with {shown(field)}, which is not served; {', '.join(_FIELDS)} are")
    calls, content = message.get("tool_calls"), message.get("content")
    found: dict[str, Any] = {"role": _name(message, "role")}
    found["content"] = "" if calls and content is None else _content(content)
    if not found["role"]:
        raise _wrong("has a message whose role is empty")
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None:
            found[field] = _name(message, field)
    if calls:
        if isinstance(calls, str | bytes) or not isinstance(calls, Sequence) or len(calls) > MAX_MESSAGES:
            raise _wrong(f"has a message whose tool_calls are {shown(calls)}; it must be a list")
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"has a message whose tool_calls hold {shown(call)}; each must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise _wrong(f"has a call of {function['name'][:_MAX_NAME]!r} whose arguments are no JSON object")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return found if call.get("id") is None else {"id": _name(call, "id")} | found


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
