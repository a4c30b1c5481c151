"""Engines of models in which some layers have a sliding window: less memory, the same answers."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.engine import Engine
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.predict import predict
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.cache_groups import CacheGroups
from sharding import devices, specs
from tests.fixtures import dense
from tests.fixtures.tiny import CONFIG, VOCAB
from tests.fixtures.traffic import Answers, run, traffic
from tests.jaxserve.generation.test_samples import samples

WINDOW, LAYERS, HEADS, DIM, BLOCK = 8, 4, 2, 16, 4
MODEL = models.parse_config(
    {
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "query_pre_attn_scalar": DIM,
        "eos_token_id": 2,
    }
)
SETTINGS = dataclasses.replace(CONFIG, max_rows=3, slots=480, buckets=(6, 12))
# Each request holds at most 8 / 4 + 2 blocks between iterations; there are twice as many as rows, and an iteration.
WINDOW_BLOCKS = 2 * 3 * 4 + 12 // BLOCK
BLOCK_BYTES = 4 * 2 * BLOCK * HEADS * DIM  # float32 keys and values of one layer


@cache
def params() -> Any:
    tree = models.build(MODEL).init(0, jnp.float32)
    return jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, tree)


def make(**settings) -> Engine:
    return Engine.from_params(MODEL, params(), dataclasses.replace(SETTINGS, **settings))


def arrivals() -> list[tuple[int, Request]]:
    """Traffic with shared prefixes, samples of one prompt, and two that go far beyond the window."""
    rng = np.random.default_rng(5)
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [tuple(int(token) for token in rng.integers(3, VOCAB, 34)) for _ in range(2)]
    far = [(step, Request(request_id=f"far{step}", prompt=prompts[step], sampling=long)) for step in range(2)]
    return traffic(30) + [(4, request) for request in samples(4)] + far


@pytest.fixture(scope="module")
def one_group() -> Answers:
    """What an engine answers that keeps all keys and values of all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheGroups, "of", lambda windows, **sizes: CacheGroups(**sizes))
        engine = make()
    assert engine.report.pool_bytes == LAYERS * 480 // BLOCK * BLOCK_BYTES
    return run(engine, arrivals())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"prefix_cache": False}, marks=pytest.mark.long),
        pytest.param({"slot_policy": "reserve"}, marks=pytest.mark.long),
        pytest.param({"slots": 112}, marks=pytest.mark.long),
        pytest.param({"stages": 2}, marks=pytest.mark.long),
        pytest.param({"speculate": "ngram"}, marks=pytest.mark.long),
        pytest.param({"scheduler": "request"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_answers_are_those_of_one_group(settings, one_group) -> None:
    engine = make(**settings)
    answers = run(engine, arrivals())
    load = engine.load()
    assert (load.slots_used, load.compiled_after_ready) == (0, 0)
    assert (load.cached_tokens > 100) == (settings.get("prefix_cache", True))
    different = [name for name, tokens in one_group.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= 1  # a draw or a choice within a hair of the next
    for name in one_group.tokens.keys() - set(different):
        np.testing.assert_allclose(answers.logprobs[name], one_group.logprobs[name], atol=2e-4)


def test_answers_are_those_of_the_dense_model(one_group) -> None:
    logprobs = jax.jit(partial(dense.logprobs, models.build(MODEL)))
    for _, request in arrivals()[-2:]:
        tokens = one_group.tokens[request.request_id]
        whole = jnp.array([*request.prompt, *tokens])
        expected = logprobs(params(), whole[:-1])[len(request.prompt) - 1 :]
        np.testing.assert_allclose(
            one_group.logprobs[request.request_id], expected[jnp.arange(len(tokens)), jnp.array(tokens)], atol=1e-3
        )


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
def test_layers_with_a_window_hold_less_and_plan_says_so(stages) -> None:
    settings = {"attention": "xla", "stages": stages, "layers_per_stage": None if stages == 1 else (1, 3)}
    engine = make(**settings)
    windowed = WINDOW_BLOCKS if stages == 1 else 2 * 9 * 4 + 12 // BLOCK  # a pipeline of two has three times the rows
    assert engine.report.pool_bytes == (480 // BLOCK + 3 * windowed) * BLOCK_BYTES
    assert engine.report.slots == 480
    held = [each.pool for each in engine._loops[0].pipeline.stages]
    layers = [windowed + 480 // BLOCK + 2 * windowed] if stages == 1 else [windowed, 480 // BLOCK + 2 * windowed]
    assert [len(jax.tree.leaves(pool)[0]) for pool in held] == layers
    asked = Deployment(
        name="tiny",
        config=MODEL,
        topology=devices.parse("h100:2"),
        engine=dataclasses.replace(SETTINGS, dtype="float32", **settings),
        spec=specs.default(MODEL.family),
    )
    plan = predict(asked)
    assert sum(stage.pool for stage in plan.stages) == engine.report.pool_bytes
    assert plan.groups == engine._loops[0].pipeline.shape.groups


def test_the_pool_is_as_large_as_fits(monkeypatch) -> None:
    from jaxserve.runner import kv_cache

    available = 2**20
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: available + 2**19)
    monkeypatch.setattr(kv_cache, "fitting_blocks", partial(_without_temporaries, kv_cache.fitting_blocks, available))
    engine = make(slots=None, max_rows=48, buckets=(48,))
    assert available * 0.85 < engine.report.pool_bytes <= available
    assert run(engine, arrivals()[-2:]).reasons.keys() == {"far0", "far1"}


def _without_temporaries(fitting, available, *, free, temporaries, pool_bytes, wanted) -> int:
    del free, temporaries
    return fitting(available, 0, pool_bytes, wanted)
