"""Samples of one prompt in the scheduler: who computes it, what the others take over, and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import Chunk, IterationPlan
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.static_batching import StaticBatchScheduler
from tests.jaxserve.scheduler.stepping import finish, land, names, request

PROMPT = tuple(range(100, 110))  # two blocks of 4 and half of one


def scheduler(
    *, rows=8, sizes=(1, 4, 8, 16, 32), blocks=64, policy="grow", cache=True, made=Scheduler, **more
) -> Scheduler:
    pool = SlotPool(blocks, 4, policy=policy, prefix_cache=cache)
    pool.growth_tokens = 0
    costs = [BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in sizes]
    return made(pool, BucketLadder(costs), max_rows=rows, max_context=64, **more)


def submit(made: Scheduler, count: int, prompt: Sequence[int] = PROMPT, **sampling) -> None:
    """Samples "a", "a1", "a2" and so on of a prompt."""
    first = request("a", prompt, **sampling)
    made.submit(first)
    for index in range(1, count):
        made.submit(dataclasses.replace(first, request_id=f"a{index}", fork_of="a"))


def plan(made: Scheduler) -> IterationPlan:
    planned = made.schedule()
    assert planned is not None
    return planned


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_the_prompt_is_computed_once_and_its_blocks_are_shared(policy, cache):
    made = scheduler(policy=policy, cache=cache)
    submit(made, 4, max_tokens=4)
    first = plan(made)
    assert names(first) == ["a"]
    assert first.chunks == (Chunk(0, 0, 10, True),)
    assert made.num_waiting == 3
    second = plan(made)  # before the first has landed
    assert names(second) == ["a1", "a2", "a3"]
    assert second.chunks == (Chunk(0, 10, 1, True), *(Chunk(row, 9, 1, True) for row in (1, 2, 3)))
    states = made.requests.live
    shared, last = states["a"].allocation.blocks[:2], states["a"].allocation.blocks[2]
    copies = [copy.target for copy in second.block_copies]
    assert [copy.source for copy in second.block_copies] == [last] * 3
    assert [admission.blocks for admission in second.admissions] == [(*shared, target) for target in copies]
    assert second.table_changes == ()
    assert made.pool.slots_held == (2 + 4) * 4
    # Each may still come to 14 tokens: 4 blocks, of which 2 are in common.
    assert made.pool.slots_used == ((2 + 4 * 2) * 4 if policy == "reserve" else 6 * 4)
    events = finish(made, first, second)
    assert {event.cached_tokens for event in events if event.request_id != "a"} == {9}
    assert sum(event.finish_reason is FinishReason.LENGTH for event in events) == 4
    assert made.pool.slots_used == 0
    assert made.requests.samples.named == {}


def test_aligned_prompt_needs_no_copy():
    made = scheduler()
    submit(made, 2, PROMPT[:9])
    plan(made)
    second = plan(made)
    assert second.block_copies == ()
    assert second.chunks[1] == Chunk(1, 8, 1, True)
    assert len(second.table_changes) == 1
    assert made.pool.slots_held == (2 + 2) * 4


def test_a_prompt_shorter_than_a_block_is_copied_too():
    made = scheduler(cache=False)
    submit(made, 2, PROMPT[:3])
    plan(made)
    second = plan(made)
    assert len(second.block_copies) == 1
    assert second.chunks[1] == Chunk(1, 2, 1, True)


def test_one_token_is_computed_by_everybody():
    made = scheduler()
    submit(made, 3, PROMPT[:1])
    assert plan(made).chunks == tuple(Chunk(row, 0, 1, True) for row in range(3))


def test_salt_separates_calls():
    made = scheduler()
    first = request("a", PROMPT, salt="x", max_tokens=2)
    made.submit(first)
    made.submit(dataclasses.replace(first, request_id="a1", cache_salt="y", fork_of="a"))
    finish(made)
    assert made.preemptions == 0
    for salt, hits in (("x", 8), ("y", 0), ("z", 0)):
        made.submit(request("b", PROMPT, salt=salt, max_tokens=1))
        assert plan(made).chunks[0].start == hits
        made.abort("b")
        made._in_flight.clear()


def test_samples_precede_later_requests():
    made = scheduler(rows=3, sizes=(8,))
    submit(made, 3, range(100, 112), max_tokens=20)
    made.submit(request("b", 1, max_tokens=20))
    made.submit(request("c", 1, max_tokens=20))
    first = plan(made)
    assert names(first) == ["a"]
    second = plan(made)
    assert names(second) == ["b", "c"]  # the prompt leaves 4 tokens, and nobody else can use them
    assert [chunk.length for chunk in second.chunks] == [1, 1, 4]
    assert made.num_waiting == 2
    land(made, first)
    assert names(plan(made)) == []  # no row is left
    made.abort("b")
    made.submit(request("d", 1, max_tokens=20))
    land(made, second)
    assert names(plan(made)) == ["a1"]


def test_nobody_waits_for_a_first_one_that_has_gone():
    made = scheduler(sizes=(4,))
    submit(made, 3)
    first = plan(made)
    assert (names(first), made.num_waiting) == (["a"], 2)
    made.abort("a")
    second = plan(made)
    assert (names(second), second.chunks[0].start) == (["a1"], 0)
    assert made.num_waiting == 1
    ends = [event for event in finish(made, first, second) if event.finish_reason]
    assert [event.request_id for event in ends] == ["a1", "a2"]
    assert ends[1].cached_tokens == 9


def test_first_sample_of_one_token_is_shared():
    made = scheduler()
    submit(made, 3, max_tokens=1)
    first, second = plan(made), plan(made)
    assert [chunk.start for chunk in second.chunks] == [9, 9]
    assert len(finish(made, first, second)) == 3


def test_samples_that_were_preempted_share_the_prompt_again():
    made = scheduler(blocks=8, sizes=(1, 4, 16), cache=False)
    made.submit(request("b", 4, max_tokens=16))
    submit(made, 2, max_tokens=14)
    launched: list[IterationPlan] = []
    starts = []
    while made.has_work:
        planned = made.schedule()
        if planned is not None:
            launched.append(planned)
            rows = {chunk.row: chunk.start for chunk in planned.chunks}
            starts += [(each.request_id, rows[each.row], "a" in made.requests.live) for each in planned.admissions]
        if planned is None or len(launched) > 1:
            done = launched.pop(0)
            land(made, done)
    assert made.preemptions == 3  # of the second once and then of both
    again = [("a", 0, True), ("a1", 9, True)]
    assert starts == [("b", 0, True), *again, *again, ("a1", 0, False)]


def test_reserve_admits_by_sharing():
    made = scheduler(policy="reserve", blocks=3 + 3 * 2, cache=False)
    submit(made, 5, range(100, 112), max_tokens=4)  # 16 tokens: 4 blocks each, 2 of which (of 11 tokens) are in common
    first, second = plan(made), plan(made)
    assert (names(first), names(second)) == (["a"], ["a1", "a2"])
    assert made.pool.blocks.num_available - made.pool._set_aside == 1
    assert sum(event.finish_reason is FinishReason.LENGTH for event in finish(made, first, second)) == 5


def test_pieces_at_fixed_places_are_computed_by_everybody():
    made = scheduler(policy="reserve", fixed_chunk=8, sizes=(32,), cache=False)
    submit(made, 2, range(100, 121), max_tokens=2)
    launched = [plan(made)]
    while names(launched[-1]) != ["a1"]:
        done = launched[-1]
        land(made, done)
        launched.append(plan(made))
    assert launched[-1].block_copies == ()
    assert Chunk(1, 16, 5, True) in launched[-1].chunks


def test_a_sample_whose_prompt_is_scored_computes_it():
    made = scheduler()
    submit(made, 2, prompt_logprobs=0)
    assert [chunk.start for chunk in plan(made).chunks] == [0, 0]


def test_a_batch_of_requests_is_formed_with_all_samples():
    made = scheduler(made=StaticBatchScheduler)
    submit(made, 3)
    assert names(plan(made)) == ["a", "a1", "a2"]


def test_a_fork_of_another_prompt_is_refused():
    made = scheduler()
    made.submit(request("a", PROMPT))
    wrong: Request = dataclasses.replace(request("b", PROMPT[:5]), fork_of="a")
    with pytest.raises(InvalidRequest, match="fork_of: is 'a', a request of another prompt"):
        made.submit(wrong)
    assert made.num_waiting == 1
    finish(made)
    made.submit(wrong)  # there is no such request any more
    assert len(finish(made)) == 8


def test_forks_of_one_that_has_ended_share_among_themselves():
    made = scheduler()
    for index in range(3):
        made.submit(dataclasses.replace(request(f"b{index}", PROMPT, max_tokens=4), fork_of="gone"))
    first, second = plan(made), plan(made)
    assert [chunk.start for chunk in second.chunks] == [10, 9, 9]
    finish(made, first, second)
