"""The token budget that follows the load."""

from __future__ import annotations

import pytest

from jaxserve.scheduling.buckets import BucketCost, BucketLadder
from jaxserve.scheduling.pacing import PROMPT_ITERATIONS, Pace
from tests.jaxserve.scheduling.test_scheduler import finish, request, scheduler, step

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # that cost 10 ms and one more for each token
LADDER = BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in SIZES])


def pace(*, target_tpot=10.0, limit=128, batches=1) -> Pace:
    return Pace(LADDER, target_tpot=target_tpot, limit=limit, batches=batches)


def test_where_nobody_decodes_a_prompt_is_not_spread():
    assert pace().budget(0, 100) == 128


def test_the_more_rows_decode_the_more_iterations_a_prompt_is_spread_over():
    # rows and their share of a prompt of 96 tokens: 1 + 48, 3 + 24, 31 + 8
    assert [pace().budget(rows, 96) for rows in (1, 3, 31)] == [64, 32, 64]
    assert pace().budget(4, PROMPT_ITERATIONS * 28) == 128  # 4 + 336 / 5
    assert pace().budget(36, PROMPT_ITERATIONS * 28) == 64  # 36 + 28


def test_what_waits_raises_the_budget():
    assert [pace().budget(16, tokens) for tokens in (0, 192, 384, 1200)] == [16, 32, 64, 128]


def test_batches_in_flight_take_equal_shares_of_the_rows():
    assert [pace(batches=batches).budget(64, 0) for batches in (1, 2, 4)] == [64, 32, 16]
    assert pace(batches=2).budget(3, 0) == 2


def test_the_objective_bounds_an_iteration_but_not_below_the_decodes():
    assert pace(target_tpot=0.030).budget(4, 1000) == 16  # 26 ms; 32 tokens would take 42
    assert pace(target_tpot=0.060, batches=2).budget(4, 1000) == 16  # a row's next token is two iterations away
    assert pace(target_tpot=0.030).budget(40, 1000) == 64
    assert pace(target_tpot=0.001).budget(0, 1000) == 1  # no bucket is as quick as that


def test_the_token_budget_bounds_everything():
    assert pace(limit=16).budget(40, 1000) == 16


def test_an_objective_is_above_zero():
    with pytest.raises(ValueError, match="target_tpot is 0"):
        pace(target_tpot=0.0)


def test_a_prompt_is_spread_while_another_request_decodes():
    made = scheduler(sizes=SIZES, blocks=256, context=128, target_tpot=10.0)
    made.submit(request("a", 4, max_tokens=30))
    assert step(made)[0].bucket == 4  # alone, whole
    made.submit(request("b", 30, max_tokens=2))
    lengths = [[chunk.length for chunk in step(made)[0].chunks] for _ in range(3)]
    assert lengths == [[1, 15], [1, 15], [1, 1]]  # over two iterations, and then it decodes as well


def test_a_fixed_budget_lets_the_prompt_through_at_once():
    made = scheduler(sizes=SIZES, blocks=256, context=128)
    made.submit(request("a", 4, max_tokens=30))
    step(made)
    made.submit(request("b", 31, max_tokens=2))
    assert [chunk.length for chunk in step(made)[0].chunks] == [1, 31]


def test_rows_move_to_the_batch_with_fewer():
    made = scheduler(rows=8, sizes=SIZES, blocks=256, context=128, target_tpot=10.0, n_stages=2, in_flight=2)
    for index in range(8):
        made.submit(request(chr(ord("a") + index), 1, max_tokens=50))
    first = made.schedule()
    assert first is not None
    assert len(first.chunks) == 8
    finished = finish_one(made, first)
    second, third = made.schedule(), made.schedule()
    assert second is not None
    assert third is not None
    assert [len(second.chunks), len(third.chunks)] == [4, 4]
    assert made.schedule() is None  # two are in flight
    assert not finished
    finish(made, second, third)


def finish_one(made, plan):
    from tests.jaxserve.scheduling.test_scheduler import answer

    return [event for event in made.complete(plan, answer(plan)) if event.finish_reason]


@pytest.mark.parametrize("wrong", [3, -1])
def test_more_iterations_in_flight_than_there_is_room_for_are_refused(wrong):
    with pytest.raises(ValueError, match=f"in_flight is {wrong}; with 1 stages it must be from 1 to 2"):
        scheduler(in_flight=wrong)
