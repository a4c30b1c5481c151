"""Who goes first: arrival, or short prompts before long ones with a bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.order import (
    LONGEST_PATIENCE,
    PATIENCE,
    PRIORITY_SECONDS,
    USUAL_TARGET,
    ArrivalOrder,
    ObjectiveOrder,
    make_order,
)
from tests.jaxserve.scheduler.stepping import request, scheduler, step

# A prompt token takes 10 ms in the largest bucket.
LADDER = BucketLadder([BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 * n) for n in (4, 16)])
REQUESTS = st.lists(
    st.tuples(st.floats(0, 100), st.integers(-2, 2), st.integers(1, 60)), min_size=2, max_size=12, unique=True
)


def served(order, requests) -> list[tuple[float, int, int]]:
    """The requests in the order in which the scheduler starts them, one at a time."""
    made = scheduler(rows=1, sizes=(4, 64), context=64, order=order)
    for index, (arrival, priority, length) in enumerate(requests):
        made.submit(request(chr(97 + index), length, arrival=arrival, priority=priority, max_tokens=1))
    begun = []
    while made.has_work:
        plan, _ = step(made)
        begun += [requests[ord(each.request_id) - 97] for each in plan.admissions]
    return begun


def test_short_prompts_go_first_by_their_seconds():
    order = ObjectiveOrder(LADDER, target_ttft=1.0)
    assert order.bound == LONGEST_PATIENCE
    assert order.key(5.0, 0, 10) == pytest.approx(5.0 + PATIENCE * 0.1)
    assert served(order, [(0.0, 0, 12), (0.0, 0, 4), (9.0, 0, 2), (11.6, 0, 1), (0.5, 0, 12)]) == [
        (0.0, 0, 4),
        (9.0, 0, 2),
        (0.0, 0, 12),
        (0.5, 0, 12),
        (11.6, 0, 1),
    ]


def test_what_the_prefix_cache_holds_does_not_count():
    order = ObjectiveOrder(LADDER, target_ttft=10.0)
    made = scheduler(rows=1, sizes=(4, 64), context=64, order=order)
    prompt = tuple(range(100, 140))
    made.submit(request("a", prompt, max_tokens=1))
    while made.has_work:
        step(made)
    made.submit(request("long", prompt, arrival=1.0, max_tokens=1))  # 4 of its 40 tokens are to be computed
    made.submit(request("short", 12, arrival=1.0, max_tokens=1))
    plan, _ = step(made)
    assert [each.request_id for each in plan.admissions] == ["long"]


@settings(deadline=None)
@given(REQUESTS)
def test_nobody_is_passed_by_later_than_the_bound(requests):
    order = ObjectiveOrder(LADDER, target_ttft=1.0)
    begun = served(order, requests)
    for place, (arrival, priority, length) in enumerate(begun):
        for earlier, other, _ in begun[:place]:
            if other == priority:
                assert earlier <= arrival + min(PATIENCE * 0.01 * length, LONGEST_PATIENCE) + 1e-6


@settings(deadline=None)
@given(REQUESTS, st.booleans())
def test_priorities_stay_above_the_order(requests, by_objective):
    order = ObjectiveOrder(LADDER, target_ttft=1.0) if by_objective else ArrivalOrder()
    begun = served(order, requests)
    for place, (arrival, priority, _) in enumerate(begun):
        for earlier, other, _ in begun[:place]:
            assert other >= priority or earlier <= arrival - PRIORITY_SECONDS * (priority - other) + 1e-6


@settings(deadline=None)
@given(REQUESTS)
def test_by_arrival_nobody_is_passed_by(requests):
    begun = served(ArrivalOrder(), requests)
    keys = [arrival - PRIORITY_SECONDS * priority for arrival, priority, _ in begun]
    assert keys == sorted(keys)


def test_the_order_follows_the_settings():
    made = make_order(EngineConfig(), LADDER)
    assert isinstance(made, ObjectiveOrder)
    assert made.bound == LONGEST_PATIENCE * USUAL_TARGET
    aimed = make_order(EngineConfig(target_ttft=0.5), LADDER)
    assert isinstance(aimed, ObjectiveOrder)
    assert aimed.bound == LONGEST_PATIENCE * 0.5
    for config in (EngineConfig(order="fcfs"), EngineConfig(scheduler="request")):
        assert isinstance(make_order(config, LADDER), ArrivalOrder)
