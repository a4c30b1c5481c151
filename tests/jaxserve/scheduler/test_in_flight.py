"""Plans made before the answers of earlier ones are known."""

from __future__ import annotations

from collections import deque

import pytest

from jaxserve.iteration import Chunk
from jaxserve.request import FinishReason
from tests.jaxserve.scheduler.stepping import answer, land, names, request, scheduler, step


def test_two_plans_in_flight_and_no_more():
    made = scheduler()
    made.submit(request("a", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    assert (first.sequence, second.sequence) == (0, 1)
    assert second.chunks == (Chunk(0, 4, 1, True),)  # its token is not known here yet
    assert made.schedule() is None
    land(made, first)
    assert made.schedule() is not None


def test_plans_complete_in_order():
    made = scheduler()
    made.submit(request("a", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(AssertionError, match="plan 1 completed before 0"):
        land(made, second)


def test_row_is_free_at_max_tokens():
    made = scheduler(rows=1)
    made.submit(request("a", 4, max_tokens=2))
    made.submit(request("b", 4, max_tokens=1))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    land(made, first)
    third = made.schedule()
    assert third is not None
    assert (names(third), third.admissions[0].row) == (["b"], 0)  # while a's last token is in flight on the same row
    assert made.requests.num_running == 2
    (event,) = land(made, second)
    assert (event.request_id, event.finish_reason) == ("a", FinishReason.LENGTH)
    (event,) = land(made, third)
    assert (event.request_id, event.finish_reason) == ("b", FinishReason.LENGTH)
    assert not made.has_work


def test_a_stop_found_late_discards_one_token():
    made = scheduler(rows=1, eos_token_ids=frozenset({2}))
    made.submit(request("a", 3))
    made.submit(request("b", 4))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    (event,) = land(made, first, answer(first, [2]))
    assert event.finish_reason == FinishReason.EOS
    assert made.pool.slots_used == 0
    third = made.schedule()  # b takes row and blocks while a's discarded chunk is in flight
    assert third is not None
    assert third.admissions[0].request_id == "b"
    assert land(made, second) == []
    assert land(made, third)[0].request_id == "b"


def test_discarded_write_is_not_published():
    # Position 3, the end-of-sequence token, is being computed in vain by the second plan: it would fill block 0.
    made = scheduler(rows=1, eos_token_ids=frozenset({2}))
    made.submit(request("a", (4, 5, 6)))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    assert second.chunks == (Chunk(0, 3, 1, True),)
    land(made, first, answer(first, [2]))
    made.submit(request("b", (4, 5, 6, 2, 8)))
    third = made.schedule()
    assert third is not None
    assert third.admissions[0].blocks == ()
    land(made, second)
    assert made.pool.blocks.num_cached == 0
    land(made, third)
    assert made.pool.blocks.num_cached == 1


def test_publication_waits_for_completion():
    made = scheduler(sizes=(1, 2, 4, 8))
    made.submit(request("a", range(8)))
    first = made.schedule()
    made.submit(request("b", range(10)))
    second = made.schedule()
    assert first is not None
    assert second is not None
    assert second.admissions[0].blocks == ()
    land(made, first)
    land(made, second)
    made.submit(request("c", range(10)))
    assert step(made)[0].admissions[0].blocks == (0, 1)


def test_stages_hold_disjoint_rows():
    made = scheduler(rows=2, n_stages=2)
    for name in "abcdefg":
        made.submit(request(name, 2, max_tokens=3))
    plans = deque(made.schedule() for _ in range(3))
    assert [names(plan) for plan in plans if plan] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert made.schedule() is None
    first = plans.popleft()
    assert first is not None
    land(made, first)
    plan = made.schedule()
    assert plan is not None
    assert [chunk.row for chunk in plan.chunks] == [0, 1]
    assert made.num_waiting == 1


def test_stages_free_an_aborted_row_on_completion():
    made = scheduler(rows=1, n_stages=2)
    made.submit(request("a", 2))
    first = made.schedule()
    assert first is not None
    made.abort("a")
    made.submit(request("b", 2))
    second = made.schedule()
    assert second is not None
    assert second.chunks[0].row == 1
    assert land(made, first) == []
    made.submit(request("c", 2))
    third = made.schedule()
    assert third is not None
    assert third.chunks[0].row == 0
