"""The digests by which the blocks of a request's prefix are found. Imports no jax."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from struct import unpack
from typing import Any


class PrefixDigests:
    """A full block's digest: the SHA-256 of the request's salt and all tokens to its end.

    Equal digests mean equal prefixes. One hash runs over the tokens, so each digest is computed once and takes one step
    of it.
    """

    __slots__ = ("_hash", "_salt", "known")

    def __init__(self, salt: str) -> None:
        self.known: list[bytes] = []
        self._salt = salt
        self._hash: Any = None  # of the blocks in `known`; None if it has not begun

    def first(self, blocks: int, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """The digests of at least the first blocks of these tokens.

        Args:
          tokens: the same in each call, but for those that have been appended.
        """
        start = len(self.known)
        if start >= blocks:
            return self.known
        if self._hash is None:
            # A digest has a fixed length, so a salt cannot be taken for tokens.
            self._hash = hashlib.sha256(hashlib.sha256(self._salt.encode("utf-8", "surrogatepass")).digest())
            self._hash.update(array("I", tokens[: start * block_size]).tobytes())
        digest = self._hash.digest
        content = array("I", tokens[start * block_size : blocks * block_size]).tobytes()
        parts = unpack(f"{4 * block_size}s" * (blocks - start), content)
        self.known += [digest() for _ in map(self._hash.update, parts)]
        return self.known

    def take_over(self, other: PrefixDigests, blocks: int) -> None:
        """Add the digests that another request with the same first blocks knows of them."""
        if other._salt == self._salt and len(self.known) < blocks:
            self.known += other.known[len(self.known) : blocks]
            self._hash = None
