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
SIZES = [(1024, 96), (9000, 100), (2500, 33), (40, 70), (7, 5), (1, 1)]


def check(inner, out, row_counts, dtype=jnp.bfloat16):
    """The largest batch is correct, and every smaller one equals its rows of that result, to the bit."""
    kernel, x = draw(0, out, inner, dtype=dtype), draw(1, max(row_counts), inner, dtype=dtype)
    expected = x.astype(np.float64) @ kernel.astype(np.float64).T
    whole = np.asarray(jax.jit(product.multiply)(x, kernel))
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6 * inner)
    for rows in row_counts:
        np.testing.assert_array_equal(jax.jit(product.multiply)(x[-rows:], kernel), whole[-rows:])


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


def test_many_rows_over_threads():
    check(4096, 3000, (17, 200))


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
            weights = products.looped([products.bind({"kernel": kernel}, taken) for kernel in kernels])
            return products.project(x, weights(place)["kernel"])
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
        ({"quantize": "int8"}, 0),
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
