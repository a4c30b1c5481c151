"""The native products: correct, used by the layers, and independent of the other rows in a batch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup
from jaxserve.config import EngineConfig
from jaxserve.models import products
from jaxserve.runner import matmul
from pallas_kernels.cpu import build, product


@pytest.fixture(autouse=True)
def _native():
    if (refusal := build.refusal()) is not None:
        pytest.skip(f"no native product: {refusal}")


def draw(seed, *dims, dtype=jnp.bfloat16):
    return np.random.default_rng(seed).standard_normal(dims).astype(dtype)


FEW, _ = product.limits(np.dtype(jnp.bfloat16))  # rows of bfloat16; more are multiplied by another call
FEW_FLOAT32, MANY_FLOAT32 = product.limits(np.dtype(np.float32))
VNNI = build.level().endswith("bf16")  # and so with AVX512-VNNI
SIZES = [(1024, 96), (9000, 100), (2500, 33), (40, 70), (7, 5), (1, 1)]


def by_rows(multiply, row_counts):
    """One program of the products of the last rows of x, for each of the counts: each is compiled in 30 ms."""
    program = jax.jit(lambda x, *kernel: [multiply(x[-rows:], *kernel) for rows in row_counts])
    return lambda *arguments: [np.asarray(part) for part in program(*arguments)]


def check(inner, out, row_counts, dtype=jnp.bfloat16):
    """The largest batch is correct, and every smaller one equals its rows of that result, to the bit."""
    kernel, x = draw(0, out, inner, dtype=dtype), draw(1, max(row_counts), inner, dtype=dtype)
    expected = x.astype(np.float64) @ kernel.astype(np.float64).T
    *fewer, whole = by_rows(product.multiply, sorted(row_counts))(x, kernel)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6 * inner)
    for part in fewer:
        np.testing.assert_array_equal(part, whole[-len(part) :])


@pytest.mark.parametrize(("inner", "out"), SIZES)
def test_few_rows(inner, out):
    check(inner, out, range(1, FEW + 1))


@pytest.mark.parametrize(("inner", "out"), SIZES)
def test_few_float32_rows(inner, out):
    check(inner, out, range(1, FEW_FLOAT32 + 1), dtype=np.float32)


@pytest.mark.skipif(not MANY_FLOAT32, reason="more rows of float32 are XLA's here")
@pytest.mark.parametrize(("inner", "out"), SIZES)
def test_many_float32_rows(inner, out):
    check(inner, out, (FEW_FLOAT32 + 1, 16, 31, 48, 49, 64, 127, MANY_FLOAT32), dtype=np.float32)
    assert product.multiply(jnp.zeros((MANY_FLOAT32 + 1, inner)), jnp.zeros((out, inner))) is None


@pytest.mark.parametrize(("inner", "out"), SIZES)
def test_many_rows(inner, out):
    check(inner, out, (17, 31, 48, 49, 64, 130, 257))


@pytest.mark.parametrize("out", [3000, 3008])  # results of the latter are whole lines, stored past the caches
def test_many_rows_over_threads(out):
    check(4096, out, (17, 200))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("dtype", "rows", "call"),
    [
        (jnp.bfloat16, 1, build.PRODUCT),
        (jnp.bfloat16, 8, build.PRODUCT),
        (jnp.bfloat16, 17, build.PRODUCT_MANY),
        (np.float32, FEW_FLOAT32, build.PRODUCT),
        (np.float32, FEW_FLOAT32 + 1, build.PRODUCT_FLOAT if MANY_FLOAT32 else None),
        (np.float32, (MANY_FLOAT32 or FEW_FLOAT32) + 1, None),
    ],
)
@pytest.mark.parametrize("looped", [True, False])
def test_layers_use_it(dtype, rows, call, looped):
    taken = matmul.DeviceProducts(native=product.native(np.dtype(dtype)), tiles=looped)
    kernels = [jnp.asarray(draw(i, 48, 64, dtype=dtype)) for i in range(3)]
    x = jnp.asarray(draw(9, rows, 64, dtype=dtype))

    def step(x, place):
        if looped:
            stacked = products.stacked([{"kernel": kernel} for kernel in kernels], jnp.stack)
            return products.project(x, products.looped(products.bind_stacked(stacked, taken))(place)["kernel"])
        return products.project(x, products.bind({"kernel": kernels[1]}, taken)["kernel"])

    program = jax.jit(step).lower(x, jnp.int32(1)).compile()
    assert (call is None) == ("jaxserve_product" not in program.as_text())
    assert call is None or f'"{call}"' in program.as_text()
    np.testing.assert_allclose(program(x, jnp.int32(1)), products.project(x, kernels[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, 9),
        ({"stages": 2}, 9),
        ({"tensor": 2}, 0),
        ({"quantize": "int8"}, 9 if VNNI else 0),
        ({"quantize": "int8", "buckets": (65,)}, 1 if VNNI else 0),
        ({"quantize": "int4"}, 9 if VNNI else 0),
        ({"buckets": (17,)}, 9),
        ({"dtype": "float32"}, 9),
        ({"dtype": "float32", "buckets": (17,)}, 9 if MANY_FLOAT32 else 1),  # the head: as many rows as are chosen for
        ({"dtype": "float32", "buckets": (256,)}, 1),
    ],
)
def test_calls_per_program(changes, calls):
    """One call a product: four in each of two layers, and the head's, which has fewer rows than a bucket."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
    model = models.build(models.parse_config({"model_type": "gpt2", "eos_token_id": 0, **sizes}))
    config = EngineConfig(**{"dtype": "bfloat16", "max_rows": 4, "buckets": (4,), **changes})
    (stages,), _ = startup.replica_programs(config, model)
    (bucket,) = config.buckets
    texts = [stage.lower_forward(bucket, 16).as_text() for stage in stages]
    texts.append(stages[-1].lower_head(4).as_text())
    assert sum(len(re.findall(rf"@{build.PRODUCT}\w*\(", text)) for text in texts) == calls


def test_none_for_float16():
    assert product.native(np.dtype(np.float16)) is None


def draw_int4(inner, out, group, dtype, zeros):
    """(values, scales, zeros) of a kernel with groups."""
    rng, counts = np.random.default_rng(inner), (out, inner // group)
    values, scales = rng.integers(-8, 8, (out, inner)).astype(jnp.int4), draw(2, *counts, dtype=dtype)
    return values, scales, rng.integers(-7, 9, counts).astype(np.int8) if zeros else None


@pytest.mark.skipif(not VNNI, reason="no AVX512-VNNI here")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("inner", "out", "group", "zeros"),
    [
        (4096, 100, 32, False),
        (4224, 33, 128, True),
        (2496, 15, 96, False),
        (8992, 17, 8992, True),
        (64, 1, 64, False),
        (96, 2101, 32, True),  # several blocks of outputs for a thread
    ],
)
def test_int4_kernels(inner, out, group, zeros, dtype):
    """x loses what 8 bits of a group cannot hold; other rows change nothing."""
    values, scales, points = draw_int4(inner, out, group, dtype, zeros)
    x = draw(1, 19, inner, dtype=dtype)
    x[3], x[4, : min(inner, 8)] = 0, 60
    wide = values.astype(np.float64).reshape(out, -1, group)
    wide -= 0 if points is None else points.astype(np.float64)[..., None]
    wide = (wide * scales.astype(np.float64).reshape(out, -1)[..., None]).reshape(out, inner)
    exact = x.astype(np.float64) @ wide.T
    multiply = by_rows(product.multiply_quantized, (1, 2, 7, 8, 9, 16, 19))
    *fewer, whole = multiply(x, values, scales, points)
    largest = np.abs(x.astype(np.float64)).reshape(19, -1, group).max(-1)
    step = np.repeat(largest, group, axis=1) / 127
    spread = np.sqrt((step / 2) ** 2 @ (wide**2).T) + 1e-5 * np.abs(x.astype(np.float64)) @ np.abs(wide).T
    assert (np.abs(whole - exact) <= 4 * spread + 1e-6).all()
    assert not whole[3].any()
    for part in fewer:
        np.testing.assert_array_equal(part, whole[-len(part) :])
    for wrong in (np.nan, np.inf):
        x[1, inner // 2] = wrong
        broken = multiply(x, values, scales, points)[-1]
        assert np.isnan(broken[1]).all()
        np.testing.assert_array_equal(np.delete(broken, 1, 0), np.delete(whole, 1, 0))


@pytest.mark.skipif(not VNNI, reason="no AVX512-VNNI here")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize(("inner", "out"), [(4096, 100), (200, 403), (40, 1), (9000, 17)])
def test_int8_kernels(inner, out, dtype):
    """x loses what 15 bits of its largest number cannot hold; other rows change nothing."""
    values = np.random.default_rng(inner).integers(-127, 128, (out, inner), np.int8)
    scales, x = draw(2, out, dtype=dtype), draw(1, 19, inner, dtype=dtype)
    x[3], x[4, :8] = 0, 60
    wide = values.astype(np.float64) * scales.astype(np.float64)[:, None]
    exact = x.astype(np.float64) @ wide.T
    multiply = by_rows(product.multiply_quantized, (*range(1, 10), 19))
    *fewer, whole = multiply(x, values, scales)
    step = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127 / 254
    assert (np.abs(whole - exact) <= 4 * step * np.sqrt((wide**2).sum(-1)) + 1e-6 * np.abs(exact)).all()
    assert not whole[3].any()
    for part in fewer:
        np.testing.assert_array_equal(part, whole[-len(part) :])
    for wrong in (np.nan, np.inf):
        x[1, inner // 2] = wrong
        broken = multiply(x, values, scales)[-1]
        assert np.isnan(broken[1]).all()
        np.testing.assert_array_equal(np.delete(broken, 1, 0), np.delete(whole, 1, 0))


@pytest.mark.skipif(not VNNI, reason="no AVX512-VNNI here")
def test_what_the_quantized_products_do_not_multiply():
    def multiplies(rows, values, scales, dtype=np.float32):
        return product.multiply_quantized(jnp.zeros((rows, values.shape[1]), dtype), values, scales) is not None

    values = jnp.zeros((4, 96), jnp.int4)
    assert multiplies(2, values, jnp.zeros((4, 3)))
    assert not multiplies(2, values, jnp.zeros((4, 6)))
    values, scales = values.astype(jnp.int8), jnp.zeros(4)
    assert multiplies(128, values, scales)
    assert not multiplies(129, values, scales)
    assert multiplies(64, values, scales, jnp.bfloat16)
    assert not multiplies(65, values, scales, jnp.bfloat16)
    assert not multiplies(2, values.astype(jnp.float8_e4m3fn), scales)
