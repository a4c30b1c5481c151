"""Mixtures of experts against a loop over tokens, and the ways to multiply runs of rows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import models
from jaxserve.models import experts, layers
from jaxserve.models.products import BoundWeight
from jaxserve.runner import cpu_products, matmul
from jaxserve.weights import narrow
from pallas_kernels.cpu import build, product
from pallas_kernels.tpu import grouped
from sharding import mesh as meshes
from sharding import specs
from tests.jaxserve.models.configs import CONFIGS

WAYS = {"ragged": experts.ragged_product, "tiles": cpu_products.multiply_runs, "native": product.multiply_runs}
# What GPUs use; in the interpreter, rows beyond the runs are NaN. More of it is in tests/pallas_kernels.
GROUPED = partial(matmul._runs_gpu, device_kind="", interpret=True)


# Over two devices: half of the experts on each, or half of each expert's inner state.
APART = {
    "kernels of few experts": {"expert": "tensor", "ffn": None},
    "kernels of parts": {"expert": None, "ffn": "tensor"},
}


def runs(rows: int, count: int, seed: int = 0):
    """x [rows, 33], kernels [count, 50, 33], sizes that leave two rows over and some experts empty."""
    rng = np.random.default_rng(seed)
    x, kernels = rng.standard_normal((rows, 33)), rng.standard_normal((count, 50, 33))
    share = rng.dirichlet(np.full(count, 0.3))
    return x.astype(np.float32), kernels.astype(np.float32), rng.multinomial(rows - 2, share).astype(np.int32)


def by_hand(x, kernels, sizes):
    y, start = np.zeros((len(x), kernels.shape[1])), 0
    for kernel, size in zip(kernels, sizes, strict=True):
        y[start : start + size] = x[start : start + size].astype(np.float64) @ kernel.T.astype(np.float64)
        start += size
    return y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 19, 70, 300])
@pytest.mark.parametrize("way", WAYS)
def test_runs_are_multiplied_by_their_kernels(way, rows, dtype):
    if way == "native" and (refusal := build.refusal()) is not None:
        pytest.skip(f"no native product: {refusal}")
    x, kernels, sizes = runs(rows, 6)
    x, kernels = jnp.asarray(x, dtype), jnp.asarray(kernels, dtype)
    y = np.asarray(jax.jit(WAYS[way])(x, kernels, sizes))
    expected = by_hand(np.asarray(x, np.float32), np.asarray(kernels, np.float32), sizes)
    np.testing.assert_allclose(y, expected, atol=1e-4 if dtype == "float32" else 2e-2)
    np.testing.assert_array_equal(y[sizes.sum() :], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [10, 100])
def test_a_row_is_the_same_whatever_the_others(rows, dtype):
    if (refusal := build.refusal()) is not None:
        pytest.skip(f"no native product: {refusal}")
    x, kernels, _ = runs(rows, 6)
    x, kernels = jnp.asarray(x, dtype), jnp.asarray(kernels, dtype)
    multiply = jax.jit(product.multiply_runs)
    alone, among = (multiply(x, kernels, np.int32([size, rows - size, 0, 0, 0, 0])) for size in (1, rows - 1))
    np.testing.assert_array_equal(alone[0], among[0])
    np.testing.assert_array_equal(alone[-1], among[-1])


@pytest.mark.parametrize("way", [WAYS["ragged"], WAYS["tiles"], GROUPED], ids=["ragged", "tiles", "grouped"])
def test_int8_kernels_are_scaled(way):
    x, kernels, sizes = runs(19, 6)
    like = narrow.shapes_of(narrow.BY_ROW, kernels.shape, np.float32, "a")
    held = narrow.quantize(kernels, like, np)
    wide = held.values * held.scales[..., None]
    y = np.asarray(jax.jit(way)(x, jax.tree.map(jnp.asarray, held), sizes))
    used = sizes.sum()
    np.testing.assert_allclose(y[:used], by_hand(x, wide, sizes)[:used], atol=1e-4)


@pytest.mark.parametrize("shift", [-200, 0, 200])
@pytest.mark.parametrize("add_up", [True, False])
def test_weights_depend_on_differences_of_logits(add_up, shift):
    logits = jnp.float32([[1, 3, 2, 0]])
    chosen = jnp.float32([[3, 2]])
    weights, total = experts.shares(chosen + shift, logits + shift, add_up)
    weights, among = np.asarray(weights / total)[0], [3, 2] if add_up else [1, 3, 2, 0]
    np.testing.assert_allclose(weights, np.exp([3, 2]) / np.exp(among).sum(), rtol=1e-5)


SLOW_WAYS = ("kernels of many tokens", *APART)


@pytest.mark.parametrize(
    "way", ["runs", "kernels", *(pytest.param(way, marks=pytest.mark.interpret) for way in SLOW_WAYS)]
)
@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mixtral", "qwen3_moe"))]
)
def test_every_token_gets_what_its_experts_give(name, way, monkeypatch):
    """As runs of rows, and in the kernels of TPUs, which choose, also over two devices."""
    model = models.build(models.parse_config(CONFIGS[name]))
    config = model.config
    layer = jax.tree.map(
        lambda leaf: jnp.asarray(leaf + 0.1 * np.sin(np.arange(leaf.size)).reshape(leaf.shape), leaf.dtype),
        model.init(0, jnp.float32),
    )
    part = layer["layers"][0]["experts"]
    module = models.family(name).Block(model.padded_config, rngs=nnx.Rngs(0), layer=0).experts
    positions = jnp.array([0, 1, 2, -1, 4, 5, -1] + [7] * (123 if way == "kernels of many tokens" else 0))
    x = jax.random.normal(jax.random.key(1), (len(positions), config.hidden_size))
    for piece in ("router", "gate", "up", "down"):
        for leaf, value in part[piece].items():
            getattr(getattr(module, piece), leaf).set_value(value)
    logits = module.router(x)
    largest, chosen = jax.lax.top_k(logits, config.experts_per_token)
    weights, total = experts.shares(largest, logits, module.weights_add_up)
    weights, chosen = np.asarray(weights / total), np.asarray(chosen)
    if way != "runs":
        products = matmul.DeviceProducts(native=None, device_kind="TPU v5 lite")
        if way in APART:
            spec = specs.default(name)
            spec = replace(spec, rules={**spec.rules, **APART[way]})
            products = replace(products, mesh=meshes.make_mesh({"tensor": 2}), spec=spec)
        monkeypatch.setattr(grouped, "mixture", partial(grouped.mixture, interpret=True))
        monkeypatch.setattr(layers, "project", None)  # the kernel makes the logits
        for piece in ("gate", "up", "down"):
            kernel = getattr(module, piece).kernel
            kernel.set_value(BoundWeight(kernel.get_raw_value(), products))
    y = np.asarray(module(x, positions))
    for token in [*range(7), len(x) - 1]:
        expected = np.zeros(config.hidden_size)
        for weight, expert in zip(weights[token], chosen[token], strict=True) if positions[token] >= 0 else ():
            each = {piece: part[piece]["kernel"][expert] @ (x[token]) for piece in ("gate", "up")}
            each = {piece: value + part[piece].get("bias", np.zeros((99, 1)))[expert] for piece, value in each.items()}
            inner = module.activation(each["gate"], each["up"])
            bias = part["down"].get("bias", np.zeros((99, 1)))[expert]
            expected += weight * (np.asarray(part["down"]["kernel"][expert] @ inner) + np.asarray(bias))
        np.testing.assert_allclose(y[token], expected, atol=1e-4, err_msg=f"token {token}")


@pytest.mark.parametrize("way", [WAYS["ragged"], GROUPED], ids=["ragged", "grouped"])
def test_an_expert_elsewhere_adds_nothing(way):
    x, kernels, _ = runs(5, 4)
    chosen, weights = np.array([[0, 3], [1, 2], [3, 0], [4, 4], [2, 1]], np.int32), np.full((5, 2), 0.5, np.float32)
    stack = {"gate": kernels, "up": kernels, "down": kernels.swapaxes(1, 2)}
    whole, first, second = (
        np.asarray(
            experts.compute(
                *jax.tree.map(jnp.asarray, (x, chosen, weights)),
                {name: jnp.asarray(leaf[part]) for name, leaf in stack.items()},
                activation=experts.gated,
                product=way,
                first=part.start,
            )
        )
        for part in (slice(0, 4), slice(0, 2), slice(2, 4))
    )
    np.testing.assert_allclose(first + second, whole, atol=1e-3)
    np.testing.assert_array_equal(whole[3], 0)
    assert np.abs(first).sum() > 0
    assert np.abs(second).sum() > 0
