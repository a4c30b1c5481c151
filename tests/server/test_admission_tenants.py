"""Tenants share a contended queue, and each has a rate of its own."""

import pytest

from server.auth import ANYBODY, Tenant, current
from server.errors import ErrorKind
from tests.server.admission_model import Engine, ask, loaded, refusal, waits

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
def test_a_tenant_waits_for_others_by_their_shares(order: str) -> None:
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


def test_a_tenant_that_fills_the_queue_is_refused() -> None:
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
