"""Logprobs in the forms of OpenAI's API: lists for completions, objects for chats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.generation.completion import Delta, PromptLogprob
from jaxserve.request import Alternatives
from jaxserve.text.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's value for -inf, which JSON does not have

Scored = tuple[int, float | None, Alternatives | None]  # token, its logprob, alternatives if asked for


def generated(delta: Delta) -> list[Scored]:
    """Tokens, logprobs and alternatives of generated tokens."""
    tops = delta.top_logprobs or (None,) * len(delta.token_ids)
    return list(zip(delta.token_ids, delta.logprobs, tops, strict=True))


def prompt(token_ids: Sequence[int], logprobs: Sequence[PromptLogprob]) -> list[Scored]:
    """Tokens, logprobs and alternatives of prompt tokens, without the first."""
    return [(token, *scored) for token, scored in zip(token_ids, logprobs, strict=True)]


class Legacy:
    """The form of completions. It counts the offset of each token's text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def add(self, scored: Iterable[Scored]) -> dict[str, Any]:
        """The lists for more tokens; top_logprobs always includes the token itself."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, alternatives in scored:
            text = token_text(self._tokenizer, token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(finite(logprob))
            lists["top_logprobs"].append(None if logprob is None else self._tops(text, logprob, alternatives))
            lists["text_offset"].append(self._offset)
            self._offset += len(text)
        return lists

    def _tops(self, text: str, logprob: float, alternatives: Alternatives | None) -> dict[str, float | None]:
        tops: dict[str, float | None] = {}
        for token, value in zip(*(alternatives or ((), ())), strict=True):
            # Of two tokens with the same text, the likelier counts. It comes first.
            tops.setdefault(token_text(self._tokenizer, token), finite(value))
        return tops if text in tops else tops | {text: finite(logprob)}


def chat(tokenizer: Tokenizer | None, scored: Iterable[Scored]) -> dict[str, Any]:
    content = []
    for token, logprob, alternatives in scored:
        tops = zip(*(alternatives or ((), ())), strict=True)
        others = [_of_chat(tokenizer, other, value) for other, value in tops]
        content.append(_of_chat(tokenizer, token, logprob) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def by_id(tokenizer: Tokenizer | None, scored: Iterable[Scored]) -> list[dict[str, Any] | None]:
    """The prompt_logprobs: for each token a map from token id to logprob and text."""
    lines: list[dict[str, Any] | None] = []
    for token, logprob, alternatives in scored:
        if logprob is None:
            lines.append(None)
            continue
        pairs = {token: logprob} | dict(zip(*(alternatives or ((), ())), strict=True))
        lines.append(
            {str(i): {"logprob": finite(p), "decoded_token": token_text(tokenizer, i)} for i, p in pairs.items()}
        )
    return lines


def _of_chat(tokenizer: Tokenizer | None, token: int, logprob: float | None) -> dict[str, Any]:
    raw = b"" if tokenizer is None else tokenizer.token_bytes(token)
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": list(raw)}


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a token; a part of a character is written as OpenAI does, `bytes:\\xe4`."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float | None) -> float | None:
    """A logprob that JSON can hold."""
    return logprob if logprob is None or math.isfinite(logprob) else _LEAST
