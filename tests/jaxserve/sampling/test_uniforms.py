"""The random numbers that tokens are drawn with, and which token each of them draws."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.sampling.reference import PLAIN, TRUNCATED, VOCAB, choose, draw_logits, reference, stack


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds, after Salmon et al."""
    mask = 0xFFFFFFFF
    ks = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + ks[0]) & mask, (counter[1] + ks[1]) & mask
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = (a + b) & mask
            b = ((b << rotation | b >> (32 - rotation)) & mask) ^ a
        a, b = (a + ks[(block + 1) % 3]) & mask, (b + ks[(block + 2) % 3] + block + 1) & mask
    return a, b


def test_uniforms_are_threefry():
    assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)  # Random123
    cases = list(itertools.product([0, 1, 2**32, 2**63, 2**64 - 1, -1, -(2**63)], [0, 1, 9], [0, 1, 70_000]))
    rows = stack([SamplingParams(seed=seed, sample_index=index) for seed, index, _ in cases])
    positions = np.array([position for *_, position in cases], np.int32)
    got = np.asarray(sampler.uniform(jnp.asarray(rows.seed), jnp.asarray(rows.sample_index), jnp.asarray(positions)))
    for (seed, index, position), u in zip(cases, got, strict=True):
        key = threefry((seed % 2**32, seed % 2**64 >> 32), (index, sampler.PURPOSE))
        assert u == (threefry(key, (position, 0))[0] >> 8) / 2**24
    assert ((got >= 0) & (got < 1)).all()
    distinct = {(seed % 2**64, *rest) for seed, *rest in cases}
    assert len(set(got.tolist())) == len(distinct)


@pytest.mark.parametrize("variant", [PLAIN, TRUNCATED])
def test_draws_follow_the_distribution(variant):
    vocab, draws = 40, 2048
    logits = np.linspace(-2, 2, vocab, dtype=np.float32)
    params = SamplingParams(temperature=0.8, seed=11, top_k=30 if variant is TRUNCATED else 0)
    tokens = choose(np.tile(logits, (draws, 1)), [params] * draws, positions=np.arange(draws), variant=variant).tokens
    expected = reference(logits, params).probabilities * draws
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < kept.sum() + 4 * np.sqrt(2 * kept.sum())  # mean n, deviation sqrt(2 n); the seed is fixed


EXTREMES = (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, 1 - 2.0**-24)


@pytest.mark.parametrize("variant", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("vocab", [1, 129, 1000])
def test_extreme_uniforms_choose_possible_tokens(monkeypatch, vocab, variant):
    def from_seed(seed, index, positions):
        return jax.lax.bitcast_convert_type(seed[:, 0], jnp.float32)

    monkeypatch.setattr(sampler, "uniform", from_seed)
    rng = np.random.default_rng(vocab)
    uniforms = np.repeat(np.float32(EXTREMES), 4)
    logits = (rng.normal(size=(20, vocab)) * 20).astype(np.float32)
    possible = rng.random((20, vocab)) < 0.3
    possible[np.arange(20), rng.integers(0, vocab, 20)] = True
    logits[~possible] = -np.inf
    logits[::4][possible[::4]] = 0.0
    top_p = 0.9 if variant is TRUNCATED else 1.0
    rows = stack(
        [SamplingParams(temperature=t, top_p=p) for t, p in [(1, 1), (30, top_p), (0.1, top_p), (1, top_p)] * 5]
    )
    rows = rows._replace(seed=np.stack([uniforms.view(np.uint32)] * 2, -1))
    run = jax.jit(partial(sampler.sample, variant=variant))
    tokens = np.asarray(run(logits, rows, np.zeros(20, np.int32), np.zeros((20, 4), np.int32)).tokens)
    assert possible[np.arange(20), tokens].all()
    assert tokens[0] == possible[0].argmax()  # u = 0 among equals
    assert tokens[8] == np.flatnonzero(possible[8])[possible[8].sum() // 2]  # u = 1/2: an interval holds its start
    assert tokens[16] == np.flatnonzero(possible[16])[-1]  # u just under 1


def test_temperatures_out_of_float_range_are_greedy_and_uniform():
    logits = draw_logits(np.random.default_rng(6), 2)
    cold, hot = SamplingParams(temperature=5e-324), SamplingParams(temperature=1.7e308, seed=3)
    output = choose(logits, [cold, hot], variant=PLAIN)
    uniforms = sampler.uniform(
        *(jnp.asarray(v[1:]) for v in (stack([cold, hot]).seed, np.zeros(2, np.int32), np.zeros(2, np.int32)))
    )
    assert output.tokens[0] == logits[0].argmax()
    assert abs(output.tokens[1] / VOCAB - float(uniforms[0])) < 1e-3
