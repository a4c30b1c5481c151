"""Who is let in, on a clock of our own and with an engine that is four numbers."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from server.admission import AdmissionController, Ticket
from server.auth import ANYBODY, Tenant, current
from server.errors import ApiError, ErrorKind


class Engine:
    """Four rows; 10 ms an iteration of decodes, 1,000 prompt tokens a second."""

    def __init__(self, **limits: Any) -> None:
        self.config = EngineConfig(max_rows=4, **limits)
        cost = SimpleNamespace(size=10, milliseconds=10.0, tokens_per_second=1000.0)
        self.report = SimpleNamespace(buckets=(cost,))
        self.now = 50.0
        self.counts = SimpleNamespace(
            running=0,
            waiting=0,
            waiting_tokens=0,
            outstanding_tokens=0,
            prefill_tokens=0,
            prompt_tokens=0,
            generated_tokens=0,
        )

    def load(self) -> Any:
        return self.counts

    def admission(self, *tenants: Tenant) -> AdmissionController:
        named = {tenant.name: tenant for tenant in tenants}
        return AdmissionController(self, tenants=lambda: named, clock=lambda: self.now)  # pyright: ignore[reportArgumentType]

    def take(self, ticket: Ticket) -> None:
        """Counts a ticket's requests as waiting, as the engine does from `submit` on."""
        self.counts.waiting += ticket.requests
        self.counts.waiting_tokens += ticket.tokens
        ticket.submitted()

    def begin(self, ticket: Ticket) -> None:
        self.counts.waiting -= ticket.requests
        self.counts.waiting_tokens -= ticket.tokens
        ticket.started()


def ask(admission: AdmissionController, tenant: Tenant = ANYBODY, **changes: Any) -> Ticket:
    return admission.admit(tenant, **{"requests": 1, "prompt_tokens": 10, "new_tokens": 100} | changes)


def refusal(admission: AdmissionController, tenant: Tenant = ANYBODY, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(admission, tenant, **changes)
    return caught.value


# Bounds


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


# Waits


def loaded(**limits: Any) -> Engine:
    """An engine whose rows are all in use for another 10 s, at 400 tokens a second."""
    engine = Engine(**limits)
    engine.counts.running, engine.counts.outstanding_tokens = 4, 4000
    return engine


def waits(engine: Engine, admission: AdmissionController, prompt_tokens: int, tenant: Tenant = ANYBODY) -> None:
    """A request of this length begins to wait; its answer is of no length."""
    engine.take(ask(admission, tenant, prompt_tokens=prompt_tokens, new_tokens=0))
    engine.counts.outstanding_tokens += prompt_tokens


def test_calls_that_would_wait_longer_than_the_limit_are_refused() -> None:
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


def test_until_those_ahead_have_started_as_much_is_computed_as_they_bring() -> None:
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


def test_the_limit_is_the_target_for_the_first_token_if_there_is_one() -> None:
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


# Tenants

SMALL, LARGE = Tenant(name="small", share=1), Tenant(name="large", share=3)


def test_a_contended_queue_is_shared_out() -> None:
    engine = Engine(max_queued_requests=40)
    admission = engine.admission(SMALL, LARGE)
    for _ in range(21):  # the small one alone may have half of the queue, and no more
        engine.take(ask(admission, SMALL))
    assert "small already has its share" in str(refusal(admission, SMALL))
    for _ in range(19):
        engine.take(ask(admission, LARGE))
    assert "40 requests are waiting" in str(refusal(admission, LARGE))


@pytest.mark.parametrize("order", ["fcfs", "slo"])
def test_a_tenant_waits_for_others_as_much_as_their_shares_allow(order: str) -> None:
    engine = loaded(max_queue_seconds=8.0, order=order)
    admission = engine.admission(SMALL, LARGE)
    for _ in range(4):
        waits(engine, admission, 400, SMALL)
    assert "waiting takes about 8.8 s" in str(refusal(admission, SMALL, prompt_tokens=400))  # 14 s of work, 5 of 8
    waits(engine, admission, 400, LARGE)  # nothing of the large one waits: it is next
    # Before its second call go its first and a third as much of the small one's: not 4 requests, but 0.
    assert admission._behind(LARGE, 1e9).tokens == 1600 - 133
    assert admission._behind(SMALL, 1e9).tokens == 0  # four of its own, and the large one may have three times as much
    ask(admission, LARGE)


def test_answers_of_those_who_wait_behind_are_not_waited_for() -> None:
    """Seven requests of another tenant generate up to 100 tokens each; a call waits for the rows alone."""
    engine = loaded(max_queue_seconds=60.0)
    admission = engine.admission(SMALL, LARGE)
    for _ in range(7):
        engine.take(ask(admission, SMALL, prompt_tokens=10, new_tokens=100))
        engine.counts.outstanding_tokens += 110
    late = {tenant.name: admission._wait(engine.load(), tenant, 1e9) for tenant in (SMALL, LARGE)}
    assert late["large"] == pytest.approx(4000 / 400 / 4)
    assert late["small"] == pytest.approx(4770 / 400 * 8 / 11)


def test_the_front_refuses_a_tenant_whose_own_calls_fill_the_queue() -> None:
    engine = loaded(max_queue_seconds=8.0, order="fcfs")
    admission = engine.admission(SMALL, LARGE)
    for _ in range(4):
        waits(engine, admission, 400, SMALL)
    for tenant, is_full in ((SMALL, True), (LARGE, False)):
        token = current.set(tenant)
        assert (admission.full() is not None) == is_full
        current.reset(token)


def test_a_share_of_tokens_counts_as_well() -> None:
    engine = Engine(max_queued_tokens=1000)
    admission = engine.admission(SMALL, LARGE)
    engine.take(ask(admission, SMALL, prompt_tokens=600))
    assert "small already has its share" in str(refusal(admission, SMALL, prompt_tokens=10))
    ask(admission, LARGE, prompt_tokens=300)


def test_who_is_alone_shares_with_nobody() -> None:
    engine = Engine(max_queued_requests=10)
    admission = engine.admission()
    for _ in range(10):
        ask(admission)
    assert "10 requests are waiting" in str(refusal(admission))


def test_a_rate_is_a_bucket_that_fills() -> None:
    engine = Engine()
    limited = Tenant(name="limited", rate=2.0, burst=3.0)
    admission = engine.admission(limited, LARGE)
    for _ in range(3):
        ask(admission, limited)
    late = refusal(admission, limited)
    assert (late.kind, late.retry_after) == (ErrorKind.RATE_LIMITED, pytest.approx(0.5))
    ask(admission, LARGE)
    engine.now += 0.5
    ask(admission, limited)
    assert refusal(admission, limited).kind is ErrorKind.RATE_LIMITED
    engine.now += 3600
    ask(admission, limited, requests=5)  # more than may ever come at once: it is paid for afterwards
    assert refusal(admission, limited).retry_after == pytest.approx(1.5)


def test_what_others_refuse_costs_nothing_of_the_rate() -> None:
    engine = Engine(max_queued_requests=1)
    limited = Tenant(name="limited", rate=1.0, burst=1.0)
    admission = engine.admission(limited)
    other = ask(admission, ANYBODY)
    for _ in range(5):
        assert refusal(admission, limited).kind is ErrorKind.QUEUE_FULL
    other.release()
    ask(admission, limited)


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


def test_an_engine_that_stands_still_is_not_taken_for_a_slow_one() -> None:
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
