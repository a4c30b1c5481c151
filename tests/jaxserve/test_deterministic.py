"""Answers that are the same to the bit, whatever else is served."""

import dataclasses
import random
from collections import Counter

import jax.numpy as jnp
import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.iteration import SamplerVariant
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.factory import fixed_chunk
from tests.fixtures.tiny import CONFIG, VOCAB
from tests.fixtures.traffic import run

# Wide enough that sums are taken in different orders by different programs.
MODEL = models.parse_config(
    {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 192, "n_layer": 2, "n_head": 3, "eos_token_id": 2}
)
# Longer than three pieces of a prompt; the last piece is short.
PROMPT = tuple(random.Random(1).randrange(3, VOCAB) for _ in range(55))
SETTINGS = {"slot_policy": "reserve", "buckets": (24,), "slots": 900}


@pytest.fixture(scope="module")
def params():
    return models.build(MODEL).init(0, jnp.float32)


def make_engine(params, **settings) -> Engine:
    return Engine.from_params(MODEL, params, dataclasses.replace(CONFIG, **settings))


@pytest.fixture(scope="module")
def engine(params) -> Engine:
    return make_engine(params, deterministic=True, **SETTINGS)


def ask(name: str, temperature: float) -> Request:
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    return Request(request_id=name, prompt=PROMPT, sampling=sampling)


def others(rng: random.Random, count: int) -> list[tuple[int, Request]]:
    """Any traffic, prefixes of the prompt and all kinds of samplers included."""
    arrivals = []
    for index in range(count):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 50)))
        if rng.random() < 0.3:
            prompt = PROMPT[: rng.randint(1, 54)] + prompt[:30]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice((0.0, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            seed=index,
            ignore_eos=True,
        )
        arrivals.append((rng.randint(0, 2 * count), Request(request_id=f"o{index}", prompt=prompt, sampling=sampling)))
    return arrivals


def answers_of(engine: Engine, asked: list[Request], rng: random.Random) -> Counter:
    """How often each answer (tokens and the bits of their logprobs) was given under random other load."""
    steps = [(rng.randint(0, 5 * len(asked)), request) for request in asked]
    answers = run(engine, steps + others(rng, 2 * len(asked)))
    mine = [request.request_id for request in asked]
    return Counter((tuple(answers.tokens[name]), tuple(x.hex() for x in answers.logprobs[name])) for name in mine)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hundred_runs_under_any_load_are_one_answer(engine, temperature) -> None:
    rng = random.Random()
    found = answers_of(engine, [ask(f"m{index}", temperature) for index in range(100)], rng)
    (alone,) = answers_of(engine, [ask("alone", temperature)], random.Random(0))
    assert set(found) == {alone}
    assert engine.load().cached_tokens > 0
    assert engine.load().compiled_after_ready == 0


@pytest.mark.long
def test_without_it_the_bits_differ(params) -> None:
    """The same traffic tells a usual engine's answers apart: the test above could fail."""
    usual = make_engine(params, **SETTINGS | {"buckets": (6, 12, 24)})
    assert len(answers_of(usual, [ask(f"m{index}", 0.0) for index in range(60)], random.Random(3))) > 1


def test_fixed_chunks_and_one_sampler(engine, monkeypatch) -> None:
    scheduler = engine._loops[0].scheduler
    plans, complete = [], scheduler.complete
    monkeypatch.setattr(scheduler, "complete", lambda plan, result: (plans.append(plan), complete(plan, result))[1])
    run(engine, [(i // 3, request) for i, (_, request) in enumerate(others(random.Random(2), 40))])
    chunk = fixed_chunk(engine.config, (24,), 4)
    assert chunk == 16  # whole blocks of 4 beside five decodes
    for plan in plans:
        assert plan.bucket == 24
        assert plan.sampler in (None, SamplerVariant.CONSTRAINED)
        for piece in plan.chunks:
            if piece.length > 1:
                assert piece.start % chunk == 0
                assert piece.length == chunk or piece.samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot_policy": "grow"}, "slot_policy is grow; with deterministic it must be reserve"),
        ({"scheduler": "request"}, "scheduler is request; with deterministic it must be iteration"),
        ({"target_tpot": 0.1}, "target_tpot is 0.1; with deterministic it must be None"),
        ({"buckets": (8, 16)}, r"buckets are \(8, 16\); with deterministic there must be one"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"deterministic": True, "slot_policy": "reserve"} | settings)


def test_bucket_below_a_block_is_refused(params) -> None:
    with pytest.raises(ValueError, match=r"a bucket of 8 tokens leaves 3 beside 5 decodes; .* a bucket of 9 or more"):
        make_engine(params, deterministic=True, **SETTINGS | {"buckets": (8,)})


def test_answers_are_unmoved_by_what_was_cached(params) -> None:
    """A prompt that continues another's answer shares its prompt's pieces only."""
    fresh, used = (make_engine(params, deterministic=True, **SETTINGS) for _ in range(2))
    first = run(used, [(0, ask("first", 0.0))])
    longer = Request(
        request_id="longer",
        prompt=(*PROMPT, *first.tokens["first"], 7, 8, 9),
        sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
    )
    expected, found = run(fresh, [(0, longer)]), run(used, [(0, longer)])
    assert used.load().cached_tokens == 48
    assert fresh.load().cached_tokens == 0
    assert found.logprobs == expected.logprobs
