"""The body of `/v1/responses`, read as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxserve.errors import InvalidRequest, shown
from jaxserve.sampling_params import MAX_LOGPROBS
from server.http.body import Body
from server.http.schemas import PLAIN_PARAMS, ChatBody, Seed, sampling_body

# Names of the chat's fields, as this call has them.
FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")  # types of a content's parts
_OTHER_NAMES = ("max_tokens", "prompt_logprobs")
_SAMPLING = [param for param in PLAIN_PARAMS if param.name not in _OTHER_NAMES]


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(sampling_body("_ResponsesSampling", *_SAMPLING)):
    """Nothing is stored: references to earlier answers are refused, `store` has no effect."""

    model: str | None = None
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    seed: Seed | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    @property
    def chat(self) -> ChatBody:
        """The chat that this is. Raises InvalidRequest."""
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise InvalidRequest(name, "is not served: nothing is stored; send the whole conversation as input")
        if self.truncation not in (None, "disabled"):
            raise InvalidRequest("truncation", f"is {shown(self.truncation)}; only disabled is served")
        fields = {param.name: getattr(self, param.name) for param in _SAMPLING}
        fields |= {
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": None if self.text is None else _response_format(self.text.format),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return ChatBody.model_validate(fields)


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest("input", f"is {shown(given)}; it must be a string or a list of items")
    for item in given:
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(output)})
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": _content(content)})
            case {"type": "item_reference"}:
                raise InvalidRequest(
                    "input", "refers to an item, and none is stored; send the items whole (clients do with store false)"
                )
            case _:
                raise InvalidRequest(
                    "input", f"holds {shown(item)}; each must be a message, a function_call or a function_call_output"
                )
    return messages


def _content(content: Any) -> Any:
    """A content as chats have it; they refuse what is no text."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, Mapping) and part.get("type") in _TEXTS else part
        for part in content
    ]


def _tool(tool: Any) -> Any:
    """A tool as chats have it: there its fields are in `function`."""
    if not isinstance(tool, Mapping):
        return tool
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(given: Format | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise InvalidRequest("text", "needs a schema in a format of type json_schema")
    return {"type": "json_schema", "json_schema": {"schema": given.schema_}}
