"""The base of HTTP bodies: what becomes of fields that a call does not read.

Clients of these protocols send many fields that change nothing here. A field that no protocol of this server knows is
ignored: the answer names it in a header, and the log once. A known field that would change the answer, if it were
read, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import SAMPLING_PARAMS

_log = logging.getLogger(__name__)

_MOST_NAMES = 16  # in a header
_MOST_LOGGED = 100  # names; a client may make up any number
_LONGEST_NAME = 64

# Fields with these values, or null, change nothing. They are refused with others.
_NEUTRAL: dict[str, tuple[Any, ...]] = {name: (param.default,) for name, param in SAMPLING_PARAMS.items()} | {
    "audio": (),
    "allowed_token_ids": (),
    "best_of": (1,),
    "cache_salt": ("",),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "structural_tag": (),
    "timeout": (),
    "tool_choice": ("none", "auto"),  # auto chooses among no tools
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
# These change nothing, whatever their value.
_NO_EFFECT = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    )
)


class Body(BaseModel):
    """A body that converts no types. A field that is null counts as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def ignored_fields(given: Mapping[str, Any], body: BaseModel, path: str = "") -> Iterator[str]:
    """Names of the fields in a body, and in the objects in it, that its call does not read.

    Raises:
      InvalidRequest: the server knows the field, and its value would change the answer.
    """
    if body.model_config.get("extra") == "allow":
        return
    read = {field.alias or name: name for name, field in type(body).model_fields.items()}
    for name, value in given.items():
        if name in read:
            if isinstance(inner := getattr(body, read[name]), BaseModel):
                yield from ignored_fields(value, inner, f"{path}{name}.")
        elif value is None or name in _NO_EFFECT:
            continue
        elif name not in _NEUTRAL:
            yield path + name
        elif value not in _NEUTRAL[name]:
            raise InvalidRequest(path + name, "is not served by this call; leave it out")


class IgnoredLog:
    """Logs each ignored field once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, names: Sequence[str]) -> None:
        for name in names:
            name = name[:_LONGEST_NAME]
            if name not in self._names and len(self._names) < _MOST_LOGGED:
                self._names.add(name)
                _log.warning("calls have the field %r, which is ignored", name)


def warning_header(names: Sequence[str]) -> str:
    """The value of a Warning header (RFC 7234, section 5.5) that names ignored fields."""
    shown = ["".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "?" for c in name) for name in names]
    listed = ", ".join(name[:_LONGEST_NAME] for name in shown[:_MOST_NAMES])
    return f'299 jaxserve "ignored fields: {listed}{", ..." if len(shown) > _MOST_NAMES else ""}"'
