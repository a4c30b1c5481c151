"""What the engine promises a caller: refusals, aborts, events, and the load that it reports."""

import threading
import time
from functools import partial

import pytest

from jaxserve.engine import Engine
from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.outputs import OutputProcessor
from tests.fixtures.tiny import VOCAB, make_engine
from tests.fixtures.traffic import Answers


def test_abort_gives_the_slots_back_within_one_iteration(params) -> None:
    engine, answers = make_engine(params, prefix_cache=False), Answers()
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    for name in "ab":
        engine.submit(Request(request_id=name, prompt=(5, 6, 7), sampling=sampling), answers)
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.abort("never seen")
    engine.step()
    assert answers.reasons == {"a": FinishReason.ABORTED}
    assert engine.load().running == 1
    before = len(answers.tokens["a"])
    while engine.step():
        pass
    assert len(answers.tokens["a"]) == before
    assert (answers.reasons["b"], len(answers.tokens["b"])) == (FinishReason.LENGTH, 60)
    assert engine.load().slots_used == 0


def test_a_full_queue_refuses_at_once(params) -> None:
    engine, answers = make_engine(params, max_queued_requests=2, max_queued_tokens=10), Answers()
    ask = partial(Request, sampling=SamplingParams(max_tokens=4))
    engine.submit(ask(request_id="a", prompt=(5,) * 8), answers)
    with pytest.raises(QueueFull, match="max_queued_tokens"):
        engine.submit(ask(request_id="b", prompt=(5, 6, 7)), answers)
    engine.submit(ask(request_id="c", prompt=(5,)), answers)
    with pytest.raises(QueueFull, match="max_queued_requests"):
        engine.submit(ask(request_id="d", prompt=(5,)), answers)
    while engine.step():
        pass
    assert set(answers.reasons) == {"a", "c"}


def wrong(prompt: tuple[int, ...] = (5,), **sampling) -> Request:
    return Request(request_id="x", prompt=prompt, sampling=SamplingParams(**{"max_tokens": 4, **sampling}))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt_token_ids", wrong((5, VOCAB))),
        ("prompt_token_ids", wrong((-1,))),
        ("stop_token_ids", wrong(stop_token_ids=(VOCAB,))),
        ("logit_bias", wrong(logit_bias=((VOCAB, 1.0),))),
        ("bad_words", wrong(bad_word_tokens=((5, VOCAB),))),
        ("bad_words", wrong(bad_words=("a",))),
        ("prompt_logprobs", wrong(prompt_logprobs=0)),
        ("stop", wrong(stop=("a",))),
        ("max_tokens", wrong(max_tokens=96)),
        ("prompt", wrong(())),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(engine_, field, request_) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine_.submit(request_, Answers())
    assert refusal.value.field == field
    assert engine_.load().waiting == 0


@pytest.fixture(scope="module")
def engine_(params) -> Engine:
    return make_engine(params)


def test_one_callers_fault_does_not_touch_another(engine_, caplog) -> None:
    def broken(_events) -> None:
        raise OSError("the caller has gone")

    answers, sampling = Answers(), SamplingParams(max_tokens=3, ignore_eos=True)
    engine_.submit(Request(request_id="bad", prompt=(5,), sampling=sampling), broken)
    engine_.submit(Request(request_id="good", prompt=(5,), sampling=sampling), answers)
    while engine_.step():
        pass
    assert answers.reasons == {"good": FinishReason.LENGTH}
    assert "sink failed" in caplog.text


def test_what_is_cached_is_not_owed(engine_) -> None:
    owed = []
    for name in "ab":
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        engine_.submit(Request(request_id=name, prompt=(7,) * 30, sampling=sampling), Answers())
        owed.append((engine_.load().prefill_tokens, engine_.load().outstanding_tokens))
        while engine_.step():
            pass
    cached = engine_.load().cached_tokens
    assert cached > 8
    assert owed == [(30, 33), (30 - cached, 33 - cached)]


def test_a_sink_is_called_once_an_iteration(engine_) -> None:
    answers, sampling = Answers(), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for name in "abc":
        engine_.submit(Request(request_id=name, prompt=(5, 6), sampling=sampling), answers)
    while engine_.step():
        pass
    assert {len(tokens) for tokens in answers.tokens.values()} == {3}
    assert answers.calls == 3


def test_the_first_event_says_when_the_request_got_a_row(engine_) -> None:
    heard, sampling = [], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    before = time.monotonic()
    engine_.submit(Request(request_id="a", prompt=(5, 6), sampling=sampling), heard.extend)
    assert engine_.load().outstanding_tokens == 5
    assert engine_.load().prefill_tokens == 2
    while not heard:
        engine_.step()
    assert engine_.load().prefill_tokens == 0
    while engine_.step():
        pass
    assert engine_.load().prefill_tokens == 0
    assert len(heard) == 3
    assert before <= heard[0].started <= time.monotonic()
    assert [event.started for event in heard[1:]] == [None, None]
    assert engine_.load().outstanding_tokens == 0


def test_threaded_engine_serves_and_stops(params) -> None:
    done = threading.Event()
    answers = Answers()

    def sink(events) -> None:
        answers(events)
        if answers.reasons:
            done.set()

    with make_engine(params) as engine:
        assert engine.is_healthy
        engine.submit(Request(request_id="a", prompt=(5,), sampling=SamplingParams(max_tokens=3)), sink)
        assert done.wait(60)
        engine.submit(Request(request_id="b", prompt=(5,), sampling=SamplingParams(max_tokens=90)), sink)
    assert set(answers.reasons) == {"a", "b"}
    assert not engine.is_healthy
    with pytest.raises(EngineStopped):
        engine.submit(Request(request_id="c", prompt=(5,), sampling=SamplingParams(max_tokens=3)), sink)


def test_a_failing_device_ends_every_request_and_says_so(params, monkeypatch, caplog) -> None:
    engine, events, done = make_engine(params), [], threading.Event()
    monkeypatch.setattr(
        engine._loops[0].pipeline, "launch", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost"))
    )
    with engine:
        engine.submit(
            Request(request_id="a", prompt=(5,), sampling=SamplingParams(max_tokens=4)),
            lambda e: (events.extend(e), done.set()),
        )
        assert done.wait(60)
        assert not engine.is_healthy
    assert events[0].finish_reason is FinishReason.ERROR
    assert "device lost" in (events[0].error or "")
    assert "device lost" in caplog.text


def test_a_failure_amid_results_ends_those_before_too(params) -> None:
    class Failing(OutputProcessor):
        def take(self, state, *args, **options):
            if state.name == "b":
                raise RuntimeError("no result")
            return super().take(state, *args, **options)

    engine, reasons, done = make_engine(params), {}, threading.Event()
    engine._loops[0].scheduler.outputs_of = Failing

    def sink(events) -> None:
        reasons.update((event.request_id, event.finish_reason) for event in events)
        if len(reasons) == 2:
            done.set()

    for name in "ab":  # one iteration has the only token of each
        engine.submit(Request(request_id=name, prompt=(5,), sampling=SamplingParams(max_tokens=1)), sink)
    with engine:
        assert done.wait(60)
    assert reasons == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}
