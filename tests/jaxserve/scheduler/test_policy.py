"""The token budget that follows the load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.policy import (
    BACKLOG_ITERATIONS,
    PROMPT_ITERATIONS,
    STRETCH,
    DefaultTokenBudget,
    ObjectiveTokenBudget,
)
from tests.jaxserve.scheduler.stepping import finish, land, request, scheduler, step

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # that cost 10 ms and one more for each token
LADDER = BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in SIZES])


def pace(*, target_tpot=10.0, limit=128, batches=1, **more) -> ObjectiveTokenBudget:
    return ObjectiveTokenBudget(LADDER, max_rows=4, target_tpot=target_tpot, limit=limit, batches=batches, **more)


def test_where_nobody_decodes_nothing_is_held_back():
    assert pace(target_tpot=0.001).paced(0, 100, 0) == 128


def test_an_iteration_takes_what_the_target_allows():
    assert pace(target_tpot=0.030).paced(4, 1000, 0) == 16  # 26 ms; 32 tokens would take 42
    assert pace(target_tpot=0.045).paced(4, 1, 0) == 32
    assert pace(target_tpot=0.030).paced(12, 1000, 0) == 16


def test_a_target_out_of_reach_gives_way_to_the_default_pace():
    assert pace(target_tpot=0.030).paced(15, 1000, 0) is None  # one token an iteration, where the default takes 49
    assert pace(target_tpot=0.013).paced(1, 1000, 0) is None  # four rows take 14 ms
    assert pace(target_tpot=0.030).paced(16, 1000, 0) is None
    assert pace(target_tpot=0.001).paced(1, 1000, 0) is None


def test_the_target_counts_the_slots_that_decodes_read():
    costs = [BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n, slots_read=100) for n in SIZES]
    made = ObjectiveTokenBudget(BucketLadder(costs), max_rows=4, target_tpot=0.045, limit=128, slot_milliseconds=0.01)
    # Without the slots of the measurement a bucket takes 9 ms and one more for each token.
    assert [made.paced(4, 1000, reads) for reads in (0, 400, 401, 2000, 2700, 2801)] == [
        *(32, 32, 16, 16, 8),
        None,
    ]
    # One row is in time with a bucket of 16, whatever it reads here; four that read as much take 43 ms, or 73.
    assert [made.paced(1, 1000, reads) for reads in (750, 1500)] == [16, None]


def test_only_a_window_of_slots_is_read():
    for window, bucket in ((None, 8), (8, 16)):
        made = scheduler(
            rows=2, sizes=SIZES, blocks=256, context=128, target_tpot=0.028, slot_milliseconds=0.1, policy_window=window
        )
        made.submit(request("a", 64, max_tokens=20))
        step(made)
        made.submit(request("b", 90))
        assert step(made)[0].bucket == bucket  # 18 or 26 ms, and 6.5 or 0.8 for the slots


def test_plans_in_flight_spread_prompts_and_share_the_rows():
    # rows of each plan and their share of a prompt of 96 tokens: 1 + 48, 3 + 24, 31 + 8
    assert [pace(batches=2).paced(rows, 96, 0) for rows in (1, 3, 31)] == [64, 32, 64]
    assert pace(batches=2).paced(4, PROMPT_ITERATIONS * 28, 0) == 128  # 4 + 336 / 5
    assert pace(batches=2).paced(36, PROMPT_ITERATIONS * 28, 0) == 64  # 36 + 28
    assert pace(batches=2).paced(36, PROMPT_ITERATIONS * 60, 0) == 128  # 36 + 60, not 36 + 720 / 37
    assert [pace(batches=2).paced(16, tokens, 0) for tokens in (0, 192, 384, 1200)] == [16, 32, 64, 128]
    assert pace(target_tpot=0.060, batches=2).paced(4, 1000, 0) == 16  # a row's next token is two iterations away


@pytest.mark.parametrize("counted", [0, 3])
@pytest.mark.parametrize(
    ("target", "tokens", "length", "bucket"),
    [
        (10.0, 192, 0, 64),  # a plan's 4 rows and a fifth of the prompt
        (0.090, 1000, 50, 32),  # 42 ms and 2 for the slots of 4 rows; those of 8 would take 4
        (10.0, 0, 0, 16),  # what the decodes alone were given
    ],
)
def test_a_plan_in_flight_has_its_share_of_all_rows(target, tokens, length, bucket, counted):
    decoding = [SimpleNamespace(length=length, computed=length - 1) for _ in range(8 - counted)]
    requests: Any = SimpleNamespace(
        running=decoding, waiting_tokens=tokens, num_counted=counted, counted_slots=counted * length
    )
    plan: Any = SimpleNamespace(states=[], prompts=[], prompt_tokens=0)
    made = pace(target_tpot=target, batches=2, slot_milliseconds=0.01)
    assert made.decode_budget(requests) == 4
    assert made.prompt_budget(requests, plan, 16) == bucket


def test_the_token_budget_bounds_everything():
    assert pace(limit=16).paced(10, 1000, 0) == 16


def test_an_objective_is_above_zero():
    with pytest.raises(ValueError, match="target_tpot is 0"):
        pace(target_tpot=0.0)


def test_objective_never_cuts_decodes():
    made = scheduler(rows=8, sizes=SIZES, blocks=256, context=128, target_tpot=0.012)
    for name in "abcdef":
        made.submit(request(name, 1, max_tokens=30))
    step(made)
    assert len(step(made)[0].chunks) == 6  # in a bucket of 18 ms


def test_prompt_iterations_are_within_the_target():
    made = scheduler(sizes=SIZES, blocks=256, context=128, target_tpot=0.030)
    made.submit(request("a", 64, max_tokens=30))
    assert step(made)[0].bucket == 64  # alone, whole
    made.submit(request("b", 30, max_tokens=2))
    lengths = [[chunk.length for chunk in step(made)[0].chunks] for _ in range(3)]
    assert lengths == [[1, 15], [1, 15], [1, 1]]  # over two iterations of 26 ms, and then it decodes as well


# ---- Without an objective


def by_default(*, rows=16, limit=128, ladder=LADDER) -> DefaultTokenBudget:
    return DefaultTokenBudget(ladder, max_rows=rows, limit=limit)


def test_default_bounds_iteration_time():
    # Of 16 rows 26 ms. 13 decodes take as long; 2, 5, 8 take 12 and 18 ms, so 26 still; 17 take 42 and may take 84.
    assert [by_default().budget(rows, 20) for rows in (1, 2, 8, 13, 17)] == [16, 16, 16, 32, 64]
    assert by_default(rows=64).budget(1, 20) == 64  # 74 ms, as long as a full batch
    assert by_default(rows=2).budget(1, 20) == 8  # of two rows 12 ms, less than twice 11


def test_default_never_delays_idle_or_decodes():
    assert by_default().budget(0, 5) == 128
    assert by_default().budget(5, 0) == 128


def test_by_default_what_waits_too_long_raises_the_budget():
    assert [by_default().budget(4, BACKLOG_ITERATIONS * tokens) for tokens in (12, 13, 28, 29, 61, 500)] == [
        16,
        32,
        32,
        64,
        128,
        128,
    ]


def test_by_default_tokens_that_cost_next_to_nothing_are_taken():
    flat = BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n / 128) for n in SIZES])
    assert by_default(rows=2, ladder=flat).budget(1, 1000) == 128


def test_by_default_a_prompt_gets_on_beside_any_decodes():
    steep = BucketLadder(
        [BucketCost(size=n, compile_seconds=0.0, milliseconds=(2 * STRETCH) ** n) for n in range(1, 9)]
    )
    assert [by_default(rows=1, ladder=steep, limit=8).budget(rows, 1) for rows in range(1, 9)] == [*range(2, 9), 8]


def test_the_token_budget_bounds_the_default_too():
    assert by_default(limit=16).budget(15, 4000) == 16
    assert by_default(limit=3).budget(2, 4000) == 3  # below the smallest bucket that would do


def test_default_prompt_waits_only_for_decodes():
    made = scheduler(rows=8, sizes=SIZES, blocks=256, context=128)
    made.submit(request("a", 120, max_tokens=8))
    assert step(made)[0].bucket == 128  # alone, whole
    made.submit(request("b", 20, max_tokens=2))
    lengths = [[chunk.length for chunk in step(made)[0].chunks] for _ in range(4)]
    assert lengths == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_what_is_cut_at_fixed_places_is_not_paced():
    made = scheduler(sizes=(32,), blocks=256, context=128, fixed_chunk=28, policy="reserve")
    made.submit(request("a", 4, max_tokens=30))
    step(made)
    made.submit(request("b", 28, max_tokens=2))
    assert [chunk.length for chunk in step(made)[0].chunks] == [1, 28]


def test_a_batch_of_requests_is_not_paced():
    made = scheduler(sizes=(1, 2, 4, 32), blocks=256, context=128, static=True)
    for name, length in (("a", 1), ("b", 62)):
        made.submit(request(name, length, max_tokens=4))
    lengths = [[chunk.length for chunk in step(made)[0].chunks] for _ in range(2)]
    assert lengths == [[1, 31], [1, 31]]


def test_in_flight_iterations_pace_prompts():
    made = scheduler(rows=4, sizes=SIZES, blocks=256, context=128, n_stages=2, in_flight=2)
    for name in "abcd":
        made.submit(request(name, 1, max_tokens=50))
    decodes = made.schedule()
    assert decodes is not None
    made.submit(request("e", 30))
    beside = made.schedule()
    assert beside is not None
    assert (len(decodes.chunks), [chunk.length for chunk in beside.chunks]) == (4, [8])  # no decode is in it


# ---- In the scheduler, with an objective


def test_rows_move_to_the_batch_with_fewer():
    made = scheduler(rows=8, sizes=SIZES, blocks=256, context=128, target_tpot=10.0, n_stages=2, in_flight=2)
    for index in range(8):
        made.submit(request(chr(ord("a") + index), 1, max_tokens=50))
    first = made.schedule()
    assert first is not None
    assert len(first.chunks) == 8
    finished = [event for event in land(made, first) if event.finish_reason]
    second, third = made.schedule(), made.schedule()
    assert second is not None
    assert third is not None
    assert [len(second.chunks), len(third.chunks)] == [4, 4]
    assert made.schedule() is None  # two are in flight
    assert not finished
    finish(made, second, third)


@pytest.mark.parametrize("wrong", [3, -1])
def test_too_many_in_flight_are_refused(wrong):
    with pytest.raises(ValueError, match=f"in_flight is {wrong}; with 1 stages it must be from 1 to 2"):
        scheduler(in_flight=wrong)
