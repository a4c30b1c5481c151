"""Converts text to token ids and back with the checkpoint's tokenizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import tokenizers

from jaxserve.text import tokenizer_files
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.token_sizes import BYTES, most_bytes, most_tokens

_REPLACEMENT = "\ufffd"  # bytes that are not valid UTF-8 decode to it
_HELD = 3  # most bytes of an incomplete character, and so most of its tokens or replacement characters
_CONTEXT = 8  # tokens kept as context; a character has four tokens at most
_WINDOW = 24  # tokens decoded at once before the window is cut to its context
_LONG = 2048  # characters or tokens; for more, the library's calls are used that let other Python threads run


class Tokenizer:
    """A tokenizer with a chat template, on top of `tokenizers.Tokenizer`.

    Attributes:
      chat_template: renders chats as text; None if the checkpoint has none.
      most_bytes: most bytes of a text that one token stands for, in UTF-8; None if there is no such bound.
      directory: of the checkpoint that it was read from; None for one that was made otherwise.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        directory: Path | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.directory = directory
        tokenizer.no_truncation()  # prompts are never truncated: too long ones are refused
        tokenizer.no_padding()
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.token_bytes = functools.lru_cache(maxsize=2**16)(self._token_bytes)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.most_bytes = most_bytes(tokenizer, vocab)
        self._most_tokens = most_tokens(tokenizer)

    @classmethod
    def from_directory(cls, path: str | Path) -> Self | None:
        """Reads the tokenizer and chat template of a checkpoint; None if it has no tokenizer.

        Raises:
          ValueError: a file exists and cannot be read.
        """
        directory = Path(path)
        tokenizer = tokenizer_files.read(directory)
        return None if tokenizer is None else cls(tokenizer, ChatTemplate.from_directory(directory), directory)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encodes a text as token ids.

        With `special_tokens`, the special tokens that the checkpoint's files specify are added before and after it.

        Raises:
          ValueError: the text has an unpaired surrogate, or the tokenizer has no token for a part of it.
        """
        try:
            if len(text) <= _LONG:
                return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        except Exception as problem:  # the library raises bare Exception
            raise ValueError(f"cannot be tokenised: {problem}") from problem

    def most_tokens(self, size: int) -> float:
        """Most tokens of a text of `size` bytes in UTF-8, special ones too; infinite if unknown."""
        return math.inf if self._most_tokens is None else self._most_tokens[0] * size + self._most_tokens[1]

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json."""
        return self._tokenizer.to_str()

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes token ids, without special tokens and ids outside the vocabulary."""
        return self.text([token for token in ids if self.is_text(token)])

    def stream(self, prompt: Sequence[int] = (), *, special_tokens: bool = False) -> TextStream:
        """A stream that decodes the tokens after this prompt, special ones by name if asked."""
        return TextStream(self, prompt, special_tokens=special_tokens)

    def is_text(self, token: int, *, special_tokens: bool = False) -> bool:
        """Whether a token may have text: it is in the vocabulary, and special only if those count."""
        return (special_tokens or token not in self._special) and 0 <= token < self.vocab_size

    def _token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token, which may be a part of a character; the name of a special token."""
        text = self._tokenizer.decode([token], False)
        name = self._tokenizer.id_to_token(token)
        if _REPLACEMENT not in text or name is None:
            return text.encode()
        if name.startswith("<0x") and len(name) == 6:  # a byte token of tokenizers with byte fallback
            return bytes([int(name[3:5], 16)])
        return bytes(BYTES[letter] for letter in name) if set(name) <= BYTES.keys() else text.encode()

    def text(self, ids: list[int]) -> str:
        """Decodes tokens that all can have text (`is_text`), special ones as their names."""
        if len(ids) <= _LONG:
            return self._tokenizer.decode(ids, False)
        return self._tokenizer.decode_batch([ids], False)[0]


class TextStream:
    """Decodes tokens incrementally, and returns whole characters only.

    Tokens are decoded together with the last tokens of the prompt, so the space before a first word is kept; a
    tokenizer drops it at the start of a text. An incomplete character is held back until its other bytes arrive.
    `tokenizers.DecodeStream` does the same, but holds back a long run of invalid bytes to its end, in quadratic time.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, special_tokens: bool = False) -> None:
        self._tokenizer, self._special_tokens = tokenizer, special_tokens
        self._window: list[int] = []
        for token in reversed(prompt):
            if tokenizer.is_text(token, special_tokens=special_tokens):
                self._window.append(token)
                if len(self._window) == _CONTEXT:
                    break
        self._window.reverse()
        self._before = tokenizer.text(self._window)
        self._sent = len(self._before)  # characters of the window's text that were returned or belong to the prompt
        self._started = False
        self._broken = 0  # tokens since the text last ended in a whole character

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        out = ""
        for token in tokens:
            if self._tokenizer.is_text(token, special_tokens=self._special_tokens):
                self._window.append(token)
                out += self._take()
        return out

    def flush(self) -> str:
        """The rest of the text at its end; an incomplete character becomes a replacement character."""
        return self._return_until(self._text(), None)

    def _take(self) -> str:
        text = self._text()
        end = len(text)
        self._broken = self._broken + 1 if text.endswith(_REPLACEMENT) else 0
        if self._broken:
            run = end - len(text.rstrip(_REPLACEMENT))
            # With byte fallback, a whole run of bytes decodes to replacements while its last character is incomplete.
            whole_run = run > _HELD and self._broken <= _HELD
            end -= run if whole_run else min(run, _HELD)
        piece = self._return_until(text, end)
        if len(self._window) > _WINDOW and self._started and (not self._broken or self._broken > _HELD):
            self._trim(text)
        return piece

    def _text(self) -> str:
        text = self._tokenizer.text(self._window)
        if not self._started and not text.startswith(self._before):
            # The prompt ended within a character, which is returned whole when it is complete.
            pairs = enumerate(zip(text, self._before, strict=False))
            self._sent = next((i for i, (a, b) in pairs if a != b), len(text))
        return text

    def _return_until(self, text: str, end: int | None) -> str:
        piece = text[self._sent : end]
        self._sent += len(piece)
        self._started |= bool(piece)
        return piece

    def _trim(self, text: str) -> None:
        """Drops tokens at the window's start if the text of the others stays the same."""
        waiting = len(text) - self._sent
        for context in range(_CONTEXT, _CONTEXT - 4, -1):  # a cut within a character changes the text
            window = self._window[-context:]
            shorter = self._tokenizer.text(window)
            if text.endswith(shorter) and waiting <= len(shorter):
                self._window, self._sent = window, len(shorter) - waiting
                return
