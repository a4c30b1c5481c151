"""Which replicas have a block of a prompt in their prefix cache. Imports no jax."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import repeat

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.row_parts import Pool
from jaxserve.scheduler.slot_pool import SlotPool

_PART = 32  # blocks that are hashed at first, then twice as many each time, because few prompts are cached far


class PrefixIndex:
    """All replicas' prefix caches in one dictionary, from a block's digest to its replicas.

    A look-up takes time with the prompt's cached blocks, however many replicas there are. The pools tell of each block
    that they publish, evict or forget, on any thread. A pool whose layers have windows, or which has parts, is asked
    itself, since a prefix there is more than its blocks one after another.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        """
        Args:
          pools: new ones, of the same block size.
        """
        self._pools = tuple(pools)
        self._holders: dict[bytes, int] = {}  # digest -> a bit for each replica
        self._lock = threading.Lock()
        plain = [pool for pool in pools if type(pool) is SlotPool]
        self._is_plain = len(plain) == len(pools)
        if self._is_plain:
            for index, pool in enumerate(plain):
                pool.listeners.append(_Holder(self, 1 << index))

    def cached_tokens(self, allocation: BlockAllocation) -> list[int]:
        """Tokens of `allocation` in each replica's cache, as `SlotPool.cached_tokens` of each."""
        if not self._is_plain:
            return [pool.cached_tokens(allocation) for pool in self._pools]
        pool = self._pools[0]
        assert isinstance(pool, SlotPool)
        found = [0] * len(self._pools)
        if not allocation.takes_hits or not self._holders:
            return found
        full = (len(allocation.tokens) - 1) // pool.block_size
        holder_of, have, before = self._holders.get, (1 << len(self._pools)) - 1, -1
        end = 0
        while end < full:
            start, end = end, min(2 * end or _PART, full)
            digests = allocation.digests(end, pool.block_size)[start:end]
            for index, holders in enumerate(map(holder_of, digests, repeat(0)), start):
                if holders == before:  # the same replicas have most blocks of a prefix
                    continue
                before = holders
                if left := have & ~holders:
                    self._note(found, left, pool.whole_runs(index) * pool.block_size)
                    have ^= left
                    if not have:
                        return found
        self._note(found, have, pool.whole_runs(full) * pool.block_size)
        return found

    def _note(self, found: list[int], replicas: int, tokens: int) -> None:
        """Set the tokens of the replicas with a bit."""
        while replicas:
            bit = replicas & -replicas
            found[bit.bit_length() - 1] = tokens
            replicas ^= bit

    def add(self, replica: int, digests: Iterable[bytes]) -> None:
        """Note that a replica, given by its bit, has these blocks."""
        with self._lock:
            for digest in digests:
                self._holders[digest] = self._holders.get(digest, 0) | replica

    def remove(self, replica: int, digests: Iterable[bytes]) -> None:
        """Note that a replica no longer has these blocks."""
        with self._lock:
            for digest in digests:
                if left := self._holders[digest] & ~replica:
                    self._holders[digest] = left
                else:
                    del self._holders[digest]


class _Holder:
    """Keeps one replica's blocks in the index (a `BlockListener`)."""

    def __init__(self, index: PrefixIndex, replica: int) -> None:
        self._index, self._replica = index, replica

    def stored(self, allocation: BlockAllocation, blocks: Sequence[int]) -> None:
        self._index.add(self._replica, [allocation.digest(block) for block in blocks])

    def removed(self, digests: Sequence[bytes]) -> None:
        self._index.remove(self._replica, digests)

    def cleared(self, digests: Sequence[bytes]) -> None:
        self._index.remove(self._replica, digests)
