"""Which tokens top_k, top_p, min_p and typical_p keep."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.sampling.reference import TRUNCATED, VOCAB, choose, draw_logits, reference, stack


@pytest.mark.parametrize("typical_p", [0.01, 0.3, 0.9, 0.9999999])
@pytest.mark.parametrize("vocab", [3, pytest.param(40, marks=pytest.mark.exhaustive), 4001])
def test_typical_p_keeps_the_reference_set(typical_p, vocab):
    rng = np.random.default_rng(vocab)
    logits = draw_logits(rng, 1, vocab, scale=1.0)  # with ties
    params = SamplingParams(typical_p=typical_p)
    kept = reference(logits[0], params).probabilities > 0
    rows = jax.tree.map(jnp.asarray, stack([params]))
    peak = jnp.full((1, 1), logits.max())
    floor = jnp.full((1, 1), -jnp.inf)
    bounds = sampler._typical_bounds(jnp.asarray(logits), peak, jnp.ones((1, 1)), floor, rows.typical_p[:, None])
    low, high = (float(bound[0, 0]) for bound in bounds)
    np.testing.assert_array_equal((logits[0] >= low) & (logits[0] <= high), kept)


def test_typical_p_can_drop_the_likeliest_token():
    probabilities = np.array([0.4] + [0.012] * 50, np.float32)  # entropy 3.0 nats: the surprisal 4.4 is nearer than 0.9
    params = [SamplingParams(typical_p=0.5, seed=seed) for seed in range(64)]
    tokens = choose(np.tile(np.log(probabilities), (64, 1)), params).tokens
    assert (tokens > 0).all()


def test_ties_with_the_last_token_kept_are_kept():
    logits = np.full((64, VOCAB), -30.0, np.float32)
    logits[:, [10, 200, 3000, 5999]] = [1.0, 2.0, 1.0, 1.0]
    draw = partial(choose, logits, positions=np.arange(64), variant=TRUNCATED)
    for params in (
        SamplingParams(top_k=2, seed=1),
        SamplingParams(top_p=0.5, seed=1),
        SamplingParams(min_p=0.3, seed=1),
    ):
        assert set(draw([params] * 64).tokens.tolist()) == {10, 200, 3000, 5999}
    for params in (SamplingParams(top_k=1, seed=1), SamplingParams(top_p=1e-9, seed=1), SamplingParams(min_p=1.0)):
        assert set(draw([params] * 64).tokens.tolist()) == {200}
