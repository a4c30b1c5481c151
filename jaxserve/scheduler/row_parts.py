"""Slot pools where the device pool is split by rows: requests have their blocks in one part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.scheduler.block_allocation import BlockAllocation, SharedPrefix
from jaxserve.scheduler.cache_groups import CacheGroups, GroupedPool, make_pool
from jaxserve.scheduler.slot_pool import SlotPool


class PartitionedPool:
    """The slot pools of all parts. It has the interface of `SlotPool`.

    A request gets all its blocks from one part, chosen at admission: of the parts that can admit it, that with the
    fewest slots in use, counting the tokens that it would have to compute there. So requests spread over the parts, and
    a long prefix in the cache of one attracts them. Parallel samples go where the blocks are that they share, if there
    is a place. A prefix is found in the part that has it, and is computed again in others. A request is preempted only
    for one of its own part.
    """

    host = None  # host caches are not supported

    def __init__(self, parts: Sequence[SlotPool | GroupedPool]) -> None:
        """
        Args:
          parts: of equal sizes, with blocks numbered one part after another.
        """
        self.parts = tuple(parts)
        first = parts[0]
        self.n_groups, self.gives_back, self.block_size = first.n_groups, first.gives_back, first.block_size
        self.policy, self.prefix_cache, self.request_slots = first.policy, first.prefix_cache, first.request_slots
        self.n_blocks, self.n_slots = len(parts) * first.n_blocks, len(parts) * first.n_slots

    @property
    def slots_used(self) -> int:
        """Slots in blocks that a request holds or that are set aside for one."""
        return sum(part.slots_used for part in self.parts)

    @property
    def slots_held(self) -> int:
        """Slots in blocks that a request holds."""
        return sum(part.slots_held for part in self.parts)

    @property
    def slots_cached(self) -> int:
        """Slots in blocks that no request holds and that a prefix lookup can find."""
        return sum(part.slots_cached for part in self.parts)

    def cached_tokens(self, allocation: BlockAllocation) -> int:
        """Tokens of `allocation` that the cache of some part holds now. Any thread may call this."""
        return max(part.cached_tokens(allocation) for part in self.parts)

    def can_admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> bool:
        """Whether `admit(allocation, source)` has the blocks it needs."""
        return self._choose(allocation, source) is not None

    def admit(self, allocation: BlockAllocation, source: SharedPrefix | None = None) -> int:
        """Give `allocation` its first blocks in the part that suits it best (see `SlotPool.admit`)."""
        chosen = self._choose(allocation, source)
        assert chosen is not None
        allocation.part, source = chosen
        return self.parts[allocation.part].admit(allocation, source)

    def _choose(
        self, allocation: BlockAllocation, source: SharedPrefix | None
    ) -> tuple[int, SharedPrefix | None] | None:
        """The part for a request, and the source if it is there; None if no part has the blocks."""
        if source is not None and self.parts[source.allocation.part].can_admit(allocation, source):
            return source.allocation.part, source
        able = [index for index, part in enumerate(self.parts) if part.can_admit(allocation)]
        if not able:
            return None
        return min(able, key=lambda index: self._load(self.parts[index], allocation)), None

    def _load(self, part: SlotPool | GroupedPool, allocation: BlockAllocation) -> int:
        return part.slots_used + len(allocation.tokens) - part.cached_tokens(allocation)

    def shortage(self, allocation: BlockAllocation, length: int) -> int:
        """Blocks missing in the request's part (see `SlotPool.shortage`)."""
        return self.parts[allocation.part].shortage(allocation, length)

    def extend(
        self, allocation: BlockAllocation, length: int, candidates: Iterable[BlockAllocation] = ()
    ) -> list[BlockAllocation]:
        """Make `allocation` cover `length` positions; candidates of its part may lose theirs."""
        mine = (each for each in candidates if each.part == allocation.part)
        return self.parts[allocation.part].extend(allocation, length, mine)

    def trim(self, allocation: BlockAllocation, start: int) -> None:
        """Give back the blocks that no position from `start` on attends to."""
        self.parts[allocation.part].trim(allocation, start)

    def release(self, allocation: BlockAllocation) -> None:
        """Release all blocks of `allocation`."""
        self.parts[allocation.part].release(allocation)

    def publish(self, allocation: BlockAllocation, computed: int) -> None:
        """Make full blocks among the first `computed` positions available (`SlotPool.publish`)."""
        self.parts[allocation.part].publish(allocation, computed)

    def flush(self, allocations: Iterable[BlockAllocation] = ()) -> None:
        """Forget every cached prefix, and never publish the blocks that `allocations` hold now."""
        held = list(allocations)
        for part in self.parts:
            part.flush(held)


Pool = SlotPool | GroupedPool | PartitionedPool


def make_pools(groups: CacheGroups, n_blocks: int, **settings: Any) -> Pool:
    """The slot pools of these groups; `settings` are those of `SlotPool`.

    Args:
      n_blocks: of the first group, a multiple of the parts.
    """
    if groups.parts == 1:
        return make_pool(groups, n_blocks, **settings)
    return PartitionedPool([make_pool(groups, n_blocks, part=part, **settings) for part in range(groups.parts)])
