"""Requests that give up their blocks for those before them."""

from __future__ import annotations

from collections import deque

from jaxserve.iteration import Chunk
from jaxserve.request import FinishReason
from tests.jaxserve.scheduler.stepping import answer, crowded, finish, land, names, request, scheduler, step


def test_the_latest_is_preempted_and_resumes_where_it_was():
    made = crowded()
    _, events = step(made, [11, 21])
    assert [e.request_id for e in events] == ["a", "b"]
    step(made, [12, 22])  # position 3
    plan, events = step(made, [13])  # position 4: a takes the last block, b needs one and is the latest
    assert [chunk.row for chunk in plan.chunks] == [0]
    assert (made.requests.num_running, made.num_waiting, made.waiting_tokens) == (1, 1, 5)
    tokens, admissions = [], []
    while made.has_work:
        plan, events = step(made)
        admissions += plan.admissions
        tokens += [e.token_ids[0] for e in events if e.request_id == "b"]
    (admission,) = admissions
    assert admission.request_id == "b"
    assert admission.tokens[3:] == (21, 22)
    assert admission.prompt_length == 3
    assert len(tokens) == 4


def test_a_token_in_flight_at_preemption_is_kept():
    made = crowded()
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    land(made, first, answer(first, [11, 21]))
    third = made.schedule()
    assert third is not None
    assert [chunk.row for chunk in third.chunks] == [0]
    assert (made.num_waiting, made.waiting_tokens) == (1, 5)  # the one in flight counted
    events = land(made, second, answer(second, [12, 22]))
    assert [(e.request_id, e.token_ids) for e in events] == [("a", (12,)), ("b", (22,))]
    assert made.waiting_tokens == 5
    events += finish(made, third)
    assert sum(e.request_id == "b" for e in events) == 5


def test_preempted_request_ends_in_flight():
    made = crowded(eos_token_ids=frozenset({2}))
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    land(made, first)
    assert made.schedule() is not None
    events = land(made, second, answer(second, [7, 2]))
    assert events[1].finish_reason == FinishReason.EOS
    assert (made.num_waiting, made.requests.num_running) == (0, 1)
    assert made.abort("b") == []


def test_a_preempted_request_is_not_overtaken():
    made = crowded()
    first, second = made.schedule(), made.schedule()
    assert first is not None
    assert second is not None
    land(made, first)
    third = made.schedule()  # preempts b; a row and two blocks are free
    assert third is not None
    made.submit(request("c", 1, max_tokens=1))
    land(made, second)
    order = []
    in_flight = deque([third])
    while made.has_work:
        plan = made.schedule()
        if plan is not None:
            order += names(plan)
            in_flight.append(plan)
        if plan is None or len(in_flight) > 1:
            done = in_flight.popleft()
            land(made, done)
    assert order == ["b", "c"]


def test_blocks_about_to_come_back_are_waited_for():
    made = scheduler(blocks=4, block_size=2, sizes=(1, 2, 4, 8), context=8)
    made.submit(request("a", 4, max_tokens=4))
    made.submit(request("b", 3, max_tokens=1))
    first = made.schedule()  # samples a's first token and b's only one
    assert first is not None
    assert made.schedule() is None  # a needs a block; b ends with the plan in flight
    land(made, first)
    plan = made.schedule()
    assert plan is not None
    assert plan.chunks == (Chunk(0, 4, 1, True),)
