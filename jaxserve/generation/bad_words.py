"""Tokens of strings that must not be generated.

A string is tokenised both as the start of a text and after a space, as vLLM does (vLLM keeps the second form only where
it has as many tokens as the first). Only these token runs are barred: a model can still spell the string with others.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import InvalidRequest
from jaxserve.text.tokenizer import Tokenizer


def token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token runs of these strings, without repeats.

    Raises:
      InvalidRequest: if a string has no tokens, or there is no tokenizer.
    """
    if tokenizer is None:
        raise InvalidRequest("bad_words", "need a tokenizer, and this checkpoint has none; bar tokens by logit_bias")
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                run = tuple(tokenizer.encode(text, special_tokens=False))
            except ValueError as problem:
                raise InvalidRequest("bad_words", f"{word[:60]!r} {problem}") from problem
            if not run or not word.strip():
                raise InvalidRequest("bad_words", f"holds {word[:60]!r}, for which the tokenizer has no token")
            runs[run] = None
    return tuple(runs)
