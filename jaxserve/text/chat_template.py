"""Renders chats with a checkpoint's template, in a process with limits on time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes

from jaxserve.text import tool_forms
from jaxserve.text.template_process import MAX_TEXT, SECONDS, LimitsExceeded, TemplateProcess, environment

_MAX_SOURCE = 2**18  # characters of a template; published ones have up to 20,000
_LONG = 2**16  # bytes of a request from which on it does not delay short ones
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_PROCESSES = (TemplateProcess(), TemplateProcess())  # for short and for long requests


class ChatTemplate:
    """A chat template in the format of the transformers library.

    Args:
      source: the template in Jinja.
      special_tokens: texts of the special tokens by names such as `bos_token`.

    Attributes:
      variables: names that the template reads.
      with_tools: the template for chats with tools, which is this one or another.
      tool_form: name of the format in which the model calls tools (`tool_forms.FORMS`); None if it is not known.

    Raises:
      ValueError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source, self._special_tokens = source, special_tokens
        self.with_tools = self
        self.tool_form = tool_forms.form_of(source)
        if len(source) > _MAX_SOURCE:
            raise ValueError(f"the chat template has {len(source)} characters; it may have {_MAX_SOURCE}")
        try:
            parsed = environment().parse(source)  # compiles nothing
        except (jinja2.TemplateError, RecursionError, ValueError) as problem:
            raise ValueError(f"the chat template is not valid Jinja: {problem}") from problem
        self.variables = frozenset(name.name for name in parsed.find_all(nodes.Name) if name.ctx == "load")

    @classmethod
    def from_directory(cls, path: Path, other: Path | None = None) -> ChatTemplate | None:
        """Reads the template of a checkpoint directory; None if it has none.

        It is in chat_template.jinja or in tokenizer_config.json, or in the file `other`.

        Raises:
          ValueError: a file exists and cannot be read.
        """
        config, file, for_tools = path / "tokenizer_config.json", other or path / "chat_template.jinja", None
        try:
            fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
            source = file.read_text(encoding="utf-8") if other or file.exists() else fields.get("chat_template")
            if isinstance(source, list):  # several templates, by name
                by_name = {each["name"]: each["template"] for each in source}
                source, for_tools = by_name.get("default"), by_name.get("tool_use")
            special_tokens = {name: _text(fields[name]) for name in _SPECIAL if fields.get(name)}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"{config}, or {other or file.name}, cannot be read: {problem!r}") from problem
        if not source:
            return None
        if not isinstance(source, str) or not isinstance(for_tools, str | None):
            raise ValueError(f"{config}: chat_template must be a string or a list of named strings")
        template = cls(source, special_tokens)
        if for_tools:
            template.with_tools = cls(for_tools, special_tokens)
            template.tool_form = template.with_tools.tool_form
        return template

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders messages as the text that the model was trained on, including special tokens.

        Args:
          messages: each with `role` and `content`, and perhaps `tool_calls` or `tool_call_id`.
          add_generation_prompt: whether the text ends with the start of an answer.
          tools: those that the model may call.
          variables: more names for the template; those that it does not read change nothing.

        Raises:
          ValueError: a variable has a name that is taken, the template rejects these messages, or the text is too long
            or takes too long.
        """
        known = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        known["tools"] = list(tools) or None
        known |= self._special_tokens
        if taken := sorted(known.keys() & variables.keys()):
            raise ValueError(f"cannot be rendered with another value of {taken[0]}")
        source = (self.with_tools if tools else self)._source
        request = json.dumps({"source": source, "context": known | dict(variables)}, default=str).encode()
        try:
            answer = _PROCESSES[len(request) >= _LONG].ask(request)
        except LimitsExceeded:
            raise ValueError(f"exceed the limits of a chat: {MAX_TEXT} characters, {SECONDS:g} s to render") from None
        if "error" in answer:
            raise ValueError(f"do not suit this checkpoint's chat template: {answer['error']}")
        return answer["text"]


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token
