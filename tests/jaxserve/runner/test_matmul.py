"""The matmul that the runner binds to weights; `tests/pallas_kernels/test_cpu_product.py` has the native products."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.products import bind, dot, project, widened
from jaxserve.models.schema import NarrowFormat
from jaxserve.runner import matmul
from jaxserve.weights import narrow


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
    matrix = rng.standard_normal((300, 96)).astype(np.float32)
    kernel = narrow.quantize(matrix, narrow.shapes_of(narrow.BY_ROW, matrix.shape, dtype, "a"), np)
    exact = np.asarray(x, np.float64) @ (kernel.values.astype(np.float64) * kernel.scales.astype(np.float64)[:, None]).T
    product = jax.jit(partial(matmul.DeviceProducts(native=None, tiles=tiles), dtype=x.dtype))
    matrix = jax.tree.map(jnp.asarray, kernel)
    out = product(x, matrix)
    np.testing.assert_allclose(out, exact, atol=3e-4 * np.abs(exact).max(), rtol=1e-4)
    broken = product(x.at[0, 3].set(jnp.nan), matrix)
    assert np.isnan(broken[0]).all()
    np.testing.assert_allclose(broken[1:], out[1:], rtol=1e-5, atol=1e-5)


def draw_int4(outputs, inputs, group, dtype, *, zeros):
    """A matrix in int4."""
    matrix = np.random.default_rng(outputs).standard_normal((outputs, inputs)).astype(np.float32)
    form = NarrowFormat(dtype="int4", group=group, zeros=zeros)
    made = narrow.quantize(matrix, narrow.shapes_of(form, matrix.shape, dtype, "a"), np)
    if zeros:
        made = made._replace(zeros=np.random.default_rng(inputs).integers(-7, 9, made.scales.shape).astype(np.int8))
    return jax.tree.map(jnp.asarray, made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_spread_by_ones_are_exact(dtype) -> None:
    matrix = draw_int4(24, 192, 32, dtype, zeros=False)
    np.testing.assert_array_equal(matmul._widened_by_ones(matrix, dtype), widened(matrix, dtype))


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_matrix(rows, dtype, zeros) -> None:
    """More outputs than a tile, which is widened at a time."""
    x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 96)), dtype)
    matrix = draw_int4(300, 96, 32, dtype, zeros=zeros)
    exact = np.asarray(x, np.float64) @ np.asarray(widened(matrix, jnp.float32), np.float64).T
    product = jax.jit(partial(matmul.DeviceProducts(native=None), dtype=x.dtype))
    atol = (1e-5 if dtype == "float32" else 5e-3) * np.abs(exact).max()
    np.testing.assert_allclose(product(x, matrix), exact, atol=atol)
    np.testing.assert_allclose(project(x, matrix), exact, atol=atol)
    np.testing.assert_allclose(matmul._dot_groups(x, matrix, jnp.float32), exact, atol=atol)  # of accelerators


@pytest.mark.parametrize("form", [None, narrow.BY_ROW, NarrowFormat(dtype="int4", group=32)], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_outputs_of_a_token_have_the_shape_asked_for(rows, form) -> None:
    x = jax.random.normal(jax.random.key(0), (rows, 96))
    matrix = jax.random.normal(jax.random.key(1), (60, 96))
    if form is not None:
        matrix = narrow.quantize(matrix, narrow.shapes_of(form, matrix.shape, x.dtype, "a"), jnp)
    bound = bind({"kernel": matrix}, matmul.DeviceProducts(native=None))["kernel"]
    for kernel in (matrix, bound):
        y = project(x, kernel, shape=(5, 4, 3))
        np.testing.assert_allclose(y, project(x, kernel).reshape(rows, 5, 4, 3), rtol=1e-6)


def test_a_kernel_of_more_axes_gives_their_shape() -> None:
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((7, 96), (5, 4, 3, 96))))
    np.testing.assert_allclose(
        dot(x, kernel, jnp.float32), dot(x, kernel.reshape(60, 96), jnp.float32).reshape(7, 5, 4, 3)
    )


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("tiles", [False, True])
def test_float8_matrix(rows, tiles) -> None:
    rng = np.random.default_rng(rows)
    x, matrix = rng.standard_normal((rows, 96)).astype(np.float32), rng.standard_normal((300, 96)).astype(np.float32)
    like = narrow.shapes_of(NarrowFormat(dtype="float8_e4m3fn"), matrix.shape, np.float32, "a")
    held = narrow.quantize(matrix, like, np)
    wide = np.asarray(held.values).astype(np.float64) * held.scales.astype(np.float64)[:, None]
    assert 0.01 < (np.abs(wide - matrix) / np.abs(matrix).max(axis=1, keepdims=True)).max() < 1 / 28
    np.testing.assert_array_equal(np.abs(np.asarray(held.values).astype(np.float32)).max(axis=1), 448)
    held = jax.tree.map(jnp.asarray, held)
    product = jax.jit(partial(matmul.DeviceProducts(native=None, tiles=tiles), dtype=jnp.float32))
    np.testing.assert_allclose(product(x, held), x.astype(np.float64) @ wide.T, atol=1e-4)
    np.testing.assert_allclose(product(x, held), project(jnp.asarray(x), held), atol=1e-4)
