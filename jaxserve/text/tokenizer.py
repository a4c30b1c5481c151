"""Text to token ids and back, by the checkpoint's own tokenizer; chats to text, by its chat template."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import tokenizers

from jaxserve.text import files
from jaxserve.text.chat_template import ChatTemplate

_REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
_HELD = 3  # bytes of a character that miss the last one: as many tokens, or replacement characters, at most
_CONTEXT = 8  # tokens kept as context: a character is cut into four at most
_WINDOW = 24  # tokens decoded at once before the window is cut back to its context
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2's alphabet shows as themselves
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)}


class Tokenizer:
    """A thin wrapper of a `tokenizers.Tokenizer`.

    Attributes:
      chat_template: what makes a text of a chat; None where the checkpoint has none.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        tokenizer.no_truncation()  # a prompt is served whole or refused
        tokenizer.no_padding()
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.token_bytes = functools.lru_cache(maxsize=2**16)(self._token_bytes)
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_directory(cls, path: str | Path) -> Self | None:
        """The tokenizer of a checkpoint directory (see `files`) with its chat template, or None if it has none.

        Raises:
          ValueError: a file is there and cannot be read.
        """
        tokenizer = files.read(Path(path))
        return None if tokenizer is None else cls(tokenizer, ChatTemplate.from_directory(Path(path)))

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Nothing is prepended or appended but what the checkpoint's files say, and that only with `special_tokens`.

        Raises:
          ValueError: the text holds half a surrogate pair, or the tokenizer has no token for a part of it.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        except Exception as problem:  # the library raises bare Exception
            raise ValueError(f"cannot be tokenised: {problem}") from problem

    def to_json(self) -> str:
        """The tokenizer as its file holds it."""
        return self._tokenizer.to_str()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; ids that stand for no token are passed over."""
        return self.text([token for token in ids if self.is_text(token)])

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A stream of text that goes on after these tokens."""
        return TextStream(self, prompt)

    def is_text(self, token: int) -> bool:
        """Whether a token can have text: it is neither special nor outside the tokenizer's vocabulary."""
        return token not in self._special and 0 <= token < self.vocab_size

    def _token_bytes(self, token: int) -> bytes:
        """UTF-8 of one token by itself, which may be a part of a character; of a special token, its name."""
        text = self._tokenizer.decode([token], False)
        name = self._tokenizer.id_to_token(token)
        if _REPLACEMENT not in text or name is None:
            return text.encode()
        if name.startswith("<0x") and len(name) == 6:  # how tokenizers that fall back on bytes name them
            return bytes([int(name[3:5], 16)])
        return bytes(_BYTES[letter] for letter in name) if set(name) <= _BYTES.keys() else text.encode()

    def text(self, ids: list[int]) -> str:
        """The text of tokens all of which can have text."""
        return self._tokenizer.decode(ids, False)


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
        self._before = tokenizer.text(self._window)
        self._sent = len(self._before)  # characters of the window's text that are out, or the prompt's
        self._started = False
        self._broken = 0  # tokens since the text last ended in a whole character

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        out = ""
        for token in tokens:
            if self._tokenizer.is_text(token):
                self._window.append(token)
                out += self._take()
        return out

    def flush(self) -> str:
        """The rest, at the end: a character that was never completed is a replacement character."""
        return self._give(self._text(), None)

    def _take(self) -> str:
        text = self._text()
        end = len(text)
        self._broken = self._broken + 1 if text.endswith(_REPLACEMENT) else 0
        if self._broken:
            run = end - len(text.rstrip(_REPLACEMENT))
            # A tokenizer that falls back on bytes has a whole run of them replaced while its last character lacks one.
            whole_run = run > _HELD and self._broken <= _HELD
            end -= run if whole_run else min(run, _HELD)
        piece = self._give(text, end)
        if len(self._window) > _WINDOW and self._started and (not self._broken or self._broken > _HELD):
            self._trim(text)
        return piece

    def _text(self) -> str:
        text = self._tokenizer.text(self._window)
        if not self._started and not text.startswith(self._before):
            # The prompt ended within a character, which is given whole where it is completed.
            pairs = enumerate(zip(text, self._before, strict=False))
            self._sent = next((i for i, (a, b) in pairs if a != b), len(text))
        return text

    def _give(self, text: str, end: int | None) -> str:
        piece = text[self._sent : end]
        self._sent += len(piece)
        self._started |= bool(piece)
        return piece

    def _trim(self, text: str) -> None:
        """Drops tokens from the window's start where that leaves the text of the others as it is."""
        waiting = len(text) - self._sent
        for context in range(_CONTEXT, _CONTEXT - 4, -1):  # within a character it does not, and one token on it may
            window = self._window[-context:]
            shorter = self._tokenizer.text(window)
            if text.endswith(shorter) and waiting <= len(shorter):
                self._window, self._sent = window, len(shorter) - waiting
                return
