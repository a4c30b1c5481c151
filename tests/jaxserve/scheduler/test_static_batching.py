"""Request-level batching, the baseline that Orca compares itself with."""

from __future__ import annotations

import pytest

from jaxserve.request import FinishReason
from tests.jaxserve.scheduler.stepping import names, request, scheduler, step


def test_a_batch_begins_and_ends_as_one():
    made = scheduler(rows=2, static=True)
    made.submit(request("a", 2, max_tokens=1))
    made.submit(request("b", 2, max_tokens=3))
    made.submit(request("c", 2, max_tokens=1))
    plan, events = step(made)
    assert (names(plan), events) == (["a", "b"], [])
    with pytest.raises(ValueError, match="in use"):
        made.submit(request("a"))  # its answer is not out yet
    for _ in range(2):
        assert made.num_waiting == 1
        plan, events = step(made)
        assert names(plan) == []
    assert [(e.request_id, e.finish_reason) for e in events] == [
        ("a", FinishReason.LENGTH),
        ("b", None),
        ("b", None),
        ("b", FinishReason.LENGTH),
    ]
    assert names(step(made)[0]) == ["c"]
    assert not made.has_work


def test_later_requests_wait_for_the_next_batch():
    made = scheduler(rows=2, static=True)
    made.submit(request("a", 2, max_tokens=2))
    assert names(step(made)[0]) == ["a"]
    made.submit(request("b", 2, max_tokens=2))
    assert names(step(made)[0]) == []
    assert names(step(made)[0]) == ["b"]


def test_admission_takes_several_iterations():
    made = scheduler(rows=2, sizes=(1, 2, 4), static=True)
    for name in "ab":
        made.submit(request(name, 4))
    assert names(step(made)[0]) == ["a"]
    assert names(step(made)[0]) == ["b"]


def test_a_full_pool_closes_the_batch():
    made = scheduler(rows=3, blocks=6, policy="reserve", context=24, static=True)
    made.submit(request("a", 4, max_tokens=1))  # 2 blocks
    made.submit(request("b", 4, max_tokens=8))  # 3 blocks
    made.submit(request("c", 4, max_tokens=4))  # 2 blocks: not now
    assert names(step(made)[0]) == ["a", "b"]
    while made.requests.num_running:
        assert names(step(made)[0]) == []  # though a's blocks and row are free at once
    assert names(step(made)[0]) == ["c"]


def test_abort_releases_held_events():
    made = scheduler(rows=3, static=True)
    for name, most in (("a", 1), ("b", 1), ("c", 5)):
        made.submit(request(name, 2, max_tokens=most))
    assert step(made)[1] == []
    ((_, event),) = made.abort("a")  # finished, but held back
    assert event.finish_reason == FinishReason.ABORTED
    assert made.abort("a") == []
    (_, last), (_, held) = made.abort("c")  # the last that ran
    assert (last.request_id, last.finish_reason) == ("c", FinishReason.ABORTED)
    assert (held.request_id, held.finish_reason) == ("b", FinishReason.LENGTH)
    assert not made.has_work
