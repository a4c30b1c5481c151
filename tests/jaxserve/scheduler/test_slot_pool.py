"""The slot pool: what each policy sets aside, whom it names, and what the prefix cache finds and forgets."""

from __future__ import annotations

import pytest

from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation, SharedPrefix
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.window_pool import WindowPool


def pool(n_blocks=10, *, policy="grow", cache=True, growth=0) -> SlotPool:
    made = SlotPool(n_blocks, 4, policy=policy, prefix_cache=cache)
    made.growth_tokens = growth
    return made


def allocation(tokens, *, max_length=16, salt="") -> BlockAllocation:
    return BlockAllocation(tokens=list(tokens), max_length=max_length, prompt_length=len(tokens), salt=salt)


def run(slots: SlotPool, held: BlockAllocation) -> BlockAllocation:
    """Admit an allocation, compute all that is known of it, and publish it."""
    assert slots.can_admit(held)
    slots.admit(held)
    slots.extend(held, len(held.tokens))
    slots.publish(held, len(held.tokens))
    return held


@pytest.mark.parametrize(("n_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(n_blocks, block_size):
    with pytest.raises(ValueError, match="at least 1"):
        SlotPool(n_blocks, block_size, policy="grow", prefix_cache=True)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="must be reserve or grow"):
        SlotPool(1, 1, policy="shrink", prefix_cache=True)  # pyright: ignore[reportArgumentType]


def test_reserve_sets_the_worst_case_aside():
    slots = pool(policy="reserve")
    first, second, third = (allocation(range(k, k + 5)) for k in (0, 10, 20))  # 4 blocks each, out of 10
    slots.admit(first)
    assert slots.slots_used == 16
    assert slots.can_admit(second)
    slots.admit(second)
    assert not slots.can_admit(third)
    assert not slots.shortage(first, 16)
    for length in range(1, 17):
        assert slots.extend(first, length) == []
        assert slots.slots_used == 32  # taken from what was set aside
    assert first.capacity == 16
    slots.release(first)
    assert slots.slots_used == 16
    assert slots.can_admit(third)


def test_reserve_counts_shared_blocks_once():
    slots = pool(7, policy="reserve")
    tokens = list(range(13))
    run(slots, allocation(tokens))  # 4 blocks, the first 3 published
    other = allocation([*tokens[:12], 99])
    assert slots.can_admit(other)  # 1 block beside the 3 that are there
    assert slots.admit(other) == 12
    assert slots.slots_used == 20
    assert not slots.can_admit(allocation([7, 7, 7], max_length=12))
    assert slots.can_admit(allocation([7, 7, 7], max_length=8))


def test_reserve_pays_for_cached_blocks_that_nobody_holds():
    slots = pool(4, policy="reserve")
    tokens = list(range(9))
    slots.release(run(slots, allocation(tokens)))
    assert (slots.blocks.num_cached, slots.slots_cached, slots.slots_used) == (2, 8, 0)
    again = allocation(tokens)
    assert slots.can_admit(again)  # 2 hits and 2 new ones: the whole pool, and no more
    assert slots.admit(again) == 8
    assert slots.slots_cached == 0  # they are held now
    assert not slots.can_admit(allocation([1], max_length=1))


def test_grow_sets_aside_blocks_for_known_tokens_and_growth():
    slots = pool(growth=6)  # a block and a half for each allocation
    assert slots.can_admit(allocation(range(40), max_length=40))  # alone: all of it
    first = allocation(range(9))
    slots.admit(first)
    assert slots.slots_used == 12
    assert slots.can_admit(allocation(range(50, 66)))  # 3 + 4 blocks, 3 for growth
    assert not slots.can_admit(allocation(range(50, 67)))


def test_grow_names_its_victims_latest_first():
    slots = pool(6)
    allocations = [allocation(range(10 * k, 10 * k + 8)) for k in range(3)]  # 2 blocks each: all
    for held in allocations:
        slots.admit(held)
        slots.extend(held, 8)
    assert slots.shortage(allocations[0], 9) == 1
    assert slots.extend(allocations[0], 9, reversed(allocations)) == [allocations[2]]
    assert allocations[2].blocks == []
    assert allocations[2].capacity == 0
    assert slots.extend(allocations[0], 12, reversed(allocations[:2])) == []
    assert slots.extend(allocations[0], 16, reversed(allocations[:2])) == []
    # The latest left needs a block: it goes itself.
    assert slots.extend(allocations[1], 9, reversed(allocations[:2])) == [allocations[1]]
    assert slots.extend(allocations[0], 24, [allocations[0]]) == []
    assert slots.blocks.num_available == 0


def test_reserved_block_is_not_given_to_a_decode():
    slots = pool(4)
    decoding, prefilling = allocation(range(4)), allocation(range(10, 22))
    slots.admit(decoding)
    slots.extend(decoding, 4)
    slots.admit(prefilling)  # 3 blocks set aside, none taken
    assert slots.blocks.num_available == 3
    assert slots.shortage(decoding, 5) == 1
    assert slots.extend(decoding, 5, [prefilling, decoding]) == [prefilling]


def test_released_blocks_come_back_once():
    slots = pool(3, cache=False)
    held = allocation(range(12))
    slots.admit(held)
    slots.extend(held, 12)
    blocks = list(held.blocks)
    slots.release(held)
    slots.release(held)
    assert slots.blocks.num_available == 3
    slots.admit(held)
    slots.extend(held, 12)
    assert sorted(held.blocks) == sorted(blocks) == [0, 1, 2]


def test_hits_leave_the_last_token_to_compute():
    slots = pool()
    tokens = list(range(12))
    run(slots, allocation(tokens))
    for length, hit in ((12, 8), (11, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        other = allocation(tokens[:length])
        assert slots.admit(other) == hit
        slots.release(other)


def test_hits_depend_on_all_tokens_before_and_on_the_salt():
    slots = pool(40)
    tokens = list(range(12))
    run(slots, allocation(tokens))
    assert slots.admit(allocation([99, *tokens[1:]])) == 0
    assert slots.admit(allocation([*tokens[:4], 99, *tokens[5:]])) == 4
    assert slots.admit(allocation(tokens, salt="somebody else")) == 0
    assert slots.admit(allocation([*tokens, 1, 2, 3])) == 12


def test_a_salt_need_not_be_encodable():
    assert pool().admit(allocation(range(5), salt="\ud800")) == 0


def test_who_takes_no_hits_gets_none_but_publishes():
    slots = pool()
    run(slots, allocation(range(8)))
    scored = BlockAllocation(tokens=list(range(8)), max_length=16, prompt_length=8, takes_hits=False)
    assert slots.admit(scored) == 0
    other = BlockAllocation(tokens=list(range(20, 32)), max_length=16, prompt_length=12, takes_hits=False)
    run(slots, other)
    assert slots.admit(allocation(range(20, 32))) == 8


def test_without_prefix_cache_nothing_is_published():
    slots = pool(cache=False)
    held = run(slots, allocation(range(12)))
    assert slots.blocks.num_cached == 0
    assert held.publish_at == float("inf")


def test_publishing_follows_what_was_computed():
    slots = pool()
    held = allocation(range(10))
    slots.admit(held)
    slots.extend(held, 10)
    assert held.publish_at == 4
    slots.publish(held, 3)
    assert slots.blocks.num_cached == 0
    slots.publish(held, 7)
    assert (slots.blocks.num_cached, held.publish_at) == (1, 8)
    slots.publish(held, 10)
    assert (slots.blocks.num_cached, held.publish_at) == (2, 12)
    held.tokens += [10, 11, 12]  # generated
    slots.extend(held, 13)
    slots.publish(held, 12)
    assert slots.admit(allocation(range(20))) == 12


def test_the_same_prefix_computed_twice_is_cached_once():
    slots = pool(6)
    first, second = allocation(range(9)), allocation(range(9))
    for held in (first, second):
        slots.admit(held)
        slots.extend(held, 9)
    for held in (first, second):
        slots.publish(held, 8)
    assert slots.blocks.num_cached == 2
    slots.release(first)
    third = allocation(range(9))
    slots.admit(third)
    assert third.blocks == [0, 1]
    slots.release(second)
    assert slots.blocks.num_available == 4


def test_eviction_is_lru_from_chain_ends():
    slots = pool(6)
    old, new = run(slots, allocation(range(12))), run(slots, allocation(range(50, 62)))
    assert (old.blocks, new.blocks) == ([0, 1, 2], [3, 4, 5])
    slots.release(old)
    slots.release(new)
    slots.release(run(slots, allocation(range(12, 16))))  # one block: the last of `old`'s
    assert slots.blocks.num_cached == 6
    probe = allocation(range(12))
    assert slots.admit(probe) == 8
    slots.release(probe)  # and now `new` is the one not used for longest
    slots.release(run(slots, allocation(range(80, 88))))
    probe = allocation(range(50, 63))
    assert slots.admit(probe) == 4
    slots.release(probe)
    assert slots.admit(allocation(range(13))) == 8


def test_a_held_block_is_never_evicted():
    slots = pool(4)
    run(slots, allocation(range(8)))
    sharing = allocation(range(9))
    slots.admit(sharing)
    assert not slots.can_admit(allocation(range(20, 32)))
    slots.release(run(slots, allocation(range(20, 24))))
    slots.extend(sharing, 9)
    assert sharing.blocks[:2] == [0, 1]


def test_flush_forgets_all_and_what_is_held_is_never_published():
    slots = pool()
    slots.release(run(slots, allocation(range(8))))
    held = allocation(range(20, 32))
    slots.admit(held)
    slots.extend(held, 12)
    slots.publish(held, 4)
    slots.flush([held])
    assert slots.blocks.num_cached == 0
    slots.publish(held, 12)
    assert slots.blocks.num_cached == 0
    assert slots.admit(allocation(range(9))) == 0
    slots.release(held)
    assert slots.blocks.num_available == 10
    run(slots, held)  # admitted anew, it may publish
    assert slots.blocks.num_cached == 3


def test_prefixes_in_runs_are_of_whole_runs_of_prompts():
    slots = SlotPool(20, 4, policy="reserve", prefix_cache=True, prefix_blocks=2)
    first = allocation(range(21), max_length=32)
    run(slots, first)
    first.tokens += range(21, 32)  # generated: never found, though it fills blocks
    slots.extend(first, 32)
    slots.publish(first, 32)
    assert slots.blocks.num_cached == 4  # of the five that the prompt fills
    assert slots.cached_tokens(allocation(range(32))) == 16
    assert slots.cached_tokens(allocation(range(16))) == 8  # three whole blocks, the fourth has the last token
    assert slots.cached_tokens(allocation(range(8))) == 0


def windowed(n_blocks=10, window=6) -> WindowPool:
    made = WindowPool(n_blocks, 4, policy="grow", prefix_cache=True, window=window, most_tokens=20)
    made.growth_tokens = 0
    return made


def test_blocks_behind_the_window_are_given_back():
    slots = windowed()
    held = run(slots, allocation(range(20), max_length=40))
    slots.trim(held, 8)  # positions from 3 on are attended to
    assert held.blocks.count(NO_BLOCK) == 0
    slots.trim(held, 9)
    assert [block == NO_BLOCK for block in held.blocks] == [True, False, False, False, False]
    assert (held.capacity, slots.slots_held) == (20, 16)
    slots.trim(held, 20)
    assert held.blocks.count(NO_BLOCK) == 3
    slots.extend(held, 40)
    assert len(held.blocks) == 10
    slots.release(held)
    assert slots.blocks.num_available == 10


def test_without_a_window_nothing_is_given_back():
    slots = pool()
    held = run(slots, allocation(range(20), max_length=40))
    slots.trim(held, 20)
    assert held.blocks.count(NO_BLOCK) == 0


def test_a_prefix_needs_only_the_blocks_in_the_window():
    slots = windowed()
    slots.release(run(slots, allocation(range(20), max_length=20)))
    evicting = allocation(range(100, 128), max_length=28)  # takes the free five and two of the cached
    slots.admit(evicting)
    slots.extend(evicting, 28)
    slots.release(evicting)
    found = allocation(range(20), max_length=24)
    assert slots.cached_tokens(found) == 12  # blocks 1 and 2; the end of the chain went first, and 0 is behind
    slots.admit(found)
    assert [block == NO_BLOCK for block in found.blocks] == [True, False, False]
    assert slots.extend(found, 20) == []


def test_a_sample_does_not_share_what_another_left_behind():
    slots = windowed(20)
    first = run(slots, allocation(range(10), max_length=60))
    first.tokens += range(100, 130)
    slots.extend(first, 40)
    slots.trim(first, 40)
    second = allocation(range(10), max_length=60, salt="x")
    assert slots.admit(second, SharedPrefix(first, 9)) == 0
