"""The accounts of a scheduler: every block is in one place; every row and every count is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.state import Phase
from jaxserve.scheduler.window_pool import WindowPool


def check(scheduler: Scheduler, parts: Sequence[Sequence[SlotPool]]) -> None:
    """Assert it, of a pool by part and cache group."""
    live = scheduler.requests.live.values()
    for part, group in product(range(len(parts)), range(scheduler.pool.n_groups)):
        pool = parts[part][group]
        owners = [state.allocation for state in live if state.allocation.is_held]
        held = [each.groups[group] for each in owners if each.part == part]
        held += [fetch.holder.groups[group] for fetch in scheduler.requests.fetching]
        check_pool(scheduler, pool, held, part * pool.n_blocks)
        assert all(len(each.blocks) * pool.block_size == each.capacity for each in held)
    for state in live:
        assert len({(each.capacity, each.is_held) for each in state.allocation.groups}) == 1
    assert 0 <= scheduler.pool.slots_held <= scheduler.pool.slots_used <= scheduler.pool.n_slots
    rows = [state.row for state in live if state.row >= 0]
    assert len(rows) == len(set(rows))
    assert set(rows).isdisjoint(scheduler.requests.free_rows)
    assert len(scheduler.requests.free_rows) == len(set(scheduler.requests.free_rows))
    phases = Counter(state.phase for state in live)
    assert scheduler.num_waiting == phases[Phase.WAITING] + phases[Phase.PREEMPTED]
    assert scheduler.requests.num_running == phases[Phase.RUNNING] + phases[Phase.FINISHING]
    rowless = [state for state in live if state.phase in (Phase.WAITING, Phase.PREEMPTED)]
    assert scheduler.waiting_tokens == sum(state.length for state in rowless)
    assert all(s.length == len(s.tokens) for s in live if s.phase == Phase.WAITING)
    assert not any(state.allocation.blocks for state in rowless)
    if scheduler.pool.policy == "reserve":
        assert not scheduler.preemptions


def check_pool(scheduler: Scheduler, pool: SlotPool, held: list[BlockAllocation], first: int) -> None:
    """Every block of a group in a part, from `first` on, is in one place; promises are kept."""
    references = Counter(block for each in held for block in each.blocks if block != NO_BLOCK)
    assert [references[block] for block in range(first + pool.n_blocks)] == pool.blocks._references
    places = Counter([*pool.blocks._free, *pool.blocks._idle, *references])
    assert places == Counter(range(first, first + pool.n_blocks))
    if isinstance(pool, WindowPool):
        promised = [each._set_aside for each in held]
        assert all(len(each.blocks) <= each._set_aside for each in held)
        assert pool._set_aside == sum(min(each, pool._bound) for each in promised)
        assert pool._beyond == sum(max(each - pool._bound, 0) for each in promised)
        assert pool._set_aside + min(pool._beyond, pool._spare) <= pool.n_blocks
        # A request that was not trimmed yet may hold its chunk as well.
        untrimmed = [id(each) for state in scheduler._to_trim for each in state.allocation.groups]
        trimmed = [each for each in held if id(each) not in untrimmed]
        assert all(sum(block != NO_BLOCK for block in each.blocks) <= pool._bound for each in trimmed)
    else:
        assert pool._set_aside == sum(each._set_aside for each in held) <= pool.blocks.num_available
    assert {digest: block for block, digest in enumerate(pool.blocks._digest_of) if digest} == pool.blocks._block_of
    assert set(pool.blocks._idle) <= set(pool.blocks._block_of.values())
    assert set(pool.blocks._free).isdisjoint(pool.blocks._block_of.values())
