"""The one strict reading of a request's fields, shared by every way in: JSON lines, calls from Python, the network."""

from __future__ import annotations

import dataclasses
import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.generation import bad_words
from jaxserve.grammars import grammar
from jaxserve.request import SAMPLING_FIELDS, InvalidRequest, Request, SamplingParams
from jaxserve.tokenizer import Tokenizer

MAX_STOP_LENGTH = 1024  # characters of a stop string

_PROMPTS = ("prompt", "prompt_token_ids")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def parse_request(
    fields: Mapping[str, Any],
    *,
    request_id: str,
    tokenizer: Tokenizer | None,
    special_tokens: bool = True,
    priority: int = 0,
    arrival: float = 0.0,
    cache_salt: str = "",
) -> Request:
    """Reads a mapping as a JSON object has it: `prompt` or `prompt_token_ids`, and any sampling field.

    A field whose value is None counts as not given. Whole numbers are taken where a float is wanted, and nothing else
    is converted. logit_bias is a mapping from token id (a number, or its decimal text) to bias; stop is a string or a
    list of them, and so is bad_words; grammar is as `grammar.read` takes it. Without a seed one is drawn. Token ids are
    held against the vocabulary by the engine, not here. A prompt that has the model's special tokens written out is
    given without `special_tokens`.

    Raises:
      InvalidRequest: naming the field, and for an unknown one the field that was probably meant.
    """
    # Before the prompt, which may be long.
    sampling = parse_sampling({name: value for name, value in fields.items() if name not in _PROMPTS})
    if sampling.bad_words:
        runs = bad_words.token_ids(sampling.bad_words, tokenizer)
        sampling = dataclasses.replace(sampling, bad_word_tokens=runs)
    return Request(
        request_id=request_id,
        prompt=_prompt(fields, tokenizer, special_tokens),
        sampling=sampling,
        priority=priority,
        arrival=arrival,
        cache_salt=cache_salt,
    )


def parse_sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """Reads the sampling fields of a mapping, as `parse_request` does.

    Raises:
      InvalidRequest: naming the field.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in SAMPLING_FIELDS:
            raise InvalidRequest(str(name), _unknown(name))
        if value is not None:
            values[name] = _READERS.get(name, _same)(name, value)
    values.setdefault("seed", secrets.randbits(63))
    return SamplingParams(**values)


def _unknown(name: object) -> str:
    near = difflib.get_close_matches(str(name), (*_PROMPTS, *SAMPLING_FIELDS), n=1)
    return f"is not a field of a request; did you mean {near[0]}?" if near else "is not a field of a request"


def _prompt(fields: Mapping[str, Any], tokenizer: Tokenizer | None, special_tokens: bool) -> tuple[int, ...]:
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest(
            "prompt", "and prompt_token_ids are both given; give one" if ids is not None else "is missing"
        )
    if ids is not None:
        ids = _integers("prompt_token_ids", ids)
        if not ids:
            raise InvalidRequest("prompt_token_ids", "is empty; a prompt needs at least one token")
        return ids
    if not isinstance(text, str):
        raise InvalidRequest("prompt", f"is {_shown(text)}; it must be a string (token ids go into prompt_token_ids)")
    if tokenizer is None:
        raise InvalidRequest("prompt", "needs a tokenizer, and this checkpoint has none; give prompt_token_ids")
    if not text:
        raise InvalidRequest("prompt", "is empty; it needs at least one character")
    try:
        tokens = tuple(tokenizer.encode(text, special_tokens=special_tokens))
    except ValueError as problem:
        raise InvalidRequest("prompt", str(problem)) from problem
    if not tokens:
        raise InvalidRequest("prompt", f"is {_shown(text)}, of which the tokenizer makes no token")
    return tokens


def _same(_: str, value: Any) -> Any:
    return value


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"is {_shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(name, "is too large a number") from None


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"is {_shown(value)}; it must be true or false")
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(name, f"is {_shown(value)}; it must be a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(name, f"holds {_shown(token)}, which is not a token id")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(name, f"is {_shown(value)}; it must be a string or a list of strings")
    for text in value:
        if isinstance(text, str) and len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest(name, f"has {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed")
    return tuple(value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"is {_shown(value)}; it must map token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
            raise InvalidRequest(name, f"holds {_shown(key)}, which is not a token id")
        if key in biases:
            raise InvalidRequest(name, f"holds token id {key} twice")
        biases[key] = _float(name, bias)
    return tuple(biases.items())


def _shown(value: object) -> str:
    """A value as a message shows it: not at any length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_READERS = {
    **dict.fromkeys(_FLOATS, _float),
    "ignore_eos": _bool,
    "stop": _strings,
    "bad_words": _strings,
    "stop_token_ids": _integers,
    "logit_bias": _biases,
    "grammar": grammar.read,
}
