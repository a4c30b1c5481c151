"""The layers that families share, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.models import layers, products
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import alibi_slopes
from tests.jaxserve.models.configs import BLOOM


def test_alibi_slopes_of_head_counts_that_are_no_powers_of_two():
    np.testing.assert_allclose(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625])
    np.testing.assert_allclose(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    assert len(alibi_slopes(112)) == 112
    assert len(set(alibi_slopes(112).tolist())) == 112


@pytest.mark.parametrize("size", [2, 6, 8])
def test_rotary_equals_complex_rotation(size):
    x, positions = jax.random.normal(jax.random.key(0), (5, 3, 8)), jnp.array([0, 1, 1, 7, 2000])
    y = np.asarray(Rotary(size=size, theta=100.0)(x, positions))
    turns = np.exp(1j * np.outer(positions, 100.0 ** -(np.arange(size // 2) * 2 / size)))[:, None]
    wide = np.asarray(x, np.float64)
    exact = (wide[..., : size // 2] + 1j * wide[..., size // 2 : size]) * turns
    np.testing.assert_allclose(y[..., : size // 2], exact.real, atol=5e-4)
    np.testing.assert_allclose(y[..., size // 2 : size], exact.imag, atol=5e-4)
    np.testing.assert_array_equal(y[..., size:], x[..., size:])
    np.testing.assert_array_equal(y[0], x[0])


@pytest.mark.parametrize("kind", ["default", "dynamic"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 6, 8])
def test_rotation_by_a_product_loses_nothing(size, interleaved, kind):
    """TPUs rotate so. A product of default precision would round there; one of the highest does not."""
    rotary = Rotary(
        size=size, interleaved=interleaved, kind=kind, theta=100.0, factor=2.0, original=4, attention_factor=1.5
    )
    given = jax.random.normal(jax.random.key(0), (5, 3, 8)), jnp.array([0, 1, 1, 7, 2000])
    np.testing.assert_allclose(rotary.rotated_by_product(*given), rotary.rotated(*given), atol=1e-6)
    program = jax.make_jaxpr(rotary.rotated_by_product)(*given)
    (product,) = (each for each in program.eqns if each.primitive is jax.lax.dot_general_p)
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_unbound_projections_sum_in_float32(rows, dtype):
    x = jax.random.normal(jax.random.key(0), (rows, 320), dtype)
    kernel = jax.random.normal(jax.random.key(1), (48, 320), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    y = products.project(x, kernel)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, atol=2e-4)


def test_a_norm_keeps_its_statistics_in_float32():
    config = models.parse_config(BLOOM | {"hidden_size": 192, "layer_norm_epsilon": 1e-3})
    norm = layers.LayerNorm(config)
    x = 100 + jax.random.normal(jax.random.key(0), (5, 192), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5)
