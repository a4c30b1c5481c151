"""Strict parsing of the tools of a chat and of the choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest, shown
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output import grammar
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tool_calls import ToolParser
from jaxserve.text.tool_forms import FORMS, read_arguments, read_list

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas by name
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def read(tools: Any) -> list[dict[str, Any]]:
    """Validates tools and returns them for a chat template; idempotent.

    Each is `{"type": "function", "function": {"name": ..., "description": ..., "parameters": SCHEMA}}`. With
    `"strict": true` the objects in its schema are closed: they have all of their properties and no others.

    Raises:
      InvalidRequest: naming `tools`.
    """
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools", f"is {shown(tools)}; it must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    found = [{"type": "function", "function": _function(tool)} for tool in tools]
    names = [tool["function"]["name"] for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest("tools", f"has {name!r} twice")
    return found


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest("tools", f'holds {shown(tool)}; each must be {{"type": "function", "function": ...}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest("tools", f"holds the function {shown(function)}; it must be an object with a name")
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest("tools", f"has the name {shown(name)}; it must be 1 to 64 letters, digits, _, . or -")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest("tools", f"describes {name} by {shown(description)}; it must be a string")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest("tools", f"has {shown(parameters)} for the parameters of {name}; it must be a JSON schema")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest("tools", f"has strict {shown(strict)} for {name}; it must be true or false")
    schema = {"type": "object"} | dict(parameters or {"properties": {}})
    try:
        schema = _closed(schema) if strict else schema
    except RecursionError:
        raise InvalidRequest("tools", f"nests the parameters of {name} too deeply") from None
    return {"name": name, "description": description or "", "parameters": schema}


def _closed(schema: Any) -> Any:
    """A JSON schema whose objects have all of their properties and no others."""
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            closed[keyword] = {name: _closed(each) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, Sequence):
            closed[keyword] = [_closed(each) for each in value]
        else:
            closed[keyword] = _closed(value) if keyword in _SCHEMAS else value
    if isinstance(properties := closed.get("properties"), Mapping):
        closed |= {"additionalProperties": False, "required": list(properties)}
    return closed


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a call, and how it wants them to be called.

    Attributes:
      tools: as the template gets them.
      choice: "auto", "required", or the name of the tool to call.
      parallel: whether an answer may have several calls.
    """

    tools: tuple[dict[str, Any], ...]
    choice: str
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """The parameters of the tools that may be called, by name."""
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        return schemas if self.choice in ("auto", "required") else {self.choice: schemas[self.choice]}

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the text; None if the model decides. Raises InvalidRequest."""
        match self.choice:
            case "auto":
                return None
            case "required":
                return grammar.calls("tools", self.schemas, parallel=self.parallel)
        return grammar.json_schema("tools", self.schemas[self.choice])

    def check(self, template: ChatTemplate | None) -> None:
        """Raises InvalidRequest if the template takes no tools, or the calls cannot be read."""
        if self.choice != "auto" or template is None:
            return
        if "tools" not in template.with_tools.variables:
            raise InvalidRequest(
                "tools", "are not in this checkpoint's chat template; only calls that tool_choice requires are served"
            )
        if template.tool_form is None:
            raise InvalidRequest(
                "tools", "are called in a form that the server does not know; it can be started with --tool-parser"
            )

    def special_tokens(self, template: ChatTemplate | None) -> bool:
        """Whether the parser needs special tokens in the text."""
        form = None if template is None or self.choice != "auto" else template.tool_form
        return form is not None and FORMS[form].special_tokens

    def parser(self, template: ChatTemplate | None) -> ToolParser:
        """A new parser of an answer."""
        most = None if self.parallel else 1
        if self.choice == "auto":
            assert template is not None
            assert template.tool_form is not None
            return ToolParser(FORMS[template.tool_form].read, self.schemas, most)
        return ToolParser(read_list if self.choice == "required" else read_arguments, self.schemas, most)


def read_use(tools: Any, choice: Any, *, parallel: bool = True) -> ToolUse | None:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls` of a call; None without tools.

    Raises:
      InvalidRequest: naming the field.
    """
    found = read(tools or ())
    if choice is None or choice in ("none", "auto"):
        return ToolUse(tools=tuple(found), choice="auto", parallel=parallel) if found and choice != "none" else None
    if not found:
        raise InvalidRequest("tool_choice", f"is {shown(choice)}, which needs tools")
    names = [tool["function"]["name"] for tool in found]
    if choice == "required":
        return ToolUse(tools=tuple(found), choice=choice, parallel=parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name in names:
            return ToolUse(tools=tuple(found), choice=str(name))
        raise InvalidRequest("tool_choice", f"is the function {shown(name)}, which is not among the tools")
    raise InvalidRequest(
        "tool_choice", f'is {shown(choice)}; it must be none, auto, required or {{"type": "function", "function": ...}}'
    )
