"""Tokenises `bad_words`, strings that must not be generated.

A string is tokenised both as the start of a text and after a space, as vLLM does (vLLM keeps the second form only where
it has as many tokens as the first). Only these token sequences are banned: a model can still spell the string with
other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS
from jaxserve.text.tokenizer import Tokenizer


def token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token sequences of these strings, without duplicates.

    Raises:
      InvalidRequest: a string has no tokens, all have too many, or there is no tokenizer.
    """
    if tokenizer is None:
        raise InvalidRequest("bad_words", "need a tokenizer, and this checkpoint has none; ban tokens by logit_bias")
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                sequence = tuple(tokenizer.encode(text, special_tokens=False))
            except ValueError as problem:
                raise InvalidRequest("bad_words", f"{word[:60]!r} {problem}") from problem
            if not sequence or not word.strip():
                raise InvalidRequest("bad_words", f"holds {word[:60]!r}, for which the tokenizer has no token")
            sequences[sequence] = None
            if (count := sum(map(len, sequences))) > MAX_BAD_WORD_TOKENS:  # others would take long to tokenise
                raise InvalidRequest(
                    "bad_words", f"have {count} tokens or more; at most {MAX_BAD_WORD_TOKENS} are allowed"
                )
    return tuple(sequences)
