"""Strings that are never to be generated, as runs of tokens that are never to stand complete.

A string is tokenised both as it stands at the beginning of a text and as it stands behind a space (as vLLM does, which
takes the second only where it is as many tokens as the first). What keeps it out are the runs of tokens that the
tokenizer makes of it: a model that spells it with other tokens is not kept from doing so.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import InvalidRequest
from jaxserve.text.tokenizer import Tokenizer


def token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The runs of token ids of these strings, none of them twice.

    Raises:
      InvalidRequest: a string has no tokens, or there is no tokenizer.
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
                raise InvalidRequest("bad_words", f"holds {word[:60]!r}, of which the tokenizer makes no token")
            runs[run] = None
    return tuple(runs)
