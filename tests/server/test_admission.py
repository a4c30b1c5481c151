"""How many requests and tokens may wait, and how fast a tenant may send them."""

import pytest

from server.auth import ANYBODY
from server.errors import ApiError, ErrorKind
from tests.server.admission_model import Engine, ask, refusal


def test_requests_are_counted_from_the_moment_they_are_granted() -> None:
    engine = Engine(max_queued_requests=3)
    admission = engine.admission()
    tickets = [ask(admission), ask(admission, requests=2)]
    assert refusal(admission).kind is ErrorKind.QUEUE_FULL
    for ticket in tickets:
        engine.take(ticket)  # now the engine counts them: nothing is counted twice, nothing is forgotten
    assert refusal(admission).kind is ErrorKind.QUEUE_FULL
    engine.begin(tickets[0])
    ask(admission)
    assert refusal(admission).kind is ErrorKind.QUEUE_FULL


def test_tokens_are_counted_at_most_and_then_as_they_are() -> None:
    engine = Engine(max_queued_tokens=100)
    admission = engine.admission()
    ticket = ask(admission, prompt_tokens=90)
    assert refusal(admission, prompt_tokens=20).kind is ErrorKind.QUEUE_FULL
    ticket.correct(30)
    other = ask(admission, prompt_tokens=70)
    assert refusal(admission, prompt_tokens=1).kind is ErrorKind.QUEUE_FULL
    engine.take(ticket)
    assert refusal(admission, prompt_tokens=1).kind is ErrorKind.QUEUE_FULL
    other.release()
    assert engine.counts.waiting_tokens == 30
    ask(admission, prompt_tokens=70)


def test_a_prompt_over_the_bound_is_taken_by_an_empty_queue() -> None:
    admission = Engine(max_queued_tokens=100).admission()
    ask(admission, prompt_tokens=1000).release()
    ask(admission)
    assert refusal(admission, prompt_tokens=1000).kind is ErrorKind.QUEUE_FULL


@pytest.mark.parametrize("ending", ["before", "waiting", "begun", "twice"])
def test_everything_granted_comes_back_however_it_ends(ending: str) -> None:
    engine = Engine(max_queued_requests=2, max_queued_tokens=50)
    admission = engine.admission()
    for _ in range(100):
        ticket = ask(admission, requests=2, prompt_tokens=40)
        ticket.correct(17)
        if ending != "before":
            engine.take(ticket)
            engine.counts.waiting = engine.counts.waiting_tokens = 0
        if ending in ("begun", "twice"):
            ticket.started()
        ticket.release()
        if ending == "twice":
            ticket.release()
        assert (admission.reserved_requests, admission.reserved_tokens) == (0, 0)
        assert not admission._waiting


def test_kept_places() -> None:
    engine = Engine(max_queued_requests=10, max_queued_tokens=1000)
    admission = engine.admission()
    ticket = admission.admit(ANYBODY, requests=8, prompt_tokens=800, new_tokens=100)
    ticket.keep()
    ticket.keep()
    assert (admission.reserved_requests, admission.kept_requests, admission.kept_tokens) == (0, 8, 800)
    in_time = admission.admit(ANYBODY, requests=2, prompt_tokens=100, new_tokens=1, deadline=engine.now + 0.5)
    in_time.release()
    with pytest.raises(ApiError, match="8 requests are waiting") as refused:
        admission.admit(ANYBODY, requests=3, prompt_tokens=1, new_tokens=1)
    assert refused.value.kind is ErrorKind.QUEUE_FULL
    with pytest.raises(ApiError, match="800 tokens are waiting"):
        admission.admit(ANYBODY, requests=1, prompt_tokens=201, new_tokens=1)
    ticket.release()
    ticket.release()
    assert (admission.kept_requests, admission.kept_tokens) == (0, 0)
    assert not admission._waiting


def test_outstanding_seconds_follow_costs_and_answer_lengths() -> None:
    engine = Engine()
    admission = engine.admission()
    assert admission.outstanding_seconds() == 0
    engine.counts.prefill_tokens, engine.counts.outstanding_tokens = 500, 500 + 4 * 200
    assert admission.outstanding_seconds() == pytest.approx(500 / 1000 + 200 * 0.01)
    for _ in range(200):
        admission.finished(50, 100)
    assert admission.outstanding_seconds() == pytest.approx(500 / 1000 + 200 * 0.01 / 2, rel=1e-3)
