"""Prompt scoring by tiles against a log-softmax of the whole vocabulary."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.sampling.scoring import score
from jaxserve.sampling_params import MAX_LOGPROBS


def run(logits, tile, next_tokens):
    def logits_tile(logits, start, size):
        return jax.lax.dynamic_slice_in_dim(logits, start, size, 1)

    return map(
        np.asarray,
        jax.jit(lambda x, n: score(partial(logits_tile, x), x.shape[1], tile, n))(logits, np.asarray(next_tokens)),
    )


@pytest.mark.parametrize(
    ("vocab", "tile"), [(1000, 250), (1003, 250), (1003, 1003), (1003, 4096), (101, 10), (7, 3), (3000, 1400)]
)
def test_scores_are_those_of_the_whole_softmax(vocab, tile):
    rng = np.random.default_rng(vocab)
    logits = (np.round(rng.normal(size=(9, vocab)) * 24) / 8).astype(np.float32)  # with ties
    next_tokens = np.array([0, vocab - 1, *rng.integers(0, vocab, 7)], np.int32)
    logprobs, ids, top = run(logits, tile, next_tokens)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, -1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, -1), atol=1e-5)
    np.testing.assert_allclose(logprobs, expected[np.arange(9), next_tokens], atol=1e-5)


def test_large_and_missing_logits():
    logits = np.full((3, 100), -np.inf, np.float32)
    logits[0, 97] = 3e38  # the other tiles hold nothing
    logits[1, [2, 98]] = [-2000.0, -2001.0]
    logits[2, :] = np.linspace(-1e4, 1e4, 100)
    logprobs, ids, _ = run(logits, 10, np.array([97, 98, 99], np.int32))
    np.testing.assert_allclose(logprobs, [0.0, -np.log1p(np.e), 0.0], atol=1e-4)
    assert ids[:, 0].tolist() == [97, 2, 99]
    assert ((ids >= 0) & (ids < 100)).all()
    logprobs, *_ = run(logits, 10, np.array([0, 0, 100], np.int32))
    assert np.isneginf(logprobs).all()


def test_a_broken_position_stays_alone():
    logits = np.random.default_rng(1).normal(size=(4, 60)).astype(np.float32)
    healthy = list(run(logits, 20, np.arange(4)))
    broken = logits.copy()
    broken[1, 30] = np.nan
    answers = list(run(broken, 20, np.arange(4)))
    for a, b in zip(healthy, answers, strict=True):
        np.testing.assert_array_equal(a[[0, 2, 3]], b[[0, 2, 3]])
    assert np.isnan(answers[0][1])


@pytest.mark.usefixtures("optimized")
def test_memory_is_bounded_by_a_tile():
    hidden, head = np.zeros((64, 8), np.float32), np.zeros((8, 50_000), np.float32)

    def scored(hidden, head, next_tokens):
        def logits_tile(start, size):
            return hidden @ jax.lax.dynamic_slice_in_dim(head, start, size, 1)

        return score(logits_tile, head.shape[1], 1000, next_tokens)

    program = jax.jit(scored).lower(hidden, head, np.zeros(64, np.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 10 * 64 * 1000 * 4  # the logits are 50 tiles
