"""Calls that would wait too long are refused, by an estimate of their wait."""

import pytest

from server.errors import ApiError, ErrorKind
from tests.server.admission_model import Engine, ask, loaded, refusal, waits


def test_calls_that_would_wait_too_long_are_refused() -> None:
    engine = loaded(max_queue_seconds=5.0, order="fcfs")
    admission = engine.admission()
    waits(engine, admission, 400)  # 2.5 s until a row is free
    waits(engine, admission, 400)  # 11 s of work, two requests and four rows: 11 * 2 / 5 = 4.4 s
    refused = refusal(admission)
    assert (refused.kind, str(refused)) == (ErrorKind.QUEUE_FULL, "waiting takes about 6.0 s; the limit is 5 s")
    full = admission.full()
    assert full is not None
    assert full.kind is ErrorKind.QUEUE_FULL
    engine.counts.outstanding_tokens = 400
    ask(admission)
    assert admission.full() is None


def test_the_wait_counts_the_work_of_those_ahead() -> None:
    engine = loaded(order="fcfs", max_queue_seconds=1000.0)
    admission, counts = engine.admission(), engine.counts
    for _ in range(6):  # nearly all of the work that is left is that of those who wait
        engine.take(ask(admission, prompt_tokens=100, new_tokens=400))
    counts.outstanding_tokens, counts.prefill_tokens = 3040, 600
    for _ in range(60):
        engine.now += 0.5
        counts.generated_tokens += 50
        wait = admission.retry_seconds()
        admission.sample()
    assert wait == pytest.approx((600 + 6 * 400) / 100, rel=0.01)


def test_the_margin_over_the_estimate_follows_the_waits() -> None:
    engine = loaded(max_queue_seconds=15.0, order="fcfs")
    admission = engine.admission()

    def outcome(seconds: float) -> None:
        ticket = ask(admission)
        engine.take(ticket)
        engine.now += seconds
        engine.begin(ticket)
        engine.now += 20
        ticket.started()  # another token
        engine.counts.generated_tokens += 400 * (seconds + 20)

    waits(engine, admission, 400)
    engine.counts.waiting = 7
    estimate = 4400 / 400 * 8 / 11
    for _ in range(10):
        outcome(1.4 * estimate)  # longer than estimated, within the limit
    ask(admission).release()  # says nothing
    engine.counts.waiting = 15
    assert "the limit is 15 s" in str(refusal(admission))  # 9.3 s are estimated
    engine.counts.waiting = 7
    for _ in range(60):
        outcome(0.5 * estimate)
    engine.counts.waiting = 15
    ask(admission)


def test_prompts_wait_for_each_other_even_where_rows_are_free() -> None:
    engine = Engine(max_queue_seconds=5.0)
    admission = engine.admission()
    engine.counts.running, engine.counts.prefill_tokens = 1, 4000  # of one request that has begun
    waits(engine, admission, 900)
    engine.counts.prefill_tokens += 900
    ask(admission, prompt_tokens=200)  # 4.9 s; it is reserved from now on
    assert str(refusal(admission, prompt_tokens=2000)) == "waiting takes about 5.1 s; the limit is 5 s"
    ask(admission)  # goes before the waiting ones
    engine.counts.prefill_tokens = 900
    ask(admission, prompt_tokens=2000)
    engine = loaded(max_queue_seconds=5.0)
    admission = engine.admission()
    engine.counts.prefill_tokens, engine.counts.outstanding_tokens = 4000, 4001
    engine.counts.running = 40
    ask(admission, prompt_tokens=1010)  # a row is soon free, and prompts take 4 s
    assert str(refusal(admission, prompt_tokens=2000)) == "waiting takes about 5.0 s; the limit is 5 s"


def test_the_limit_is_the_target_for_the_first_token() -> None:
    for limits, admits in (
        ({}, True),
        ({"target_ttft": 2.0}, False),
        ({"target_ttft": 2.0, "max_queue_seconds": 60.0}, True),
    ):
        admission = loaded(**limits).admission()
        if admits:
            ask(admission)
        else:
            assert "the limit is 2 s" in str(refusal(admission))


def test_long_prompts_are_refused_before_short_ones() -> None:
    """Those go before the long ones that wait, so they do not wait for them."""
    for order, refuses in (("slo", False), ("fcfs", True)):
        engine = loaded(max_queue_seconds=5.0, target_ttft=30.0, order=order)
        admission = engine.admission()
        for _ in range(2):
            waits(engine, admission, 400)
        if refuses:
            refusal(admission, prompt_tokens=10)
        else:
            ask(admission, prompt_tokens=10)
        refusal(admission, prompt_tokens=500)


def test_nobody_waits_where_a_row_is_free() -> None:
    engine = Engine()
    engine.counts.running, engine.counts.outstanding_tokens = 3, 10_000
    assert engine.admission().retry_seconds() == pytest.approx(0.1)


def test_predicted_wait() -> None:
    engine = Engine(max_queued_requests=8)
    admission = engine.admission()
    counts = engine.counts
    counts.running, counts.waiting, counts.outstanding_tokens = 4, 8, 6000
    first = refusal(admission).retry_after
    assert first == pytest.approx(6000 / 400 * 9 / 12)  # 4 rows a 10 ms as measured at start
    for _ in range(60):  # in fact it does half of that
        engine.now += 0.5
        counts.generated_tokens += 100
        last = refusal(admission).retry_after
    assert last == pytest.approx(2 * first, rel=0.01)
    engine.now += 3600  # nobody was there to be refused for an hour: that says nothing of the engine
    assert refusal(admission).retry_after == last
    for _ in range(200):  # and requests come to generate a quarter of what they might
        admission.finished(25, 100)
    assert refusal(admission).retry_after == pytest.approx(first / 2, rel=0.01)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    engine = Engine()
    admission = engine.admission()
    engine.counts.running, engine.counts.waiting, engine.counts.outstanding_tokens = 4, 4, 4000
    wait = 4000 / 400 * 5 / 8
    late = refusal(admission, deadline=engine.now + wait - 0.1)
    assert late.kind is ErrorKind.TOO_LATE
    ask(admission, deadline=engine.now + wait + 1.3)
    engine.counts.waiting = engine.counts.running = 0
    admission = engine.admission()
    assert refusal(admission, new_tokens=200, exactly=True, deadline=engine.now + 1.9).kind is ErrorKind.TOO_LATE
    ask(admission, new_tokens=200, exactly=True, deadline=engine.now + 2.1)
    ask(admission, new_tokens=200, deadline=engine.now + 1.0)  # it may end early
    for _ in range(200):
        admission.finished(150, 200)
    assert refusal(admission, new_tokens=200, deadline=engine.now + 1.0).kind is ErrorKind.TOO_LATE


def test_prompt_too_long_for_the_deadline() -> None:
    engine = Engine()
    admission = engine.admission()
    ask(admission, prompt_tokens=8000, deadline=engine.now + 3).correct(2000)
    with pytest.raises(ApiError) as caught:
        ask(admission, prompt_tokens=8000, deadline=engine.now + 3).correct(4000)
    assert caught.value.kind is ErrorKind.TOO_LATE


def test_an_engine_that_stands_still_is_not_a_slow_one() -> None:
    """As one does that is stopped or started again while callers wait."""
    engine = Engine()
    admission = engine.admission()
    engine.counts.running, engine.counts.waiting, engine.counts.outstanding_tokens = 4, 20, 2_000
    for _ in range(20):
        engine.now += 0.5
        engine.counts.generated_tokens += 200
        admission.sample()
    before = admission.retry_seconds()
    for _ in range(60):
        engine.now += 0.5
        admission.sample()
        assert admission.retry_seconds() == before
    ask(admission, deadline=engine.now + 3 * before).release()
