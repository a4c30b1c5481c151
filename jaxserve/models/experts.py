"""Mixtures of experts: a router picks a few of many feed-forwards for each token.

Sources: arXiv:1701.06538, arXiv:2401.04088.

Tokens are sorted by expert, and each expert multiplies its run of them. No token is dropped, and padding goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jaxserve.models.layers import Linear
from jaxserve.models.products import BoundWeight, Products, Quantized, precision_for
from jaxserve.models.schema import ModelConfig

# Logical axes of an `Experts` module's parameters. Biases of `down` are added to tokens, not to each device's share.
# "router" is the axis of experts in what every token needs of all of them; split, it takes exchanges in each layer.
AXES = {
    "router": {"kernel": ("router", "embed"), "bias": ("router",)},
    "gate": {"kernel": ("expert", "ffn", "embed"), "bias": ("expert", "ffn")},
    "up": {"kernel": ("expert", "ffn", "embed"), "bias": ("expert", "ffn")},
    "down": {"kernel": ("expert", "embed", "ffn"), "bias": ("router", "embed")},
}

Kernels = Mapping[str, Any]  # gate, up, down [E, out, in], and gate_bias, up_bias [E, F] or None
# (x [R, in], kernels [E, out, in], sizes [E]) -> float32[R, out]: sizes[e] rows by kernel e, one run after another.
# Later rows hold anything.
RunsProduct = Callable[[jax.Array, Any, jax.Array], jax.Array]
Activation = Callable[[jax.Array, jax.Array], jax.Array]  # of (gate, up), both float32


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU (arXiv:2002.05202)."""
    return nnx.silu(gate) * up


def shares(
    chosen: Float32[jax.Array, "T n"], logits: Float32[jax.Array, "T E"], add_up: bool
) -> tuple[Float32[jax.Array, "T n"], Float32[jax.Array, "T 1"]]:
    """Weights of a token's experts, and what to divide them by.

    Args:
      chosen: logits of these experts, the largest first.
      logits: of all experts.
      add_up: whether the weights are the softmax of those chosen, or their part of the softmax of all.
    """
    most = chosen[:, :1]
    each = jnp.exp(chosen - most)
    return each, jnp.sum(each if add_up else jnp.exp(logits - most), -1, keepdims=True)


class Experts(nnx.Module):
    """x [T, H], positions [T] -> float32[T, H].

    Args:
      bias: whether router and projections have biases.
      weights_add_up: whether the weights of a token's experts add up to 1 (see `shares`).
      activation: of (gate, up), both float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        weights_add_up: bool = True,
        activation: Activation = gated,
    ) -> None:
        count, hidden, ffn = config.num_experts, config.hidden_size, config.ffn_size
        self.config, self.weights_add_up, self.activation = config, weights_add_up, activation
        self.router = Linear(hidden, count, config, rngs, bias=bias)
        self.gate = StackedLinear(count, hidden, ffn, config, rngs, bias=bias)
        self.up = StackedLinear(count, hidden, ffn, config, rngs, bias=bias)
        self.down = StackedLinear(count, ffn, hidden, config, rngs, bias=bias)

    def __call__(self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"]) -> Float32[jax.Array, "T H"]:
        kernels = {name: getattr(self, name).kernel.get_raw_value() for name in ("gate", "up", "down")}
        kernels |= {f"{name}_bias": getattr(self, name).raw_bias for name in ("gate", "up")}
        products = kernels["gate"].matmul if isinstance(kernels["gate"], BoundWeight) else None
        kernels = {name: _unbound(leaf) for name, leaf in kernels.items()}
        count, per_token, is_padding = self.config.num_experts, self.config.experts_per_token, positions[:, None] < 0
        if (y := self._routed(products, x, positions, kernels)) is not None:
            return y
        logits = self.router(x)
        chosen, experts = jax.lax.top_k(logits, per_token)
        experts = jnp.where(is_padding, count, experts.astype(jnp.int32))
        weights, total = shares(chosen, logits, self.weights_add_up)
        if products is None:
            y = compute(x, experts, weights, kernels, activation=self.activation, product=ragged_product)
        else:
            y = products.experts(self.activation, x, experts, weights, kernels)
        if (bias := _unbound(self.down.raw_bias)) is not None:
            bias = bias.astype(jnp.float32)[jnp.minimum(experts, count - 1)]
            y += jnp.einsum("tk,tkh->th", weights, bias, precision="highest")
        # A TPU does this where it adds the result to the residual. For the weights, it needs an operation of its own.
        return jnp.where(is_padding, 0, y / total)

    def _routed(
        self, products: Products | None, x: jax.Array, positions: jax.Array, kernels: Kernels
    ) -> jax.Array | None:
        if products is None:
            return None
        bias = None if self.router.bias is None else self.router.bias.get_raw_value()
        return products.routed_experts(
            self.activation,
            x,
            positions,
            {"kernel": _unbound(self.router.kernel.get_raw_value()), "bias": bias},
            {**kernels, "down_bias": _unbound(self.down.raw_bias)},
            per_token=self.config.experts_per_token,
            add_up=self.weights_add_up,
        )


def _unbound(leaf: Any) -> Any:
    return leaf.matrix if isinstance(leaf, BoundWeight) else leaf


class StackedLinear(nnx.Module):
    """The projections of all experts: kernel [E, out, in], bias [E, out] or none."""

    def __init__(
        self, count: int, in_features: int, out_features: int, config: ModelConfig, rngs: nnx.Rngs, *, bias: bool
    ) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.kernel = nnx.Param(normal(rngs.params(), (count, out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros((count, out_features))) if bias else None

    @property
    def raw_bias(self) -> Any:
        """The bias's value, or None."""
        return None if self.bias is None else self.bias.get_raw_value()


def compute(
    x: Float[jax.Array, "T H"],
    experts: Int32[jax.Array, "T k"],
    weights: Float32[jax.Array, "T k"],
    kernels: Kernels,
    first: jax.Array | int = 0,
    *,
    activation: Activation,
    product: RunsProduct,
) -> Float32[jax.Array, "T H"]:
    """The weighted sum of what each token's experts give, of those whose kernels are here.

    Args:
      experts: of each token; none for a number that is not one of an expert.
      first: number of the first expert in `kernels`.
    """
    per_token, count = experts.shape[1], kernels["gate"].shape[0]
    here = experts.reshape(-1) - first
    here = jnp.where((here >= 0) & (here < count), here, count)  # those elsewhere come last
    place = jnp.arange(len(here), dtype=jnp.int32)
    expert, order, weight = jax.lax.sort((here, place, weights.reshape(-1)), num_keys=1)
    sizes = jnp.sum(here[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    rows = x.at[order // per_token].get(mode="promise_in_bounds")

    def project(name: str, rows: jax.Array) -> jax.Array:
        y, bias = product(rows, kernels[name], sizes), kernels.get(f"{name}_bias")
        return y if bias is None else y + bias.astype(jnp.float32)[jnp.minimum(expert, count - 1)]

    inner = activation(project("gate", rows), project("up", rows)).astype(x.dtype)
    y = jnp.where(expert[:, None] < count, project("down", inner) * weight[:, None], 0)
    back = jnp.zeros_like(order).at[order].set(place, mode="promise_in_bounds", unique_indices=True)
    return y.at[back].get(mode="promise_in_bounds").reshape(len(x), per_token, -1).sum(1)


def ragged_product(
    x: Float[jax.Array, "R in"], kernels: Float[jax.Array, "E out in"] | Quantized, sizes: Int32[jax.Array, " E"]
) -> Float32[jax.Array, "R out"]:
    """`RunsProduct` as XLA's ragged dot."""
    values = _values(kernels, x.dtype)
    axes = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    precision = precision_for(x.dtype)
    y = jax.lax.ragged_dot_general(x, values, sizes, axes, precision=precision, preferred_element_type=jnp.float32)
    return scaled(y, kernels, sizes)


def _values(kernels: Any, dtype: DTypeLike) -> jax.Array:
    """Kernels without the scales of int8 ones (see `scaled`)."""
    return kernels.values.astype(dtype) if isinstance(kernels, Quantized) else kernels


def scaled(y: Float32[jax.Array, "R out"], kernels: Any, sizes: Int32[jax.Array, " E"]) -> Float32[jax.Array, "R out"]:
    """A product with the values of int8 kernels, by their scales; of others the product itself."""
    if not isinstance(kernels, Quantized):
        return y
    expert = jnp.sum(jnp.cumsum(sizes) <= jnp.arange(len(y))[:, None], axis=1)
    return y * kernels.scales.astype(jnp.float32)[jnp.minimum(expert, len(sizes) - 1)]
