"""Which replicas have a block of a prompt in their prefix cache. Imports no jax."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.prefix_digests import PrefixDigests
from jaxserve.scheduler.row_parts import Pool
from jaxserve.scheduler.slot_pool import SlotPool

_PART = 32  # blocks that are hashed at first, then twice as many each time, because few prompts are cached far


class PrefixIndex:
    """All replicas' prefix caches in one dictionary, from a block's digest to its replicas.

    A look-up takes time with the prompt's cached blocks, however many replicas there are. The pools tell of each block
    that they publish, evict or forget, on any thread. A pool whose layers have windows, or which has parts, is asked
    itself, since a prefix there is more than its blocks one after another.

    What is cached was hashed before. So the digests of recent prompts are kept, and a prompt takes those of the blocks
    that it has in common with one of them, which are compared token by token. At most as many tokens are kept as the
    pools hold, with those that these requests generate: 4.5 bytes a token with blocks of 16, where the index itself
    takes 10.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        """
        Args:
          pools: new ones, of the same block size.
        """
        self._pools = tuple(pools)
        self._holders: dict[bytes, int] = {}  # digest -> a bit for each replica
        self._lock = threading.Lock()
        self._hashed: OrderedDict[bytes, tuple[PrefixDigests, int]] = OrderedDict()  # and its tokens; see `_keep`
        self._hashed_tokens, self._most_tokens = 0, sum(pool.n_slots for pool in pools)
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
            if start and (hashed := self._hashed.get(allocation.digest(start - 1))) is not None:
                allocation.prefix_digests.take_equal(hashed[0], full, pool.block_size)
            digests = allocation.digests(end, pool.block_size)[start:end]
            for index, holders in enumerate(map(holder_of, digests, repeat(0)), start):
                if holders == before:  # the same replicas have most blocks of a prefix
                    continue
                before = holders
                if left := have & ~holders:
                    self._note(found, left, pool.whole_runs(index) * pool.block_size)
                    have ^= left
            if not have:
                break
        self._note(found, have, pool.whole_runs(full) * pool.block_size)
        if full > _PART:
            self._keep(allocation.prefix_digests)
        return found

    def _keep(self, digests: PrefixDigests) -> None:
        """Keep the digests of a prompt for later ones.

        They are found by the last block of each part. The request adds to them when its blocks are published.
        """
        digests.on_growth = self._count_again
        with self._lock:
            for key in _keys(digests):
                self._hashed_tokens -= self._hashed.pop(key, (digests, 0))[1]
                self._count(key, digests, 0)
            self._forget_oldest()

    def _count_again(self, digests: PrefixDigests) -> None:
        """Count the tokens of digests that are kept, after their request has added to them."""
        with self._lock:
            for key in _keys(digests):
                kept, tokens = self._hashed.get(key, (None, 0))
                if kept is digests:
                    self._count(key, digests, tokens)
            self._forget_oldest()

    def _count(self, key: bytes, digests: PrefixDigests, before: int) -> None:
        self._hashed[key] = digests, digests.held_tokens
        self._hashed_tokens += digests.held_tokens - before

    def _forget_oldest(self) -> None:
        while self._hashed_tokens > self._most_tokens:
            self._hashed_tokens -= self._hashed.popitem(last=False)[1][1]

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


def _keys(digests: PrefixDigests) -> Iterator[bytes]:
    """The last block of each part, by which digests are found."""
    end = _PART
    while end <= len(digests.known):
        yield digests.known[end - 1]
        end *= 2


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
