"""Limits and likeliest tokens against sorting, where ties, zeros and tiny weights make it hard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import selection

VOCAB = 5003


@jax.jit
def floor(logits, top_k, top_p):
    peak = logits.max(-1, keepdims=True)
    return selection.threshold(logits, lambda x: jnp.exp(x - peak), top_k, top_p)


def kinds_of_logits(rng):
    """One row of each kind that could go wrong."""
    normal = rng.normal(size=VOCAB)
    return np.stack(
        [
            normal,
            np.round(normal * 2) / 2,  # ties, the two zeros among them
            np.where(normal > 0, 0.0, -0.0),
            np.full(VOCAB, 7.0),
            normal * 40,  # most weights underflow
            np.where(rng.random(VOCAB) < 0.9, -np.inf, normal),
            np.where(np.arange(VOCAB) == 4321, 0.0, -np.inf),
            normal * 1e-6,
        ]
    ).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.integers(0, 2**32 - 1),
    top_k=st.lists(st.one_of(st.integers(0, VOCAB + 5), st.integers(0, 130)), min_size=8, max_size=8),
    top_p=st.lists(st.one_of(st.just(1.0), st.floats(2.0**-30, 1.0, width=32)), min_size=8, max_size=8),
)
def test_floors_are_exact(numbers, top_k, top_p):
    logits = kinds_of_logits(np.random.default_rng(numbers))
    floors = np.asarray(floor(logits, np.array(top_k, np.int32), np.array(top_p, np.float32)))
    for row, x in enumerate(logits):
        kth = np.sort(x)[-min(top_k[row], VOCAB)] if top_k[row] else -np.inf
        if top_p[row] == 1:
            assert floors[row] == kth
            continue
        weights = np.where(x >= kth, np.exp(x.astype(np.float64) - x.max()), 0)
        share = weights.sum() * np.float32(top_p[row])
        assert floors[row] >= kth
        assert floors[row] in x
        assert weights[x >= floors[row]].sum() >= share * (1 - 1e-5)
        assert weights[x > floors[row]].sum() <= share * (1 + 1e-5)


@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize("size", [64, 1280, 4097, VOCAB])
def test_largest_is_a_stable_sort(count, size):
    rng = np.random.default_rng(size)
    values = np.concatenate([kinds_of_logits(rng)[:, :size], rng.integers(0, 3, (8, size)).astype(np.float32)])
    top, ids = map(np.asarray, jax.jit(selection.largest, static_argnums=1)(values, count))
    order = np.argsort(-values, -1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(top, np.take_along_axis(values, order, -1))


@pytest.mark.parametrize(("rows", "count"), [(1, 64), (3, 1), (12, 20), (16, 64)])
def test_the_largest_by_tiles_are_those_by_blocks(rows, count):
    """What TPUs do, down to which of equals come first."""
    rng = np.random.default_rng(rows)
    values = np.concatenate([kinds_of_logits(rng), rng.integers(0, 3, (8, VOCAB)).astype(np.float32)])[:rows]
    values = np.tile(values, 4)[:, : 156 * 128]
    found = jax.jit(selection._largest_by_tiles, static_argnums=(1, 2))(values, count, jnp.negative)
    for one, other in zip(
        found, jax.jit(selection.largest, static_argnums=(1, 2))(values, count, jnp.negative), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rows", "height"), [(1, 1), (3, 1), (12, 4), (16, 8)])
def test_tiles_hold_rows_of_128(rows, height):
    values = jnp.arange(rows * 384, dtype=jnp.float32).reshape(rows, 384)
    tiles = np.asarray(selection._tiles(values))
    assert tiles.shape == (rows // height, 3, height, 128)
    np.testing.assert_array_equal(tiles[-1, 1, -1], values[-1, 128:256])


@pytest.mark.parametrize("size", [1, 127, 128, 129, 384])
def test_block_reduce_takes_the_ragged_end(size):
    values = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32) - 5
    blocks = np.array_split(values, range(128, size, 128), axis=1)
    sums = jax.jit(selection.block_reduce, static_argnums=(1, 2))(values, 128, jax.lax.add)
    maxima = jax.jit(selection.block_reduce, static_argnums=(1, 2))(values, 128, jax.lax.max)
    np.testing.assert_allclose(sums, np.stack([b.sum(-1) for b in blocks], -1), rtol=1e-5)
    np.testing.assert_array_equal(maxima, np.stack([b.max(-1) for b in blocks], -1))
