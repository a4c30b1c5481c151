"""The bucket ladder: choices worked by hand, exact filling, and the default ladder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler.buckets import (
    LARGEST_DEFAULT,
    LEAST_SAVING,
    LONGEST_DEFAULT,
    MAX_DEFAULT_BUCKETS,
    BucketCost,
    BucketLadder,
    default_sizes,
    doublings_that_pay,
)

# Measured on two CPU cores with a model of 560 million parameters, in float32 (rounded).
CPU = {2: 50.0, 4: 60.0, 8: 72.0, 16: 85.0, 32: 120.0, 64: 180.0, 128: 300.0, 256: 560.0}


def ladder(costs: dict[int, float]) -> BucketLadder:
    return BucketLadder([BucketCost(size=s, compile_seconds=1.0, milliseconds=ms) for s, ms in costs.items()])


def test_a_ladder_knows_its_sizes_and_costs():
    cpu = ladder(CPU)
    assert cpu.sizes == tuple(CPU)
    assert cpu.largest == 256
    assert cpu.cost(32) == 120.0
    assert cpu.costs[3].tokens_per_second == pytest.approx(188.2, abs=0.1)
    with pytest.raises(ValueError, match=r"no bucket of 33 tokens; the ladder is \(2, 4"):
        cpu.cost(33)


@pytest.mark.parametrize(
    ("costs", "message"),
    [({}, "empty"), ({8: 1.0, 4: 1.0}, "ascend"), ({0: 1.0}, "at least 1"), ({8: 0.0}, "bucket 8 costs 0.0 ms")],
)
def test_a_wrong_ladder_is_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        ladder(costs)


@pytest.mark.parametrize(("budget", "limit"), [(None, 256), (256, 256), (300, 256), (100, 64), (2, 2), (1, 1)])
def test_a_budget_limits_the_tokens_of_an_iteration(budget, limit):
    assert ladder(CPU).limit(budget) == limit


@pytest.mark.parametrize(("decodes", "bucket"), [(1, 2), (2, 2), (3, 4), (7, 8), (8, 8), (9, 16), (200, 256)])
def test_decodes_alone_take_the_smallest_bucket_that_holds_them(decodes, bucket):
    assert ladder(CPU).pick(decodes, 0, 256) == bucket


@pytest.mark.parametrize(
    ("decodes", "prompt", "bucket"),
    [
        (7, 1, 8),  # fits exactly
        (7, 121, 128),
        (7, 144, 128),  # 151 tokens: 128 exactly, then 30 in 32, at 420 ms; 256 would cost 560
        (7, 23, 32),  # 30 tokens: 32 at once (120) rather than 16 twice and a third iteration
        (7, 10, 16),  # 17 tokens: 16, and the last one where an 8 fits
        (7, 249, 256),
        (0, 250, 256),  # 128 + 64 + 64 would cost 660
        (0, 100, 128),  # 64 + 32 + 4 would cost 360, 128 costs 300
        (0, 68, 64),  # 64 + 4 costs 240
        (8, 1000, 256),
        (0, 100_000, 256),
    ],
)
def test_prompts_fill_the_bucket_or_end_in_little_padding(decodes, prompt, bucket):
    assert ladder(CPU).pick(decodes, prompt, 256, rows=8) == bucket


@pytest.mark.parametrize("budget", [256, 128, 16])
def test_pick_serves_decodes_prompt_and_budget(budget):
    cpu = ladder(CPU)
    for decodes in range(min(budget, 40)):
        for prompt in range(1, 300):
            bucket = cpu.pick(decodes, prompt, budget)
            assert decodes < bucket <= budget
            # Padding is only ever taken to be done with all of it at once.
            assert bucket <= decodes + prompt or bucket == min(s for s in cpu.sizes if s >= decodes + prompt)


def test_when_costs_are_flat_padding_is_cheaper_than_iterations():
    flat = ladder({8: 10.0, 64: 10.1, 512: 10.9})
    assert flat.pick(7, 70, 512) == 512


def test_when_costs_are_steep_buckets_are_filled_exactly():
    steep = ladder({8: 8.0, 16: 16.0, 32: 32.0, 64: 64.0})
    assert steep.pick(0, 50, 64) == 32
    assert steep.pick(0, 18, 64) == 16
    assert steep.pick(0, 60, 64) == 64  # 32 + 16 + 8 + 8 costs as much and takes longer


def test_a_larger_bucket_that_measured_faster_is_not_believed():
    noisy = ladder({8: 72.0, 16: 60.0, 32: 120.0})
    assert noisy.pick(8, 0, 32) == 8
    assert noisy.cost(16) == 60.0  # reports are not smoothed


def test_no_bucket_within_the_budget_takes_the_smallest():
    assert ladder({8: 72.0, 16: 85.0}).pick(3, 1, 4) == 8
    assert ladder({8: 72.0, 16: 85.0}).pick(0, 100, 4) == 8


def test_no_bucket_but_the_largest_holds_the_decodes():
    assert ladder({8: 72.0, 256: 560.0}).pick(10, 5, 256) == 256


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 12, 16, 31, 32, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("budget", [None, 1, 7, 16, 64, 256, 2048])
def test_the_default_ladder(max_rows, budget):
    sizes = default_sizes(max_rows, budget)
    assert list(sizes) == sorted(set(sizes))
    assert 1 <= len(sizes) <= MAX_DEFAULT_BUCKETS
    assert sizes[0] >= 1
    assert sizes[-1] == budget or budget is None
    assert max_rows in sizes or max_rows > sizes[-1]
    assert sizes[-1] >= max_rows or budget is not None

    finer = default_sizes(max_rows, budget, objective=True)
    assert set(sizes) <= set(finer)
    assert (finer[0], finer[-1]) == (sizes[0], sizes[-1])
    assert len(finer) < 2 * MAX_DEFAULT_BUCKETS


def test_the_default_ladder_of_eight_rows():
    assert default_sizes(8, None) == (2, 4, 8, 16, 32, 64, 128, 256)
    assert default_sizes(8, 64) == (2, 3, 5, 8, 16, 32, 64)
    assert default_sizes(8, 64, objective=True) == (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


@settings(deadline=None)
@given(
    fixed=st.floats(1e-4, 1.0), token=st.floats(1e-7, 1e-2), top=st.sampled_from([64, 256, 300, 512, 1000, 4096, 9000])
)
def test_the_ladder_goes_up_while_a_token_gets_cheaper(fixed, token, top):
    def seconds(tokens: int) -> float:
        return fixed + token * tokens

    doublings = doublings_that_pay(top, seconds)
    for step in range(doublings):
        once, twice = seconds(top << step), seconds(top << step + 1)
        assert twice <= LONGEST_DEFAULT
        assert 1 - twice / 2 / once >= LEAST_SAVING - 1e-9
    last = top << doublings
    assert last <= max(LARGEST_DEFAULT, top)
    saved = 1 - seconds(2 * last) / 2 / seconds(last)
    assert 2 * last > LARGEST_DEFAULT or seconds(2 * last) > LONGEST_DEFAULT or saved < LEAST_SAVING + 1e-9


def test_doublings_extend_the_default_ladder():
    assert default_sizes(8, None, doublings=2) == (*default_sizes(8, None), 512, 1024)
    assert default_sizes(8, None, objective=True, doublings=1)[-3:] == (256, 384, 512)
