"""Lower bounds of steps, and the choice of tokens by sorting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.device import steps
from benchmarks.device.models import CHOICE, TimedModel, timed
from jaxserve.iteration import SamplerVariant
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import shapes, step


def test_a_step_reads_its_weights_and_the_slots_in_use():
    config = shapes.config_of("bloom-7b1")
    case = step.Case(decodes=2, context=99)
    assert steps.nbytes(config, case, 10**9, 2) == 10**9 + 2 * 100 * 30 * 2 * 4096 * 2
    weights = 2 * (250_880 * 4096 + 10**6)
    assert steps.flops(config, case, weights, 2) == 2 * 2 * 10**6 + 4 * 250_880 * 4096 + 4 * 30 * 4096 * 200


@pytest.mark.bench
def test_a_model_is_timed(monkeypatch):
    monkeypatch.setattr(steps, "timed", lambda small: [TimedModel(shape="tiny", rows=(2,), context=10, prompt=8)])
    found = {name: measure() for name, measure in steps.cases("tiny", small=True)}
    assert list(found) == ["tiny start", "tiny decode 2 rows at 10", "tiny prefill 8"]
    assert found["tiny start"]["weights"] > 0
    assert found["tiny decode 2 rows at 10"]["ms"] > 0


@pytest.mark.bench
def test_the_choice_of_tokens_is_timed():
    assert [measure()["ms"] > 0 for _, measure in steps.cases(CHOICE, small=True)] == [True] * 3


def test_shapes_are_known_and_steps_fit_them():
    for model in [*timed(small=False), *timed(small=True)]:
        most = shapes.config_of(model.shape).max_position or 10**6
        assert max(model.prompt, model.context) < most


@pytest.mark.bench
def test_sorting_keeps_what_the_sampler_keeps():
    params = SamplingParams(temperature=0.7, top_k=30, top_p=0.8, max_tokens=1)
    rows = jax.tree.map(lambda value: np.broadcast_to(value, (64, *value.shape)), sampler.encode(params, 0))
    rows = jax.tree.map(jnp.asarray, rows)
    logits, positions = 3 * jax.random.normal(jax.random.key(1), (64, 500)), jnp.arange(64, dtype=jnp.int32)
    ours = sampler.sample(logits, rows, positions, jnp.zeros((64, 1), jnp.int32), variant=SamplerVariant.TRUNCATED)
    theirs = steps.choose_by_sorting(logits, rows, positions)
    # One u picks a token in order of ids, the other in order of likelihood: the same share of draws of each token.
    kept = np.asarray(jax.lax.top_k(logits, 30)[1])
    assert all(token in row for token, row in zip(np.asarray(theirs), kept, strict=True))
    assert all(token in row for token, row in zip(np.asarray(ours.tokens), kept, strict=True))
    greedy = rows._replace(temperature=jnp.full(64, 1e-6))
    assert (steps.choose_by_sorting(logits, greedy, positions) == jnp.argmax(logits, -1)).all()
