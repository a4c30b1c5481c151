"""The timed products: what they count as read and computed, and that what is wrong is not timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.device import products


def operands(case):
    x = jax.random.normal(jax.random.key(1), (case.rows, case.inputs), jnp.bfloat16)
    return x, case.matrix(jax.random.key(0)), *case.more()


@pytest.mark.parametrize("case", products.SMALL_CASES, ids=lambda case: case.name)
def test_products_are_those_of_numpy(case):
    x, matrix, *more = operands(case)
    assert products.checked(case, case.multiply, x, matrix, *more) > 0
    assert products.checked(case, case.multiply_xla, x, matrix, *more) > 0
    assert 0.3 < float(jnp.std(case.multiply(x, matrix, *more))) < 3


@pytest.mark.parametrize("case", products.SMALL_CASES, ids=lambda case: case.name)
def test_a_wrong_product_is_not_timed(case):
    def wrong(x, matrix, *more):
        return case.multiply(jnp.roll(x, 1, axis=1), matrix, *more)

    with pytest.raises(ValueError, match=r"differs from NumPy by .*; nothing was timed"):
        products.checked(case, wrong, *operands(case))


@pytest.mark.parametrize("case", products.SMALL_CASES[1:3], ids=lambda case: case.name)
def test_a_timed_call_multiplies_by_each_matrix(case):
    x, matrix, *more = operands(case)
    other = case.matrix(jax.random.key(2))
    found = products.in_turn(case.multiply)(x, [matrix, other], *more)
    for y, each in zip(found, (matrix, other), strict=True):
        np.testing.assert_allclose(y, case.multiply(x, each, *more), atol=1e-5)


def test_bytes_and_operations_of_a_product():
    case = products.Int4Case(rows=2, outputs=3, inputs=64, group=32)
    assert products.nbytes(case) == 3 * 32 + 3 * 2 * 2 + 2 * 64 * 2 + 2 * 3 * 4
    assert products.flops(case) == 2 * 2 * 3 * 64
    points = products.Int4Case(rows=2, outputs=3, inputs=64, group=32, zeros=True)
    assert products.nbytes(points) == products.nbytes(case) + 3 * 2


def test_experts_without_rows_are_not_counted():
    case = products.ExpertsCase(rows=1, experts=4, outputs=3, inputs=8)
    assert (case.sizes.sum(), case.matrix_bytes) == (1, 3 * 8 * 2)
    eight = products.ExpertsCase(rows=1, experts=4, outputs=3, inputs=8, dtype="int8")
    assert eight.matrix_bytes == 3 * (8 + 2)
