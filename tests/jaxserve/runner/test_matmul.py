"""The matmul that the runner binds to weights; `tests/pallas_kernels/test_cpu_product.py` has the native products."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.products import Quantized, bind, project
from jaxserve.runner import matmul
from jaxserve.weights import int8_weights


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_sums_in_float32(rows, dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (rows, 320), dtype)
    kernel = jax.random.normal(jax.random.key(1), (48, 320), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    bound = bind({"kernel": kernel}, matmul.DeviceProducts(native=None))["kernel"]
    for y in (project(x, bound), jax.jit(lambda x: project(x, bound))(x)):
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, exact, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiles", [False, True])
def test_int8_matrix(rows, dtype, tiles) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 96)) * rng.choice([1, 1, 1, 60], 96), dtype)  # with outliers
    kernel = int8_weights.quantize(rng.standard_normal((300, 96)).astype(np.float32), dtype, np)
    exact = np.asarray(x, np.float64) @ (kernel.values.astype(np.float64) * kernel.scales.astype(np.float64)[:, None]).T
    product = jax.jit(partial(matmul.DeviceProducts(native=None, tiles=tiles), dtype=x.dtype))
    matrix = Quantized(*map(jnp.asarray, kernel))
    out = product(x, matrix)
    np.testing.assert_allclose(out, exact, atol=3e-4 * np.abs(exact).max(), rtol=1e-4)
    broken = product(x.at[0, 3].set(jnp.nan), matrix)
    assert np.isnan(broken[0]).all()
    np.testing.assert_allclose(broken[1:], out[1:], rtol=1e-5, atol=1e-5)
