"""The engine whole: tiny random models, driven a step at a time so that every run is the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.iteration import SamplerVariant
from jaxserve.request import Request
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import BLOOM, CONFIG, VOCAB, make_engine
from tests.fixtures.traffic import Answers, each_alone, run, traffic


@pytest.fixture(scope="module")
def alone(params) -> Answers:
    """Each request's own run: nobody else, no shared prefix."""
    return each_alone(make_engine(params, prefix_cache=False), (request for _, request in traffic(200)))


@pytest.mark.parametrize(("policy", "slots"), [pytest.param("reserve", 320, marks=pytest.mark.long), ("grow", 112)])
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
    engine = make_engine(params, buckets=(8,))
    for program in engine._loops[0].pipeline.stages[0]._forward.values():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= engine.report.pool_bytes
        assert memory.temp_size_in_bytes < engine.report.pool_bytes / 4


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
