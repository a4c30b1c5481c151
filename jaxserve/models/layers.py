"""The layers that the families are composed of.

Every layer computes its sums in float32 and leaves the rounding to its caller, who does it once. T is the number of
flat tokens of an iteration, H the hidden size, N the heads, D the size of a head, V the vocabulary, F the
feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.schema import ModelConfig

# attend(q [T, N, D], k [T, K, D], v [T, K, D], cache) -> (out [T, N, D], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "silu": nnx.silu,
    "tanh": jnp.tanh,
}


def contract(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Dot product over one axis of each, summed and returned in float32.

    The precision is explicit: by default float32 would mean TF32 on some devices and bfloat16 passes on others.
    """
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _two_rows(x: jax.Array) -> jax.Array:
    """Pads a single row to two: XLA's CPU matmul of one bfloat16 row is 16 times slower than that of two."""
    return jnp.pad(x, ((0, 1), (0, 0))) if x.shape[0] == 1 and x.dtype != jnp.float32 else x


class Linear(nnx.Module):
    """x [T, in] -> float32[T, out]: x times kernel [in, out] plus bias [out]."""

    def __init__(self, in_features: int, out_features: int, config: ModelConfig, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.kernel = nnx.Param(normal(rngs.params(), (in_features, out_features)))
        self.bias = nnx.Param(jnp.zeros(out_features))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = contract(_two_rows(x), self.kernel[...], (1, 0))[: x.shape[0]]
        return y + self.bias[...].astype(jnp.float32)


class LayerNorm(nnx.Module):
    """x [T, H] -> [T, H] in x's dtype; statistics in float32."""

    def __init__(self, config: ModelConfig) -> None:
        self.scale = nnx.Param(jnp.ones(config.hidden_size))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size))
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        return (y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class Table(nnx.Module):
    """Rows by number: table [rows, H]. Serves as embedding and, for the token table, as the head."""

    def __init__(self, rows: int, config: ModelConfig, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.table = nnx.Param(normal(rngs.params(), (rows, config.hidden_size)))

    def __call__(self, index: jax.Array) -> jax.Array:
        """index [T] -> [T, H]."""
        return self.table[...].at[index].get(mode="clip")


def head(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [S, H], table [V, H] -> float32[S, V] logits.

    The table is the left operand: it is read in the order in which it lies, and on a CPU this is up to twice as fast
    as x times the table's transpose.
    """
    return contract(table, _two_rows(x), (1, 1)).T[: x.shape[0]]


def split_heads(qkv: jax.Array, config: ModelConfig, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, N * 3 * D] -> q, k, v, each [T, N, D].

    A head's q, k and v stand together, so a device that holds some of the columns holds whole heads.
    """
    parts = qkv.astype(dtype).reshape(-1, config.num_heads, 3, config.head_dim)  # [T, N, 3, D]
    return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
