"""The product with int4 kernels for GPUs in Pallas's interpreter, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import int4

multiply = jax.jit(int4.multiply, static_argnames="interpret")

# Rows, inputs, outputs, group, zero points, dtype of x.
CASES = [
    (3, 96, 70, 32, True, "bfloat16"),  # neither rows nor outputs are whole tiles
    (65, 256, 40, 128, False, "bfloat16"),
    (20, 512, 130, 256, True, "bfloat16"),  # groups of two steps
    (17, 128, 33, 64, True, "float32"),
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
    y = multiply(x, values, scales, zeros, interpret=True)
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
