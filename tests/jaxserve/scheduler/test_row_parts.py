"""A pool that is split by rows: which part a request is in, and what stays within a part."""

from __future__ import annotations

from itertools import count

import pytest

from jaxserve.scheduler.block_allocation import BlockAllocation, SharedPrefix
from jaxserve.scheduler.cache_groups import CacheGroups, make_pool
from jaxserve.scheduler.prefix_changes import BlocksStored, PrefixChanges
from jaxserve.scheduler.row_parts import PartitionedPool, make_pools

BLOCK = 4
_own = count(1000, 1000)


def groups(*windows: int | None, parts: int = 2) -> CacheGroups:
    return CacheGroups.of(
        windows or (None,), block_size=BLOCK, max_context=64, n_rows=4, most_tokens=8, draft_tokens=0, parts=parts
    )


def pool(blocks: int = 10, *windows: int | None) -> PartitionedPool:
    """Two parts of so many blocks."""
    made = make_pools(groups(*windows), 2 * blocks, policy="grow", prefix_cache=True)
    assert isinstance(made, PartitionedPool)
    for part in made.parts:
        for each in getattr(part, "pools", [part]):
            each.growth_tokens = 0
    return made


def request(length: int, tokens: range | None = None) -> BlockAllocation:
    own = next(_own)
    known = list(range(own, own + length)) if tokens is None else list(tokens)
    return BlockAllocation(tokens=known, max_length=64, prompt_length=len(known))


def run(slots: PartitionedPool, each: BlockAllocation, source: SharedPrefix | None = None) -> BlockAllocation:
    slots.admit(each, source)
    slots.extend(each, len(each.tokens))
    slots.publish(each, len(each.tokens))
    return each


def fill(slots: PartitionedPool, part: int, length: int) -> None:
    """Let a request take slots of a part."""
    each = request(length)
    each.part = part
    slots.parts[part].admit(each)
    slots.extend(each, length)


def test_requests_go_where_the_fewest_slots_are_in_use() -> None:
    slots = pool()
    found = [run(slots, request(length)) for length in (12, 4, 4, 20)]
    assert [each.part for each in found] == [0, 1, 1, 1]
    assert [each.blocks for each in found] == [[0, 1, 2], [10], [11], [12, 13, 14, 15, 16]]
    assert slots.n_slots == 2 * slots.request_slots == 2 * 10 * BLOCK
    assert slots.slots_used == slots.slots_held == 40
    assert run(slots, request(20)).part == 0
    assert not slots.can_admit(request(20))  # ten blocks are left, but five nowhere
    assert slots.can_admit(request(12))
    assert slots.can_admit(request(8))


def test_a_prefix_attracts_as_much_as_it_saves() -> None:
    slots = pool()
    slots.release(run(slots, request(0, range(16))))
    assert slots.slots_cached == 16
    fill(slots, 0, 12)
    again, longer = request(0, range(17)), request(0, range(5, 22))
    assert slots.cached_tokens(again) == 16
    assert slots.cached_tokens(longer) == 0
    assert (run(slots, again).part, run(slots, longer).part) == (0, 1)
    assert again.blocks[:4] == [0, 1, 2, 3]
    assert run(slots, request(0, range(9))).part == 1  # 8 tokens less do not make up for a fuller part
    assert slots.cached_tokens(request(0, range(17))) == 16


def test_samples_share_blocks_within_a_part() -> None:
    slots = pool(6)
    first, second, third = (request(0, range(10)) for _ in range(3))
    run(slots, request(4))
    run(slots, first)
    assert first.part == 1
    source = SharedPrefix(first, 9)
    run(slots, second, source)  # of three blocks it shares two
    assert (second.part, second.blocks[:2], second.copied) == (1, first.blocks[:2], (first.blocks[2], second.blocks[2]))
    run(slots, request(4, None))
    assert slots.parts[1].slots_used == 16
    fill(slots, 1, 8)
    assert slots.can_admit(third, source)
    assert slots.admit(third, source) == 0
    assert (third.part, third.copied) == (0, None)


def test_who_is_preempted_is_in_the_same_part() -> None:
    slots = pool(4)
    found = [run(slots, request(length)) for length in (12, 8, 8)]
    assert [each.part for each in found] == [0, 1, 1]
    assert slots.shortage(found[0], 16) == 0
    assert slots.shortage(found[0], 20) == 1
    assert slots.shortage(found[1], 12) == 1
    assert slots.extend(found[1], 12, [found[0], found[2], found[1]]) == [found[2]]
    assert [each.is_held for each in found] == [True, True, False]


def test_all_parts_forget_their_prefixes() -> None:
    slots = pool()
    for length in (8, 9):
        slots.release(run(slots, request(length)))
    late = [request(8), request(8)]
    for each in late:
        slots.admit(each)
        slots.extend(each, 8)
    assert {each.part for each in late} == {0, 1}
    slots.flush(late)
    for each in late:
        slots.publish(each, 8)
        slots.release(each)
    assert slots.slots_cached == 0


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_changes_of_all_parts_are_told(windows) -> None:
    slots, woken = pool(8, *windows), []
    changes = PrefixChanges([slots], lambda: woken.append(1))
    run(slots, request(8))
    run(slots, request(8))
    told = changes.take()
    assert [type(each) for each in told] == [BlocksStored, BlocksStored]
    assert len(woken) == 2


def test_sizes_are_those_of_each_part() -> None:
    one, both = groups(None, 8, parts=1), groups(None, 8, parts=2)
    assert both.blocks(60) == tuple(2 * each for each in one.blocks(30))
    assert both.fitting(60, 32) == 2 * one.fitting(30, 32)
    first, second = (make_pool(both, 60, part=part, policy="grow", prefix_cache=True) for part in range(2))
    assert [each.blocks._free[-1] for each in second.pools] == [each.n_blocks for each in first.pools]  # type: ignore[union-attr]
    assert both.entries(0, [0, 31], 60) == (0, 0, 1, 31 % one.blocks(30)[1])
    assert both.entries(1, [2], 60) == (32, one.blocks(30)[1] + 2)
