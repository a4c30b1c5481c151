"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import tokenizers

_REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
_HELD = 3  # replacement characters at the end that may yet turn into one character of four bytes
_CONTEXT = 16  # tokens kept as context: far more than one character is cut into
_WINDOW = 64  # tokens decoded at most before the window is cut back to its context


class Tokenizer:
    """A thin wrapper of a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()  # a prompt is served whole or refused
        tokenizer.no_padding()
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_directory(cls, path: str | Path) -> Self | None:
        """The tokenizer of a checkpoint directory, or None if it has no tokenizer.json.

        Raises:
          ValueError: the file is there and cannot be read.
        """
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")))
        except Exception as problem:  # the library raises bare Exception
            raise ValueError(f"{file}: not a tokenizer of the tokenizers library: {problem}") from problem

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Nothing is prepended or appended but what the file's own post-processor adds.

        Raises:
          ValueError: the text holds half a surrogate pair, or the tokenizer has no token for a part of it.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=True).ids
        except Exception as problem:  # the library raises bare Exception
            raise ValueError(f"cannot be tokenised: {problem}") from problem

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; ids that stand for no token are passed over."""
        return self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A stream of text that goes on after these tokens."""
        return TextStream(self, prompt)

    def is_text(self, token: int) -> bool:
        """Whether a token can have text: it is neither special nor outside the tokenizer's vocabulary."""
        return token not in self._special and 0 <= token < self.vocab_size


class TextStream:
    """Text of tokens that come a few at a time, cut between characters only.

    The text pushed out so far and to come is that of all tokens decoded after the prompt's last ones, so a token that
    starts a word brings its space, though it would lose it at the start of a text. What may be the beginning of a
    character waits for the rest of it. `tokenizers.DecodeStream` does the same, but a long run of bytes that are no
    character costs it time quadratic in the run, and it holds the run back to its end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        for token in reversed(prompt):
            if tokenizer.is_text(token):
                self._window.append(token)
                if len(self._window) == _CONTEXT:
                    break
        self._window.reverse()
        self._before = tokenizer.decode(self._window)
        self._sent = len(self._before)  # characters of the window's text that are out, or the prompt's
        self._started = False

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        count = len(self._window)
        self._window += [token for token in tokens if self._tokenizer.is_text(token)]
        return self._take(flush=False) if len(self._window) > count else ""

    def flush(self) -> str:
        """The rest, at the end: a character that was never completed is a replacement character."""
        return self._take(flush=True)

    def _take(self, *, flush: bool) -> str:
        text = self._tokenizer.decode(self._window)
        if not self._started and not text.startswith(self._before):
            # The prompt ended within a character, which is given whole where it is completed.
            self._sent = next(
                (i for i, (a, b) in enumerate(zip(text, self._before, strict=False)) if a != b), len(text)
            )
        end = len(text)
        if not flush:
            held = len(text) - len(text.rstrip(_REPLACEMENT))
            end -= min(held, _HELD)
        piece = text[self._sent : end]
        if piece:
            self._started = True
            self._sent = end
        if len(self._window) > _WINDOW:
            self._trim(text)
        return piece

    def _trim(self, text: str) -> None:
        waiting = len(text) - self._sent
        shorter = self._window[-_CONTEXT:]
        again = self._tokenizer.decode(shorter)
        if self._started and waiting <= len(again) and again.endswith(text[self._sent :]):
            self._window, self._sent = shorter, len(again) - waiting
