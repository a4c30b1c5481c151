"""Cache groups: their windows and sizes, and the pools of several groups used as one."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation, SharedPrefix
from jaxserve.scheduler.cache_groups import CacheGroups, GroupedPool, make_pool
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.window_pool import WindowPool

BLOCK, WINDOW = 4, 8


def groups(*windows: int | None, **sizes: int) -> CacheGroups:
    defaults = {"block_size": 16, "max_context": 8192, "n_rows": 64, "most_tokens": 512}
    return CacheGroups.of(windows, **defaults | sizes)


def test_layers_of_one_window_are_a_group_widest_first():
    made = groups(128, None, 128, 4096, None)
    assert made.windows == (None, 4096, 128)
    assert [made.index(window) for window in (None, 128, 4096)] == [0, 2, 1]
    narrow = groups(4096, None, 128, max_context=4096)  # no request outgrows the window of 4096
    assert narrow.windows == (None, 128)
    assert narrow.index(4096) == 0
    assert groups(4096, 4096).windows == (4096,)
    assert groups(None).windows == (None,)


def test_sizes_by_hand():
    # 128 tokens are 8 blocks, which may begin and end anywhere: 10. So many of twice 64 rows, and 512 tokens.
    assert groups(None, 128).blocks(100_000) == (100_000, 2 * 64 * 10 + 32)
    # Too few for all rows: requests of 256 tokens, 16 blocks, fill both pools.
    assert groups(None, 128).blocks(1000) == (1000, 625 + 32)
    # 4096 tokens are 258 blocks; requests of 8192 have 512.
    assert groups(None, 4096).blocks(5120) == (5120, 2580 + 32)
    assert groups(None, 128).blocks(30) == (30, 30)  # never more than the first
    assert groups(None, 128).blocks(60) == (60, 60)
    assert groups(None, 128, draft_tokens=16).blocks(100_000)[1] == 2 * 64 * 11 + 32
    assert groups(4096, 128).blocks(5120) == (5120, 2 * 64 * 10 + 32)
    assert groups(None).blocks(77) == (77,)


def test_requests_that_fit():
    alternating = groups(None, 128)
    assert alternating.fitting(100_000, 2048) == min(100_000 * 16 // 2048, 1280 // 10) == 128
    assert alternating.fitting(10_000, 2048) == 10_000 * 16 // 2048
    assert alternating.fitting(10_000, 16) == 1312  # a block each in either
    assert groups(None).fitting(10_000, 100) == 1600


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    n_blocks=st.integers(1, 60),
    block_size=st.integers(1, 5),
    windows=st.sampled_from([(None, 1), (None, 6), (None, 13), (9, 2), (None, 9, 3)]),
    most=st.integers(1, 40),
    policy=st.sampled_from(["grow", "reserve"]),
)
def test_what_fits_the_first_pool_runs_to_its_end(n_blocks, block_size, windows, most, policy):
    made = CacheGroups.of(windows, block_size=block_size, max_context=90, n_rows=2, most_tokens=most)
    pool = make_pool(made, n_blocks, policy=policy, prefix_cache=True)
    length = min(90, pool.n_slots)
    alone = BlockAllocation(tokens=list(range(length)), max_length=length, prompt_length=length)
    assert pool.can_admit(alone)
    start = pool.admit(alone)
    while start < length:
        end = min(start + most, length)
        assert pool.shortage(alone, end) == 0
        pool.extend(alone, end)
        start = end
        pool.trim(alone, start - 1)
    pool.release(alone)
    assert pool.slots_used == 0


def pair(first=40, second=12, *, policy="grow", most_tokens=8) -> GroupedPool:
    own = {"policy": policy, "prefix_cache": True}
    pool = GroupedPool(
        [SlotPool(first, BLOCK, **own), WindowPool(second, BLOCK, window=WINDOW, most_tokens=most_tokens, **own)]
    )
    for each in pool.pools:
        each.growth_tokens = 0
    return pool


_own = count(1000, 1000)


def allocation(length: int, max_length: int = 80, tokens: range | None = None) -> BlockAllocation:
    own = next(_own)
    known = list(range(own, own + length)) if tokens is None else list(tokens)
    return BlockAllocation(tokens=known, max_length=max_length, prompt_length=len(known))


def run(pool: GroupedPool, each: BlockAllocation, *, publish: bool = True) -> BlockAllocation:
    """Compute all of its tokens, eight at a time."""
    start = pool.admit(each)
    while start < len(each.tokens):
        end = min(start + 8, len(each.tokens))
        pool.extend(each, end)
        start = end
        pool.trim(each, start - 1)
    if publish:
        pool.publish(each, len(each.tokens))
    return each


def held(each: BlockAllocation) -> list[int]:
    return [sum(block != NO_BLOCK for block in group.blocks) for group in each.groups]


def test_a_request_keeps_only_its_window_in_one_group():
    pool = pair()
    each = run(pool, allocation(32))
    assert [len(group.blocks) for group in each.groups] == [8, 8]
    assert held(each) == [8, 2]  # positions 24 to 31
    assert each.entries(6) == [each.blocks[6], each.others[0].blocks[6], each.blocks[7], each.others[0].blocks[7]]
    pool.release(each)
    assert [each.blocks.num_available for each in pool.pools] == [40, 12]


def test_every_group_must_have_blocks():
    pool = pair(first=40, second=10)  # two requests of four blocks, and eight tokens
    first, second, third = allocation(20), allocation(20), allocation(20)
    for each in (first, second):
        assert pool.can_admit(each)
        run(pool, each)
    assert not pool.can_admit(third)
    assert pool.can_admit(allocation(1, max_length=4)) is False
    pool.release(first)
    assert pool.can_admit(third)
    larger = pair(first=7, second=40)
    run(larger, allocation(20))
    assert not larger.can_admit(allocation(12))  # the other group is short


def test_a_prefix_is_found_as_far_as_every_group_has_it():
    pool = pair(first=40, second=14)
    prompt = range(33)
    pool.release(run(pool, allocation(0, tokens=prompt)))
    again = allocation(0, tokens=prompt)
    assert pool.cached_tokens(again) == 32
    assert pool.cached_tokens(allocation(0, tokens=range(21))) == 20  # what was given back is still found
    pool.admit(again)
    assert held(again) == [8, 2]
    pool.release(again)
    windows = pool.pools[1]
    evicted = windows.blocks._block_of.pop(again.digest(6))  # the last block but one, of the group with a window
    windows.blocks._digest_of[evicted] = None
    del windows.blocks._idle[evicted]
    windows.blocks._free.append(evicted)
    assert pool.cached_tokens(again) == 24
    full = pool.pools[0]
    for digest in again._digests.known[4:]:
        block = full.blocks._block_of.pop(digest)
        full.blocks._digest_of[block] = None
        del full.blocks._idle[block]
        full.blocks._free.append(block)
    assert pool.cached_tokens(again) == 16
    assert pool.admit(again) == 16
    assert held(again) == [4, 2]


def test_preemption_for_one_group_frees_blocks_in_all():
    pool = pair(first=40, second=6)  # a request alone has four, and two for eight tokens
    first = run(pool, allocation(4))
    second = run(pool, allocation(16, max_length=16))
    assert pool.shortage(first, 8) == 0
    pool.extend(first, 8)
    assert pool.shortage(first, 12) == 1
    assert pool.pools[0].shortage(first, 12) == 0
    assert pool.extend(first, 12, [second, first]) == [second]
    assert second.blocks == second.others[0].blocks == []
    assert held(first) == [3, 3]
    third = run(pool, allocation(4))
    while pool.shortage(third, third.capacity + 1) == 0:
        pool.extend(third, third.capacity + 1)
    assert pool.extend(third, third.capacity + 1, [third, first]) == [third]  # the latest gives way
    assert not any(each.is_held for each in third.groups)


def test_reserve_sets_the_window_aside_and_no_more():
    pool = pair(first=40, second=10, policy="reserve")
    for _ in range(2):
        each = allocation(4, max_length=80)
        assert pool.can_admit(each)
        pool.admit(each)
    assert pool.pools[1].slots_used == 10 * BLOCK
    assert pool.slots_used == pool.n_slots  # the fullest group counts
    assert not pool.can_admit(allocation(4, max_length=4))


def test_samples_share_the_blocks_of_every_group():
    pool = pair(second=20)
    first = run(pool, allocation(18), publish=False)
    second = BlockAllocation(tokens=list(first.tokens), max_length=80, prompt_length=18)
    assert pool.admit(second, SharedPrefix(first, 17)) == 17
    for mine, theirs in zip(second.groups, first.groups, strict=True):
        assert mine.blocks[:4] == theirs.blocks[:4]
        assert mine.copied == (theirs.blocks[4], mine.blocks[4])
    # The other has gone on: what would be shared is left behind in one group, so nothing is shared in any.
    first.tokens += range(30)
    pool.extend(first, 48)
    pool.trim(first, 48)
    pool.flush([first])
    third = BlockAllocation(tokens=list(second.tokens), max_length=80, prompt_length=18)
    assert pool.admit(third, SharedPrefix(first, 17)) == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_blocks_are_published_before_they_are_given_back(prefix_cache):
    pool = WindowPool(20, BLOCK, policy="grow", prefix_cache=prefix_cache, window=WINDOW, most_tokens=32)
    each = allocation(24)
    pool.admit(each)
    pool.extend(each, 24)
    pool.trim(each, 20)
    assert pool.cached_tokens(BlockAllocation(tokens=each.tokens[:17], max_length=30, prompt_length=17)) == (
        16 if prefix_cache else 0
    )
    flushed = allocation(24)
    pool.admit(flushed)
    pool.extend(flushed, 24)
    pool.flush([flushed])
    pool.trim(flushed, 20)
    assert pool.blocks.num_cached == 0


class CountedReads(list[int]):
    """Blocks of a request, and how many of them are read one by one."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


def test_what_is_given_back_already_is_not_read_again():
    """However long the request: it is trimmed after each of its iterations."""
    pool = WindowPool(20, BLOCK, policy="grow", prefix_cache=False, window=WINDOW, most_tokens=8)
    each = allocation(400, 400)
    pool.admit(each)
    for end in range(8, 401, 8):
        pool.extend(each, end)
        blocks = each.blocks = CountedReads(each.blocks)
        pool.trim(each, end)
        assert blocks.count <= 4  # two blocks of eight tokens, and whether there are more on either side


def test_a_prefix_needs_only_the_blocks_within_its_window():
    pool = WindowPool(20, BLOCK, policy="grow", prefix_cache=True, window=WINDOW, most_tokens=32)
    each = allocation(24)
    pool.admit(each)
    pool.extend(each, 24)
    pool.publish(each, 24)
    again = allocation(0, tokens=range(each.tokens[0], each.tokens[0] + 24))
    assert pool._match(again) == [NO_BLOCK] * 3 + each.blocks[3:5]  # the window of the 21st token
    for index in (0, 1, 2):
        del pool.blocks._block_of[again.digest(index)]
    assert pool._match(again) == [NO_BLOCK] * 3 + each.blocks[3:5]
    del pool.blocks._block_of[again.digest(3)]
    assert pool._match(again) == []


def test_flush_forgets_every_group_and_publishes_nothing():
    pool = pair()
    pool.release(run(pool, allocation(16)))
    each = run(pool, allocation(16), publish=False)
    pool.flush([each])
    pool.publish(each, 16)
    assert [group.blocks.num_cached for group in pool.pools] == [0, 0]
    pool.release(each)
    assert [group.blocks.num_available for group in pool.pools] == [40, 12]


def test_slots_in_use_are_told_by_the_fullest_group():
    pool = pair(first=40, second=12)
    run(pool, allocation(8), publish=False)  # two blocks in each: of 40, and of 12
    assert pool.pools[1].slots_held == 8
    assert pool.slots_held == 160 * 8 // 48 + 1  # 27 of 160 slots are the same share, rounded up
