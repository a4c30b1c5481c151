"""The digests by which the blocks of a request's prefix are found. Imports no jax."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from struct import unpack_from
from typing import Any


def _salted(salt: str) -> Any:
    return hashlib.sha256(hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest())


_UNSALTED = _salted("")


class PrefixDigests:
    """A full block's digest: the SHA-256 of the request's salt and all tokens to its end.

    Equal digests mean equal prefixes. One hash runs over the tokens, so each digest is computed once and takes one step
    of it.

    Attributes:
      known: the digests of the first blocks.
      on_growth: is called when tokens have been added.
    """

    __slots__ = ("_content", "_hash", "_salt", "known", "on_growth")

    def __init__(self, salt: str) -> None:
        self.known: list[bytes] = []
        self.on_growth: Callable[[PrefixDigests], None] | None = None
        self._salt = salt
        self._content = array("I")  # the tokens
        self._hash: Any = None  # of the blocks in `known`; None if it has not begun

    @property
    def held_tokens(self) -> int:
        """Tokens that it holds."""
        return len(self._content)

    def first(self, blocks: int, tokens: list[int], block_size: int) -> list[bytes]:
        """The digests of at least the first blocks of these tokens.

        Args:
          tokens: the same in each call, but for those that have been appended.
        """
        start, content = len(self.known), self._content
        if start >= blocks:
            return self.known
        if len(content) < blocks * block_size:
            # All there are, because one long list takes the least time for each token.
            content.fromlist(tokens[len(content) :] if content else tokens)
            if self.on_growth is not None:
                self.on_growth(self)
        if self._hash is None:
            # A digest has a fixed length, so a salt cannot be taken for tokens.
            self._hash = _salted(self._salt) if self._salt else _UNSALTED.copy()
            self._hash.update(content[: start * block_size])
        if blocks == start + 1:
            self._hash.update(content[start * block_size : blocks * block_size])
            self.known.append(self._hash.digest())
            return self.known
        digest, size = self._hash.digest, 4 * block_size
        parts = unpack_from(f"{size}s" * (blocks - start), content, start * size)
        self.known += [digest() for _ in map(self._hash.update, parts)]
        return self.known

    def take_equal(self, other: PrefixDigests, blocks: int, block_size: int) -> None:
        """Add what another request knows of the first blocks, as far as their tokens are the same.

        The last digest that is known here is known there.
        """
        mine, theirs, low = self._content, other._content, len(self.known)
        middle = high = min(blocks, len(other.known), len(theirs) // block_size)
        while low < high:  # the first `low` blocks are equal; most often all are
            part = slice(low * block_size, middle * block_size)
            low, high = (middle, high) if mine[part] == theirs[part] else (low, middle - 1)
            middle = (low + high + 1) // 2
        if low > len(self.known):
            self.known += other.known[len(self.known) : low]
            self._hash = None

    def take_over(self, other: PrefixDigests, blocks: int) -> None:
        """Add the digests that another request with the same first blocks knows of them."""
        if other._salt == self._salt and len(self.known) < blocks:
            self.known += other.known[len(self.known) : blocks]
            self._hash = None
