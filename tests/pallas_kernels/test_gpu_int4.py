"""The product with int4 kernels for GPUs in Triton's interpreter, against float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import int4

multiply = jax.jit(partial(int4.multiply, device_kind=""), static_argnames="interpret")

# Rows, inputs, outputs, group, zero points, dtype of x.
CASES = [
    (3, 96, 70, 32, True, "bfloat16"),  # neither rows nor outputs are whole tiles
    (65, 1152, 40, 128, False, "bfloat16"),  # parts of the inputs, the last one shorter
    (20, 768, 130, 384, True, "bfloat16"),  # groups of several steps
    (17, 320, 33, 64, True, "float32"),
]


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "has_zeros", "dtype"),
    [pytest.param(*case, marks=pytest.mark.interpret if i else ()) for i, case in enumerate(CASES)],
)
def test_int4_kernels(rows, inputs, outputs, group, has_zeros, dtype, seed):
    rng, counts = np.random.default_rng(seed), (outputs, inputs // group)
    x = rng.standard_normal((rows, inputs)).astype(dtype)
    values, scales = rng.integers(-8, 8, (outputs, inputs)).astype(jnp.int4), rng.standard_normal(counts).astype(dtype)
    zeros = rng.integers(-7, 9, counts).astype(np.int8) if has_zeros else None
    y = multiply(x, values, scales, zeros, interpret=True)  # where the wide kernel is float32
    wide = values.astype(np.float64).reshape(*counts, group)
    wide -= 0 if zeros is None else zeros.astype(np.float64)[..., None]
    expected = x.astype(np.float64) @ (wide * scales.astype(np.float64)[..., None]).reshape(outputs, inputs).T
    assert (y.dtype, y.shape) == (jnp.float32, (rows, outputs))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=3e-6 * np.abs(expected).max(), err_msg=f"--seed {seed}")


def test_groups_that_are_whole_steps():
    assert [group for group in (16, 32, 48, 64, 96, 128, 192, 256, 4096) if int4.serves(group)] == [
        32,
        64,
        128,
        256,
        4096,
    ]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "programs"),
    [(8, 11008, 4096, 32, 516), (32, 4096, 4096, 128, 512), (256, 4096, 11008, 128, 128), (4096, 4096, 4096, 64, 1024)],
)
def test_few_rows_still_have_many_programs(rows, outputs, inputs, group, programs):
    tiling = int4.int4_tiling(rows, group, jnp.dtype(jnp.bfloat16))
    tiles = -(-rows // tiling.rows) * -(-outputs // tiling.columns)
    steps = int4.steps_of_part(tiling, rows, outputs, inputs)
    assert tiles * -(-inputs // (tiling.depth * steps)) == programs


def test_a_row_does_not_depend_on_the_others():
    """Not on those of its tile: to the bit."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 2048)).astype(jnp.bfloat16)
    values = rng.integers(-8, 8, (70, 2048)).astype(jnp.int4)
    scales = rng.standard_normal((70, 64)).astype(jnp.bfloat16)
    others = np.full_like(x, np.nan)
    others[2] = x[2]
    alone, among = (multiply(each, values, scales, None, interpret=True) for each in (x, others))
    np.testing.assert_array_equal(among[2], alone[2])
    assert np.isnan(among[6]).all()


def test_the_numbers_of_bytes_become_bfloat16():
    """What is compiled for bfloat16, step by step: the interpreter has no assembler."""
    numbers = np.arange(16)
    bits = (0x4300 + (numbers ^ 8)).astype(np.uint16)
    np.testing.assert_array_equal(bits.view(jnp.bfloat16).astype(int) - 136, (numbers ^ 8) - 8)
