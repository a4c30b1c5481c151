"""The grouped product for GPUs in Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import oracle
from pallas_kernels.gpu import grouped

multiply_runs = jax.jit(partial(grouped.multiply_runs, device_kind=""), static_argnames="interpret")
make_tiles = jax.jit(grouped._tiles, static_argnums=(1, 2))


def draw(rng, rows, inputs, outputs, sizes, dtype, kernel_dtype):
    """x and kernels; the rows beyond the runs, and the kernels of experts without rows, are NaN."""
    x = rng.standard_normal((rows, inputs)).astype(dtype)
    x[sum(sizes) :] = np.nan
    if kernel_dtype == "int8":
        kernels = rng.integers(-127, 128, (len(sizes), outputs, inputs)).astype(np.int8)
    else:
        kernels = rng.standard_normal((len(sizes), outputs, inputs)).astype(kernel_dtype)
        kernels[np.equal(sizes, 0)] = np.nan
    return x, kernels


# Rows, inputs, outputs, rows of each expert, dtype of x, of kernels, rows of a tile.
CASES = [
    (50, 80, 70, (0, 20, 1, 0, 18, 3), "bfloat16", "bfloat16", 16),  # nothing divides; runs of one tile, two, none
    (200, 128, 130, (0, 150, 40), "bfloat16", "int8", 128),
    (51, 40, 33, (17, 17, 17), "float32", "float32", 64),
    (48, 33, 32, (17, 1, 1, 27), "float16", "float16", 16),
    (100, 64, 64, (34, 0, 66), "bfloat16", "bfloat16", 64),
    (300, 200, 128, (129, 128), "bfloat16", "bfloat16", 128),
    (12, 96, 40, (1,) * 12, "float32", "int8", 16),
    (1, 7, 1, (0, 1, 0), "bfloat16", "int8", 16),
    (20, 64, 64, (0, 0, 0), "bfloat16", "bfloat16", 16),
    (35, 300, 200, (0, 0, 0, 35), "float32", "float32", 16),
]


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "sizes", "dtype", "kernel_dtype", "tile"),
    [pytest.param(*case, marks=pytest.mark.interpret if i > 3 else ()) for i, case in enumerate(CASES)],
)
def test_runs_are_multiplied_by_their_kernels(rows, inputs, outputs, sizes, dtype, kernel_dtype, tile, seed):
    assert grouped.runs_tiling(rows, len(sizes), dtype).rows == tile
    x, kernels = draw(np.random.default_rng(seed), rows, inputs, outputs, sizes, jnp.dtype(dtype), kernel_dtype)
    y = multiply_runs(x, kernels, np.int32(sizes), interpret=True)
    assert y.dtype == jnp.float32
    assert y.shape == (rows, outputs)
    assert np.isnan(y[sum(sizes) :]).all()  # as the interpreter made them: no tile writes beyond its run
    expected = oracle.runs_product(x, kernels, sizes)
    largest = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(y[: sum(sizes)], expected, rtol=2e-6, atol=2e-6 * largest, err_msg=f"--seed {seed}")


def test_tiles_cover_every_run_once(seed):
    rng = np.random.default_rng(seed)
    for groups, rows, tile in [(3, 51, 16), (128, 512, 16), (8, 300, 64), (40, 7, 16), (1, 129, 128)]:
        for concentration in (0.05, 1, 100):
            used = rng.integers(rows + 1)
            sizes = rng.multinomial(used, rng.dirichlet(np.full(groups, concentration))).astype(np.int32)
            found = np.asarray(make_tiles(sizes, rows, tile))
            expected = [
                (group, start + first, start + min(first + tile, size))
                for group, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True))
                for first in range(0, size, tile)
            ]
            np.testing.assert_array_equal(found[: len(expected)], np.reshape(expected, (-1, 3)), err_msg=str(sizes))
            assert (found[len(expected) :, 1] == found[len(expected) :, 2]).all()
    most = np.asarray(make_tiles(np.int32([17] * 3), 51, 16))  # nothing is left over
    assert (most[:, 1] < most[:, 2]).all()


def test_a_row_does_not_depend_on_the_others():
    """Not on those of its tile, to the bit; nor on its place in the tile, but for how NumPy adds there."""
    x, kernels = draw(np.random.default_rng(0), 40, 80, 70, (40, 0), jnp.bfloat16, "bfloat16")
    kernels[1] = 1
    alone = multiply_runs(x, kernels, np.int32([40, 0]), interpret=True)[5]
    others = np.full_like(x, np.nan)
    others[5] = others[14] = x[5]
    among = multiply_runs(others, kernels, np.int32([38, 2]), interpret=True)
    np.testing.assert_array_equal(among[5], alone)
    np.testing.assert_allclose(among[14], alone, rtol=1e-5)
    assert np.isnan(among[13]).all()


def test_float32_is_not_rounded(monkeypatch):
    """It is multiplied in three products of TF32, where the interpreter would be exact anyway."""
    asked = []

    def call(*_, new, constants, **__):
        asked.append(constants["PRECISION"])
        return {name: jnp.zeros(like.shape, like.dtype) for name, like in new.items()}

    monkeypatch.setattr(grouped, "triton_call", call)
    for dtype in ("float32", "bfloat16"):
        jax.eval_shape(multiply_runs, jnp.zeros((5, 32), dtype), jnp.zeros((3, 32, 32), dtype), jnp.int32([2, 2, 1]))
    assert asked == ["tf32x3", "ieee"]
