"""The one strict reading of a request's fields, shared by every way in: JSON lines, calls from Python, the network."""

from __future__ import annotations

import dataclasses
import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest, shown
from jaxserve.generation import bad_words, chat
from jaxserve.request import Request
from jaxserve.sampling_params import SAMPLING_FIELDS, SamplingParams
from jaxserve.structured_output import grammar
from jaxserve.text.tokenizer import Tokenizer

MAX_STOP_LENGTH = 1024  # characters of a stop string

_PROMPTS = ("prompt", "prompt_token_ids", "messages")  # of which a request has one
_OF_PROMPTS = (*_PROMPTS, "add_generation_prompt")
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def parse_request(
    fields: Mapping[str, Any],
    *,
    request_id: str,
    tokenizer: Tokenizer | None,
    priority: int = 0,
    arrival: float = 0.0,
    cache_salt: str = "",
) -> Request:
    """Reads a mapping as a JSON object has it: `prompt`, `prompt_token_ids` or `messages`, and any sampling field.

    A field whose value is None counts as not given. Whole numbers are taken where a float is wanted, and nothing else
    is converted. logit_bias is a mapping from token id (a number, or its decimal text) to bias; stop is a string or a
    list of them, and so is bad_words; grammar is as `grammar.read` takes it. Without a seed one is drawn. Token ids are
    held against the vocabulary by the engine, not here.

    Messages are a chat (see `chat.read`), of which the checkpoint's template makes the prompt; it ends with what begins
    an answer unless `add_generation_prompt` is false. A template is a program, and may take a second.

    Raises:
      InvalidRequest: naming the field, and for an unknown one the field that was probably meant.
    """
    # Before the prompt, which may be long.
    sampling = parse_sampling({name: value for name, value in fields.items() if name not in _OF_PROMPTS})
    if sampling.bad_words:
        runs = bad_words.token_ids(sampling.bad_words, tokenizer)
        sampling = dataclasses.replace(sampling, bad_word_tokens=runs)
    return Request(
        request_id=request_id,
        prompt=_prompt(fields, tokenizer),
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
    near = difflib.get_close_matches(str(name), (*_OF_PROMPTS, *SAMPLING_FIELDS), n=1)
    return f"is not a field of a request; did you mean {near[0]}?" if near else "is not a field of a request"


def _prompt(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    given = [name for name in _PROMPTS if fields.get(name) is not None]
    if not given:
        raise InvalidRequest("prompt", "is missing")
    if len(given) > 1:
        raise InvalidRequest(given[0], f"and {given[1]} are both given; give one")
    if fields.get("add_generation_prompt") is not None and given != ["messages"]:
        raise InvalidRequest("add_generation_prompt", "is for messages, and there are none")
    if given == ["messages"]:
        return _chat(fields, tokenizer)
    if given == ["prompt"]:
        return _text(fields["prompt"], tokenizer)
    ids = _integers("prompt_token_ids", fields["prompt_token_ids"])
    if not ids:
        raise InvalidRequest("prompt_token_ids", "is empty; a prompt needs at least one token")
    return ids


def _text(text: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if not isinstance(text, str):
        raise InvalidRequest("prompt", f"is {shown(text)}; it must be a string (token ids go into prompt_token_ids)")
    if tokenizer is None:
        raise InvalidRequest("prompt", "needs a tokenizer, and this checkpoint has none; give prompt_token_ids")
    if not text:
        raise InvalidRequest("prompt", "is empty; it needs at least one character")
    return _tokens("prompt", text, tokenizer, special_tokens=True)


def _chat(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    messages, begins = chat.read(fields["messages"]), fields.get("add_generation_prompt")
    begins = True if begins is None else _bool("add_generation_prompt", begins)
    if tokenizer is None:
        raise InvalidRequest("messages", "need a tokenizer, and this checkpoint has none; give prompt_token_ids")
    if tokenizer.chat_template is None:
        raise InvalidRequest("messages", "cannot be served, as this checkpoint has no chat template; give prompt")
    try:
        text = tokenizer.chat_template.render(messages, add_generation_prompt=begins)
    except ValueError as problem:
        raise InvalidRequest("messages", str(problem)) from problem
    if not text:
        raise InvalidRequest("messages", "come to no text")
    return _tokens("messages", text, tokenizer, special_tokens=False)  # the template has written them out


def _tokens(field: str, text: str, tokenizer: Tokenizer, *, special_tokens: bool) -> tuple[int, ...]:
    try:
        tokens = tuple(tokenizer.encode(text, special_tokens=special_tokens))
    except ValueError as problem:
        raise InvalidRequest(field, str(problem)) from problem
    if not tokens:
        raise InvalidRequest(field, f"comes to {shown(text)}, of which the tokenizer makes no token")
    return tokens


def _same(_: str, value: Any) -> Any:
    return value


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(name, f"is {shown(value)}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(name, "is too large a number") from None


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"is {shown(value)}; it must be true or false")
    return value


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(name, f"is {shown(value)}; it must be a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(name, f"holds {shown(token)}, which is not a token id")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(name, f"is {shown(value)}; it must be a string or a list of strings")
    for text in value:
        if isinstance(text, str) and len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest(name, f"has {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed")
    return tuple(value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"is {shown(value)}; it must map token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
            key = int(key)
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
            raise InvalidRequest(name, f"holds {shown(key)}, which is not a token id")
        if key in biases:
            raise InvalidRequest(name, f"holds token id {key} twice")
        biases[key] = _float(name, bias)
    return tuple(biases.items())


_READERS = {
    **dict.fromkeys(_FLOATS, _float),
    "ignore_eos": _bool,
    "stop": _strings,
    "bad_words": _strings,
    "stop_token_ids": _integers,
    "logit_bias": _biases,
    "grammar": grammar.read,
}
