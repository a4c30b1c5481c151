"""Renders chats with a checkpoint's template, in a sandbox with limits on time and size."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.text import tool_forms

_MAX_TEXT = 2**20  # characters of a rendered chat
_MAX_SECONDS = 1.0
_MAX_ERROR = 200  # characters of a template's error, which may quote the messages
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """A chat template in the format of the transformers library.

    Args:
      source: the template in Jinja.
      special_tokens: texts of the special tokens by names such as `bos_token`.

    Attributes:
      variables: names that the template reads and does not define.
      with_tools: the template for chats with tools, which is this one or another.
      tool_form: name of the format in which the model calls tools (`tool_forms.FORMS`); None if it is not known.

    Raises:
      ValueError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = special_tokens
        self.with_tools = self
        self.tool_form = tool_forms.form_of(source)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as problem:
            raise ValueError(f"the chat template is not valid Jinja: {problem}") from problem

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
        until, pieces, size = time.monotonic() + _MAX_SECONDS, [], 0
        try:
            for piece in (self.with_tools if tools else self)._template.generate(known | dict(variables)):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_TEXT or time.monotonic() > until:
                    break
            else:
                return "".join(pieces)
        except Exception as problem:  # a template may raise anything on messages that it does not expect
            raise ValueError(f"do not suit this checkpoint's chat template: {str(problem)[:_MAX_ERROR]}") from problem
        raise ValueError(f"exceed the limits of a chat: {_MAX_TEXT} characters, {_MAX_SECONDS:g} s to render")


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
