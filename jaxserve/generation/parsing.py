"""Parses and validates a request's fields, for JSON lines, Python calls and every protocol."""

from __future__ import annotations

import dataclasses
import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.errors import InvalidRequest, shown
from jaxserve.generation import bad_words, chat, tools
from jaxserve.request import Request
from jaxserve.sampling_params import SAMPLING_PARAMS, Grammar, SamplingParams
from jaxserve.structured_output import grammar
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer

MAX_STOP_LENGTH = 1024  # characters of a stop string

PROMPTS = ("prompt", "prompt_token_ids", "messages")  # a request has one of them
_CHAT_FIELDS = ("add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "tools")
PROMPT_FIELDS = (*PROMPTS, *_CHAT_FIELDS, "add_special_tokens")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def parse_request(
    fields: Mapping[str, Any],
    *,
    request_id: str,
    tokenizer: Tokenizer | None,
    priority: int = 0,
    arrival: float = 0.0,
    tenant: str = "",
    share: float = 1.0,
    cache_salt: str = "",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    longest: int | None = None,
    longest_text: int | None = None,
) -> Request:
    """Parses a request: a prompt, prompt_token_ids or messages, and sampling parameters.

    A field whose value is None counts as absent. An integer is accepted for a float; nothing else is converted.
    `logit_bias` maps token ids (integers, or their decimal text) to biases; `stop` and `bad_words` are strings or lists
    of strings; for `grammar` see `grammar.read`. A request without a seed gets a random one. Token ids are not checked
    against the vocabulary here; the engine does that.

    `messages` are a chat (see `chat.read`). The checkpoint's chat template turns them into the prompt, which ends with
    the start of an answer unless `add_generation_prompt` is false. `chat_template_kwargs` are more variables of the
    template, and so is `reasoning_effort`, where the template reads it. `tools` are those that the template tells the
    model of (see `tools.read`). Rendering may take up to a second.
    `add_special_tokens` says whether the tokenizer adds its special tokens to the text; by default it does so to a
    prompt, and not to a chat, whose template has them.

    Args:
      defaults: sampling parameters that are used where the request has none (`defaults.read`).
      longest: most tokens of a request, prompt and answer; a default max_tokens is reduced to fit.
      longest_text: most bytes of a prompt's text; a longer one is refused before it is tokenized.

    Raises:
      InvalidRequest: naming the field; for an unknown field, the message suggests a similar one.
    """
    # The sampling parameters first, because tokenising a long prompt takes time.
    sampling = parse_sampling({name: value for name, value in fields.items() if name not in PROMPT_FIELDS}, defaults)
    if sampling.bad_words:
        runs = bad_words.token_ids(sampling.bad_words, tokenizer)
        sampling = dataclasses.replace(sampling, bad_word_tokens=runs)
    prompt = _prompt(fields, tokenizer, longest_text)
    if longest is not None and "max_tokens" in defaults and fields.get("max_tokens") is None:
        longest_answer = max(1, sampling.min_tokens, longest - len(prompt))
        sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, longest_answer))
    return Request(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        priority=priority,
        arrival=arrival,
        tenant=tenant,
        share=share,
        cache_salt=cache_salt,
    )


def parse_sampling(fields: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
    """Parses the sampling parameters of a mapping, as `parse_request` does.

    Raises:
      InvalidRequest: naming the field.
    """
    values = dict(defaults)
    for name, value in fields.items():
        if name not in SAMPLING_PARAMS:
            raise InvalidRequest(str(name), _unknown(name))
        if value is not None:
            _check_length(name, value)
            values[name] = _PARSERS[SAMPLING_PARAMS[name].kind](name, value)
    values.setdefault("seed", secrets.randbits(63))
    return SamplingParams(**values)


def _check_length(name: str, value: Any) -> None:
    """Refuses a list that is too long before each of its entries is looked at."""
    most = SAMPLING_PARAMS[name].max_items
    is_list = isinstance(value, Sequence | Mapping) and not isinstance(value, str | bytes)
    if most is not None and is_list and len(value) > most:
        raise InvalidRequest(name, f"has {len(value)} entries; at most {most} are allowed")


def _unknown(name: object) -> str:
    near = difflib.get_close_matches(str(name), (*PROMPT_FIELDS, *SAMPLING_PARAMS), n=1)
    return f"is not a field of a request; did you mean {near[0]}?" if near else "is not a field of a request"


def check_text(field: str, text: str, longest: int | None) -> None:
    """Raises InvalidRequest for a text of more than `longest` bytes, if that is a number."""
    if longest is not None and (size := len(text.encode(errors="replace"))) > longest:
        raise InvalidRequest(field, f"has {size} bytes, which are more tokens than fit: {longest} bytes are the most")


def _prompt(fields: Mapping[str, Any], tokenizer: Tokenizer | None, longest_text: int | None = None) -> tuple[int, ...]:
    if (wanted := fields.get("add_special_tokens")) is not None:
        wanted = _bool("add_special_tokens", wanted)
    if (found := prompt_text(fields, tokenizer, longest_text)) is not None:
        assert tokenizer is not None
        return _tokenise(*found, tokenizer, special_tokens=found[0] == "prompt" if wanted is None else wanted)
    ids = _integers("prompt_token_ids", fields["prompt_token_ids"])
    if not ids:
        raise InvalidRequest("prompt_token_ids", "is empty; a prompt needs at least one token")
    return ids


def prompt_text(
    fields: Mapping[str, Any], tokenizer: Tokenizer | None, longest: int | None = None
) -> tuple[str, str] | None:
    """The field and the text of a prompt that is to be tokenized; None for token ids.

    A chat is rendered.

    Args:
      longest: most bytes of the text.

    Raises:
      InvalidRequest: naming the field.
    """
    given = [name for name in PROMPTS if fields.get(name) is not None]
    if not given:
        raise InvalidRequest("prompt", "is missing")
    if len(given) > 1:
        raise InvalidRequest(given[0], f"and {given[1]} are both given; give one")
    for name in _CHAT_FIELDS:
        if fields.get(name) is not None and given != ["messages"]:
            raise InvalidRequest(name, "is only for messages, which are missing")
    if given == ["prompt_token_ids"]:
        return None
    text = _chat(fields, tokenizer) if given == ["messages"] else _text(fields["prompt"], tokenizer)
    check_text(given[0], text, longest)
    return given[0], text


def _text(text: Any, tokenizer: Tokenizer | None) -> str:
    if not isinstance(text, str):
        raise InvalidRequest("prompt", f"is {shown(text)}; it must be a string (token ids go into prompt_token_ids)")
    if tokenizer is None:
        raise InvalidRequest("prompt", "needs a tokenizer, and this checkpoint has none; give prompt_token_ids")
    if not text:
        raise InvalidRequest("prompt", "is empty; it needs at least one character")
    return text


def _chat(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> str:
    messages, given = chat.read(fields["messages"]), fields.get("add_generation_prompt")
    add_generation_prompt = True if given is None else _bool("add_generation_prompt", given)
    if tokenizer is None:
        raise InvalidRequest("messages", "need a tokenizer, and this checkpoint has none; give prompt_token_ids")
    if tokenizer.chat_template is None:
        raise InvalidRequest("messages", "need a chat template, and this checkpoint has none; give prompt")
    variables = _template_variables(fields, tokenizer.chat_template)
    known = tools.read(fields.get("tools") or ())
    try:
        text = tokenizer.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=known, variables=variables
        )
    except ValueError as problem:
        raise InvalidRequest("messages", str(problem)) from problem
    if not text:
        raise InvalidRequest("messages", "give an empty prompt under the chat template")
    return text


def _template_variables(fields: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    given, effort = fields.get("chat_template_kwargs"), fields.get("reasoning_effort")
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequest("chat_template_kwargs", f"is {shown(given)}; it must map names to values")
    variables = {str(name): value for name, value in (given or {}).items()}
    if effort is None:
        return variables
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort} | variables
    if effort != "none":
        raise InvalidRequest("reasoning_effort", "is not served: this checkpoint's chat template does not read it")
    return variables


def _tokenise(field: str, text: str, tokenizer: Tokenizer, *, special_tokens: bool) -> tuple[int, ...]:
    try:
        tokens = tuple(tokenizer.encode(text, special_tokens=special_tokens))
    except ValueError as problem:
        raise InvalidRequest(field, str(problem)) from problem
    if not tokens:
        raise InvalidRequest(field, f"is {shown(text)}, for which the tokenizer has no token")
    return tokens


def _unchanged(_: str, value: Any) -> Any:
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


# Parsers by the type of a parameter. SamplingParams checks integers itself.
_PARSERS = {
    int: _unchanged,
    float: _float,
    bool: _bool,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _integers,
    tuple[tuple[int, float], ...]: _biases,
    Grammar: grammar.read,
}
