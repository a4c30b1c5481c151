"""The engine whole: tiny random models, driven a step at a time so that every run is the same."""

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup
from jaxserve.engine import Engine
from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.iteration import SamplerVariant
from jaxserve.multihost.in_flight import IterationTracker
from jaxserve.multihost.master import MasterPipeline
from jaxserve.request import FinishReason, Request
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import BLOOM, CONFIG, VOCAB, make_engine, opinionated
from tests.fixtures.traffic import Answers, run, traffic


@pytest.fixture(scope="module")
def params():
    """Random weights, large enough that the model has opinions."""
    return opinionated(0)


@pytest.fixture(scope="module")
def alone(params) -> Answers:
    """Each request's own run: nobody else, no shared prefix."""
    engine = make_engine(params, prefix_cache=False)
    answers = Answers()
    for _, request in traffic(200):
        engine.submit(request, answers)
        while engine.step():
            pass
    return answers


@pytest.mark.parametrize(("policy", "slots"), [("reserve", 320), ("grow", 112)])
def test_under_load_as_alone(params, alone, policy, slots) -> None:
    engine = make_engine(params, slot_policy=policy, slots=slots)
    arrivals = traffic(200)
    answers = run(engine, arrivals)
    load = engine.load()
    assert load.cached_tokens > 0
    assert (load.preemptions > 0) == (policy == "grow")
    assert load.slots_used == 0
    assert load.compiled_after_ready == 0
    assert load.host_seconds > 0
    assert 0 <= load.padding_seconds < load.bucket_seconds
    different = [i for i, _ in enumerate(arrivals) if answers.tokens[str(i)] != alone.tokens[str(i)]]
    assert len(different) <= len(arrivals) // 100
    for index in different:
        assert_within_margin(params, arrivals[index][1], alone.tokens[str(index)], answers.tokens[str(index)])
    assert all(answers.reasons[i] == alone.reasons[i] for i in alone.reasons if int(i) not in different)


def assert_within_margin(params, request: Request, expected: list[int], found: list[int]) -> None:
    """The first differing token is one that logits moved by under 1e-3 would have chosen as well."""
    position = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    tokens = [*request.prompt, *expected[:position]]
    logits = dense_logits(params, tokens)[-1]
    row = jax.tree.map(lambda value: jnp.asarray(value)[None], sampler.encode(request.sampling, len(request.prompt)))
    history = np.zeros((1, CONFIG.max_context or 0), np.int32)
    history[0, : len(tokens)] = tokens
    choose = jax.jit(partial(sampler.sample, variant=SamplerVariant.FULL))
    noise = np.random.default_rng(0).uniform(-1e-3, 1e-3, (200, VOCAB)).astype(np.float32)
    chosen = {int(choose(logits[None] + n, row, jnp.array([len(tokens)]), history).tokens[0]) for n in noise}
    assert found[position] in chosen


def dense_logits(params, tokens: list[int]) -> jax.Array:
    """float32[T, V] of a whole sequence at once, with plain causal attention."""
    model = models.build(BLOOM)
    positions = jnp.arange(len(tokens))
    x = model.embed(params, jnp.asarray(tokens), positions)
    for layer in range(BLOOM.num_layers):

        def attend(q, k, v, cache, layer=layer):
            scores = jnp.einsum("tnd,snd->nts", q, k) * BLOOM.attention_scale(layer)
            scores += BLOOM.alibi_slopes[:, None, None] * jnp.arange(len(tokens))
            mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            return jnp.einsum("nts,snd->tnd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v), cache

        x, _ = model.layer(params, layer, x, positions, attend, None)
    return model.logits(params, model.norm(params, x))


def test_greedy_tokens_and_logprobs_are_the_models_own(params) -> None:
    prompt = tuple(range(5, 30))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = run(make_engine(params), [(0, Request(request_id="a", prompt=prompt, sampling=sampling))])
    logprobs = jax.nn.log_softmax(dense_logits(params, [*prompt, *answers.tokens["a"]]))
    steps = logprobs[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(jnp.argmax(steps, axis=-1), answers.tokens["a"])
    np.testing.assert_allclose(jnp.max(steps, axis=-1), answers.logprobs["a"], atol=1e-4)


def test_prompt_logprobs_and_alternatives(params) -> None:
    engine = make_engine(params, scoring=True)
    prompt = tuple(range(5, 45))
    events = []
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    warm = SamplingParams(max_tokens=1)
    engine.submit(Request(request_id="warm", prompt=prompt, sampling=warm), lambda _: None)
    while engine.step():
        pass
    engine.submit(Request(request_id="a", prompt=prompt, sampling=sampling), events.extend)
    while engine.step():
        pass
    expected = jax.nn.log_softmax(dense_logits(params, list(prompt)))
    scored = [entry for event in events for entry in event.prompt_logprobs]
    assert len(scored) == len(prompt) - 1
    np.testing.assert_allclose(
        [logprob for logprob, _ in scored], expected[np.arange(39), np.array(prompt[1:])], atol=1e-4
    )
    assert [alternatives.token_ids[0] for _, alternatives in scored] == np.argmax(expected[:-1], axis=-1).tolist()
    top = next(event for event in events if event.token_ids)
    best = np.argsort(-np.asarray(expected[-1]))[:2]
    assert list(top.top_logprobs[0].token_ids) == best.tolist()
    np.testing.assert_allclose(top.top_logprobs[0].logprobs, expected[-1][best], atol=1e-4)


def test_next_launch_precedes_read(params, monkeypatch) -> None:
    engine = make_engine(params)
    order = []
    pipeline = engine._loops[0].pipeline
    launch, wait = pipeline.launch, pipeline.wait
    monkeypatch.setattr(
        pipeline, "launch", lambda plan, packed: (order.append(("launch", plan.sequence)), launch(plan, packed))
    )

    def spy():
        plan, result = wait()
        order.append(("wait", plan.sequence))
        return plan, result

    monkeypatch.setattr(pipeline, "wait", spy)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    run(engine, [(0, Request(request_id="a", prompt=(5, 6), sampling=sampling))])
    launches = {sequence: index for index, (what, sequence) in enumerate(order) if what == "launch"}
    waits = {sequence: index for index, (what, sequence) in enumerate(order) if what == "wait"}
    assert len(launches) >= 5
    assert all(launches[n + 1] < waits[n] for n in waits if n + 1 in launches)


@pytest.mark.usefixtures("optimized")
def test_no_iteration_copies_the_pool(params) -> None:
    engine = make_engine(params)
    for program in engine._loops[0].pipeline.stages[0]._forward.values():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= engine.report.pool_bytes
        assert memory.temp_size_in_bytes < engine.report.pool_bytes / 4


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


def test_update_params_changes_answers_and_forgets_prefixes(params) -> None:
    engine = make_engine(params)
    prompt = tuple(range(5, 30))
    ask = partial(Request, prompt=prompt, sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    before = run(engine, [(0, ask(request_id="a"))]).logprobs["a"]
    other = models.build(BLOOM).init(1, jnp.float32)
    engine.update_params(other)
    cached = engine.load().cached_tokens
    after = run(engine, [(0, ask(request_id="b"))]).logprobs["b"]
    assert engine.load().cached_tokens == cached
    assert after == run(make_engine(other), [(0, ask(request_id="c"))]).logprobs["c"]
    assert after != before
    engine.submit(ask(request_id="d"), Answers())
    engine.step()
    with pytest.raises(RuntimeError, match="1 requests are alive"):
        engine.update_params(params)


def test_shared_over_hosts_is_not_replaced(params) -> None:
    engine = make_engine(params)
    (replica,) = engine._loops
    group: Any = SimpleNamespace(progress=IterationTracker(), failure=None, done=None, report_error=None)
    replica.pipeline = MasterPipeline(replica.pipeline.stages, [], group, lambda: None)
    engine.submit(Request(request_id="a", prompt=(5,), sampling=SamplingParams(max_tokens=2)), Answers())
    with pytest.raises(ValueError, match="several hosts share the model, so its weights cannot be replaced"):
        engine.update_params(params)
    with pytest.raises(ValueError, match="a timeline shows the stages of one host"):
        engine.timeline()


def test_a_wrong_tree_is_named(params) -> None:
    with pytest.raises(ValueError, match=r"embed.*has .*; the model has"):
        Engine.from_params(BLOOM, {**params, "embed": {"other": jnp.zeros(3)}}, CONFIG)
    assert startup.check_tree(params, params) is None


def test_request_level_batching_holds_answers_back(params, alone) -> None:
    engine = make_engine(params, scheduler="request")
    arrivals = [(0, request) for _, request in traffic(12)]
    answers = run(engine, arrivals)
    for _, request in arrivals:
        assert answers.reasons[request.request_id] == alone.reasons[request.request_id]


def test_bars_hold_under_drafts_and_preemption(params) -> None:
    prompt = tuple(range(5, 30))
    free = run(make_engine(params), [(0, ask_for(prompt))]).tokens["a"]
    runs = ((free[0],), (free[1], free[2]), (prompt[-1], free[3]), tuple(free[4:7]))
    settings = [{}, {"speculate": "ngram"}, {"stages": 2}, {"slots": 112}]
    answers = []
    for each in settings:
        arrivals = [(0, ask_for(prompt, bad_word_tokens=runs)), *traffic(20)]
        answers.append(run(make_engine(params, **each), arrivals).tokens["a"])
    assert answers == [answers[0]] * len(settings)
    whole = [*prompt, *answers[0]]
    for barred in runs:
        places = range(len(prompt) - len(barred) + 1, len(whole))
        assert not any(tuple(whole[at : at + len(barred)]) == barred for at in places)
    stops = tuple(dict.fromkeys(answers[0]))[:16]
    least = [
        run(make_engine(params), [(0, ask_for(prompt, stop_token_ids=stops, min_tokens=count))]).tokens["a"]
        for count in (1, 5, 20)
    ]
    assert [len(tokens) > count for tokens, count in zip(least, (1, 5, 20), strict=True)] == [True] * 3
    for tokens, count in zip(least, (1, 5, 20), strict=True):
        assert not set(tokens[:count]) & set(stops)


def ask_for(prompt: tuple[int, ...], **sampling) -> Request:
    chosen = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling)
    return Request(request_id="a", prompt=prompt, sampling=chosen)
