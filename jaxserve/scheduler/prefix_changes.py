"""Changes of all replicas' prefix caches, collected for one reader. Imports no jax."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.cache_groups import GroupedPool
from jaxserve.scheduler.row_parts import PartitionedPool, Pool
from jaxserve.scheduler.slot_pool import SlotPool

MOST_BYTES = 16 * 2**20  # of changes that wait for the reader


class BlocksStored(NamedTuple):
    """Blocks of one prompt, one after another, that can be found from now on.

    Attributes:
      digests: of the blocks (see `prefix_digests`).
      parent: digest of the block before the first; None if that is a prompt's first block.
      tokens: of all the blocks.
      salt: prefixes are shared only between requests with the same salt.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    block_size: int
    salt: str


class BlocksRemoved(NamedTuple):
    """Blocks that were evicted."""

    digests: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """No block can be found any more, or the reader must take it so."""


PrefixChange = BlocksStored | BlocksRemoved | CacheCleared


class PrefixChanges:
    """Collects changes as if all replicas had one cache (a `BlockListener` of their pools).

    A block is stored when the first replica has it, and removed when the last one has lost it. The reader never delays
    an iteration: if it falls behind by `MOST_BYTES`, the changes are dropped and it reads `CacheCleared` instead, so
    it never believes in a block that is gone.

    Of layers with different windows, those without a window count.
    """

    def __init__(self, pools: Iterable[Pool], wake: Callable[[], None]) -> None:
        """
        Args:
          pools: new ones, of the same block size.
          wake: called on an engine's thread when there is something to take.
        """
        self._wake = wake
        self._lock = threading.Lock()
        self._holders: dict[bytes, int] = {}  # digest -> number of replicas that have it
        self._changes: list[PrefixChange] = []
        self._bytes = 0
        for pool in (part for each in pools for part in _parts(each)):
            listened = _with_longest_memory(pool)
            self._block_size = listened.block_size
            listened.listeners.append(self)

    def take(self) -> list[PrefixChange]:
        """All changes since the last call, in order."""
        with self._lock:
            taken, self._changes, self._bytes = self._changes, [], 0
        return taken

    def stored(self, allocation: BlockAllocation, blocks: Sequence[int]) -> None:
        with self._lock:
            new = [index for index in blocks if self._add(allocation.digest(index))]
            changes = [self._run(allocation, first, last) for first, last in _runs(new)]
            self._append(changes)
        self._tell(changes)

    def removed(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            gone = tuple(digest for digest in digests if self._drop(digest))
            changes = [BlocksRemoved(gone)] if gone else []
            self._append(changes)
        self._tell(changes)

    def cleared(self, digests: Sequence[bytes]) -> None:
        if not digests:
            return
        with self._lock:
            gone = tuple(digest for digest in digests if self._drop(digest))
            changes = [BlocksRemoved(gone) if self._holders else CacheCleared()]
            self._append(changes)
        self._tell(changes)

    def _add(self, digest: bytes) -> bool:
        """Count a replica that has the block; whether it is the first."""
        self._holders[digest] = holders = self._holders.get(digest, 0) + 1
        return holders == 1

    def _drop(self, digest: bytes) -> bool:
        """Count a replica that has lost the block; whether it was the last."""
        left = self._holders.pop(digest) - 1
        if left:
            self._holders[digest] = left
        return not left

    def _run(self, allocation: BlockAllocation, first: int, last: int) -> BlocksStored:
        size = self._block_size
        return BlocksStored(
            digests=tuple(allocation.digest(index) for index in range(first, last + 1)),
            parent=allocation.digest(first - 1) if first else None,
            tokens=array("I", allocation.tokens[first * size : (last + 1) * size]),
            block_size=size,
            salt=allocation.salt,
        )

    def _append(self, changes: Sequence[PrefixChange]) -> None:
        self._changes += changes
        self._bytes += sum(map(size_of, changes))
        if self._bytes > MOST_BYTES:
            self._changes[:] = [CacheCleared()]
            self._bytes = 0

    def _tell(self, changes: Sequence[PrefixChange]) -> None:
        if changes:
            self._wake()


def size_of(change: PrefixChange) -> int:
    """Bytes that a change takes, about."""
    digests = 0 if isinstance(change, CacheCleared) else len(change.digests)
    return 64 + 64 * digests + (4 * len(change.tokens) if isinstance(change, BlocksStored) else 0)


def _parts(pool: Pool) -> Sequence[SlotPool | GroupedPool]:
    return pool.parts if isinstance(pool, PartitionedPool) else (pool,)


def _with_longest_memory(pool: SlotPool | GroupedPool) -> SlotPool:
    """The pool of the layers without a window, if there are any, or with the largest one."""
    return pool.pools[0] if isinstance(pool, GroupedPool) else pool


def _runs(indices: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(first, last) of each run of adjacent numbers."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield indices[start], indices[at - 1]
            start = at
