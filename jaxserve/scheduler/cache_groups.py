"""Cache groups: layers of one sliding window, with their own slot pool and block tables.

A block of the first group holds keys and values of a run of positions in the layers with the widest window (or none); a
block of another group holds those of the layers with its window. Blocks of every group are numbered from 0, and a row's
block table has an entry of each group for each run of positions, one group after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from jaxserve.scheduler.block_allocation import BlockAllocation, SharedPrefix, preempt_for
from jaxserve.scheduler.host_cache import ON_HOST, Fetch, HostCache
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.window_pool import WindowPool, window_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroups:
    """The cache groups of a model, and how large their pools are.

    Attributes:
      windows: the sliding window of each group, widest first; None for all tokens.
      max_context: most tokens of a request.
      n_rows: most requests that run at once.
      most_tokens: most tokens of an iteration.
      draft_tokens: most tokens drafted for one row; 0 without speculation.
      parts: parts of the pools that are split by rows (`row_parts`); blocks of a part have numbers in a row.
    """

    windows: tuple[int | None, ...] = (None,)
    block_size: int
    max_context: int
    n_rows: int
    most_tokens: int
    draft_tokens: int = 0
    parts: int = 1

    @classmethod
    def of(cls, windows: Iterable[int | None], *, max_context: int, **sizes: int) -> CacheGroups:
        """The groups of layers with these windows. A window that no request outgrows counts as none."""
        found = {None if window is None or window >= max_context else window for window in windows}
        widest_first = tuple(sorted(found, key=lambda window: inf if window is None else window, reverse=True))
        return cls(windows=widest_first, max_context=max_context, **sizes)

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.windows)

    def index(self, window: int | None) -> int:
        """The group of a layer with this window."""
        return self.windows.index(window) if window in self.windows else 0

    def blocks(self, n_blocks: int) -> tuple[int, ...]:
        """Blocks of each group, as many in each part, where the first has `n_blocks`.

        A group with a window gets what twice as many requests hold as can run, the others being reusable prefixes, but
        no more than requests of twice its window (or of max_context) need that fill the first pool. The tokens of one
        iteration come on top, because blocks are given back after it. A request that fits the first pool fits all.
        """
        return tuple(self.parts * each for each in self._of_part(n_blocks // self.parts))

    def _of_part(self, n_blocks: int) -> list[int]:
        """Blocks of each group in a part where the first has `n_blocks`."""
        found, spare = [n_blocks], self.most_tokens // self.block_size
        for window in self.windows[1:]:
            assert window is not None
            length = min(2 * window, self.max_context)
            each = self._held(window, self.max_context)
            share = -(-n_blocks * each // self._held(self.windows[0], length))
            found.append(min(max(min(share, 2 * self.n_rows * each), each) + spare, n_blocks))
        return found

    def entries(self, row: int, numbers: Iterable[int], n_blocks: int) -> tuple[int, ...]:
        """Block-table entries that measurements give a row.

        They are the blocks of these numbers, modulo the size of each group. A row has one part, and rows take turns
        with the parts.
        """
        sizes = [each // self.parts for each in self.blocks(n_blocks)]
        return tuple(row % self.parts * size + number % size for number in numbers for size in sizes)

    def _held(self, window: int | None, tokens: int) -> int:
        """Blocks of one group that a request holds, without those of the tokens of an iteration."""
        whole = -(-tokens // self.block_size)
        return whole if window is None else min(whole, window_blocks(window, self.block_size, self.draft_tokens))

    def fitting(self, n_blocks: int, tokens: int) -> int:
        """Requests of so many tokens that the pools hold at once."""
        spare, found = self.most_tokens // self.block_size, []
        for window, blocks in zip(self.windows, self._of_part(n_blocks // self.parts), strict=True):
            each = blocks * self.block_size // tokens  # if none gives a block back
            if window is not None:
                each = max(each, (blocks - spare) // self._held(window, tokens))
            found.append(each)
        return self.parts * min(found)


class GroupedPool:
    """The slot pools of several cache groups: a request has as many blocks in each.

    It has the interface of `SlotPool`. A request needs blocks in every group. A prefix is found as far as every
    group has it: all of its blocks without a window, those within the window before its end with one. When one group is
    short of blocks, requests that are preempted for it lose theirs in all.
    """

    def __init__(self, pools: Iterable[SlotPool]) -> None:
        self.pools = tuple(pools)
        first = self.pools[0]
        self.n_blocks, self.block_size, self.n_slots = first.n_blocks, first.block_size, first.n_slots
        self.request_slots = first.request_slots
        self.policy, self.prefix_cache = first.policy, first.prefix_cache
        self.gives_back = True

    @property
    def n_groups(self) -> int:
        """Number of cache groups."""
        return len(self.pools)

    @property
    def host(self) -> HostCache | None:
        """Where evicted blocks are kept, if they are."""
        return self.pools[0].host

    @property
    def slots_used(self) -> int:
        """Slots of the first group times the share of the fullest group that is held or set aside."""
        return self._fullest([pool.slots_used for pool in self.pools])

    @property
    def slots_held(self) -> int:
        """Slots of the first group times the share of the fullest group that is held."""
        return self._fullest([pool.slots_held for pool in self.pools])

    @property
    def slots_cached(self) -> int:
        """Slots of the first group in cached blocks that no request holds."""
        return self.pools[0].slots_cached

    def _fullest(self, slots: list[int]) -> int:
        return max(-(-each * self.n_slots // pool.n_slots) for each, pool in zip(slots, self.pools, strict=True))

    def cached_tokens(self, allocation: BlockAllocation) -> int:
        """Tokens of `allocation` in the prefix cache now, host included. For any thread."""
        return len(self._match(allocation, anywhere=True)[0]) * self.block_size

    def can_admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> bool:
        """Whether `admit(allocation, source)` has the blocks it needs."""
        starts = zip(self._parts(allocation), self._first_blocks(allocation, source), strict=True)
        return all(pool._has_blocks(each, hits) for (pool, each), (hits, _) in starts)

    def admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> int:
        """Give `allocation` its first blocks in every group (see `SlotPool.admit`)."""
        starts = zip(self._parts(allocation), self._first_blocks(allocation, source), strict=True)
        return max([pool._begin(each, *start) for (pool, each), start in starts])

    def shortage(self, allocation: BlockAllocation, length: int) -> int:
        """Blocks missing in the group that misses most (see `SlotPool.shortage`)."""
        return max([pool.shortage(each, length) for pool, each in self._parts(allocation)])

    def extend(
        self, allocation: BlockAllocation, length: int, candidates: Iterable[BlockAllocation] = ()
    ) -> list[BlockAllocation]:
        """Make `allocation` cover `length` positions in every group (see `SlotPool.extend`)."""
        victims = []
        if self.shortage(allocation, length):
            victims = preempt_for(lambda: self.shortage(allocation, length), self.release, allocation, candidates)
        if allocation.is_held:
            for pool, each in self._parts(allocation):
                pool._grow(each, length)
        return victims

    def trim(self, allocation: BlockAllocation, start: int) -> None:
        """Give back the blocks that no position from `start` on attends to."""
        for pool, each in self._parts(allocation):
            pool.trim(each, start)

    def release(self, allocation: BlockAllocation) -> None:
        """Release all blocks of `allocation`."""
        for pool, each in self._parts(allocation):
            pool.release(each)

    def publish(self, allocation: BlockAllocation, computed: int) -> None:
        """Publishes the full blocks among the first `computed` positions (see `SlotPool.publish`)."""
        for pool, each in self._parts(allocation):
            pool.publish(each, computed)

    def flush(self, allocations: Iterable[BlockAllocation] = ()) -> None:
        """Forget every cached prefix, and never publish the blocks that `allocations` hold now."""
        parts = [list(self._parts(allocation)) for allocation in allocations]
        for index, pool in enumerate(self.pools):
            pool.flush([each[index][1] for each in parts])

    def _parts(self, allocation: BlockAllocation) -> Iterable[tuple[SlotPool, BlockAllocation]]:
        if not allocation.others:
            allocation.others = tuple(allocation.in_another_group() for _ in self.pools[1:])
        return zip(self.pools, allocation.groups, strict=True)

    def fetch(self, allocation: BlockAllocation) -> Fetch | None:
        """Begin to bring the blocks of a prompt's prefix back from the host (see `SlotPool.fetch`)."""
        found = self._match(allocation, anywhere=True)
        parts = zip(self._parts(allocation), found, strict=True)
        if not any(ON_HOST in entries for entries in found) or not all(
            pool._has_blocks(each, [block for block in entries if block != ON_HOST]) for (pool, each), entries in parts
        ):
            return None
        assert self.host is not None
        fetch = Fetch(allocation.prefix(len(found[0]) * self.block_size), self.host.generation)
        keys = [pool._keys_on_host(fetch, entries) for pool, entries in zip(self.pools, found, strict=True)]
        for (pool, holder), entries, theirs in zip(self._parts(fetch.holder), found, keys, strict=True):
            pool._begin_fetch(fetch, holder, entries, theirs)
        return fetch

    def fetched(self, fetch: Fetch) -> None:
        """Make the blocks available that have come back (see `SlotPool.fetched`)."""
        for pool, holder in self._parts(fetch.holder):
            pool._end_fetch(fetch, holder)

    def _match(self, allocation: BlockAllocation, *, anywhere: bool = False) -> list[list[int]]:
        """The blocks of the longest prefix that every group has."""
        most = None
        while True:
            found: list[list[int]] = []
            for pool in self.pools:
                found.append(pool._match(allocation, most, anywhere=anywhere))
                most = len(found[-1])
            if most == len(found[0]):
                return found

    def _first_blocks(
        self, allocation: BlockAllocation, source: SharedPrefix | None
    ) -> list[tuple[list[int], SharedPrefix | None]]:
        """As `SlotPool._first_blocks`, of each group."""
        sources = [] if source is None else [SharedPrefix(each, source.length) for each in source.allocation.groups]
        if source is not None and not all(map(lambda pool, each: pool._holds(each), self.pools, sources)):
            source = None
        size, hits = self.block_size, [[] for _ in self.pools]
        if source is None or source.length < (len(allocation.tokens) - 1) // size * size:  # the cache may hold more
            hits = self._match(allocation)
        if source is None or source.length <= len(hits[0]) * size:
            return [(blocks, None) for blocks in hits]
        return [(each.allocation.blocks[: each.length // size], each) for each in sources]


def make_pool(groups: CacheGroups, n_blocks: int, *, part: int = 0, **settings: Any) -> SlotPool | GroupedPool:
    """The slot pools of these groups in a part; `settings` are those of `SlotPool`.

    Args:
      n_blocks: of the first group in all parts.
    """
    more = {"most_tokens": groups.most_tokens, "draft_tokens": groups.draft_tokens, **settings}
    pools: list[SlotPool] = []
    for window, total in zip(groups.windows, groups.blocks(n_blocks), strict=True):
        blocks = total // groups.parts
        sizes = {"n_blocks": blocks, "block_size": groups.block_size, "first_block": part * blocks}
        pools.append(SlotPool(**sizes, **settings) if window is None else WindowPool(window=window, **sizes, **more))
    return pools[0] if len(pools) == 1 else GroupedPool(pools)
