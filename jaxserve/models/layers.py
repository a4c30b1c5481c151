"""The layers that the model families share.

Every layer sums in float32; its caller rounds the result once. T is the number of flat tokens of an iteration, H the
hidden size, N the heads, D the head size, V the vocabulary, F the feed-forward size.

Matrices lie [out, in], because a CPU reads them in order when it multiplies few rows; accelerators take either order.
The runner binds weights to a matmul for its devices (`bind`); unbound weights are multiplied by `dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from jaxserve.models.schema import ModelConfig

# attend(q [T, N, D], k [T, K, D], v [T, K, D], cache) -> (out [T, N, D], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# matmul(x [T, in], matrix [out, in], dtype) -> float32[T, out]; the matrix may be Quantized (see `project`)
Matmul = Callable[[jax.Array, Any, DTypeLike], jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_new": lambda x: nnx.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "silu": nnx.silu,
    "tanh": jnp.tanh,
}


class Quantized(NamedTuple):
    """An int8 matrix: row r is about values[r] * scales[r].

    Scales have the dtype that the model computes in.
    """

    values: Any  # int8[out, in]
    scales: Any  # [out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class BoundWeight:
    """A matrix with the function that multiplies by it (see `bind`)."""

    matrix: Float[jax.Array, "out in"] | Quantized
    matmul: Matmul

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape


def bind(weights: Any, matmul: Matmul) -> Any:
    """The same tree of weights, with `matmul` as the product of every matrix in it."""

    def wrap(leaf: Any) -> Any:
        return leaf if len(leaf.shape) < 2 else BoundWeight(leaf, matmul)

    return jax.tree.map(wrap, weights, is_leaf=lambda node: isinstance(node, Quantized))


@dataclass(frozen=True, slots=True, eq=False)
class LoopedWeight:
    """The matrix of the current layer of a loop.

    `project` branches to that layer's own matrix, so that it is read in place; slicing stacked matrices copies.
    """

    matrices: Sequence[Float[jax.Array, "out in"] | Quantized | BoundWeight]
    layer: Int32[jax.Array, ""]


def looped(layers: Sequence[dict[str, Any]]) -> Callable[[jax.Array], dict[str, Any]]:
    """The weights of one layer as a function of its index int32[], for a loop over `layers`."""
    stacked = jax.tree.map(
        lambda *leaves: leaves if len(leaves[0].shape) > 1 else jnp.stack(leaves),
        *layers,
        is_leaf=lambda node: isinstance(node, Quantized),
    )

    def weights(layer: jax.Array) -> dict[str, Any]:
        def pick(leaf: Any) -> Any:
            return LoopedWeight(leaf, layer) if isinstance(leaf, tuple) else leaf[layer]

        return jax.tree.map(pick, stacked, is_leaf=lambda node: isinstance(node, tuple))

    return weights


def project(
    x: Float[jax.Array, "T in"],
    kernel: Float[jax.Array, "out in"] | Quantized | BoundWeight | LoopedWeight,
    dtype: DTypeLike | None = None,
) -> Float32[jax.Array, "T out"]:
    """x times the kernel transposed, summed in float32.

    Args:
      dtype: of partial sums that devices add up, where the bound matmul uses one; x's own if None.
    """
    if isinstance(kernel, LoopedWeight):
        branches = [partial(project, kernel=one, dtype=dtype) for one in kernel.matrices]
        return jax.lax.switch(kernel.layer, branches, x)
    if isinstance(kernel, BoundWeight):
        return kernel.matmul(x, kernel.matrix, x.dtype if dtype is None else dtype)
    if isinstance(kernel, Quantized):
        return dot(x, kernel.values.astype(x.dtype), jnp.float32) * kernel.scales.astype(jnp.float32)
    return dot(x, kernel, jnp.float32)


def dot(
    left: Float[jax.Array, "rows in"], right: Float[jax.Array, "columns in"], dtype: DTypeLike
) -> Float[jax.Array, "rows columns"]:
    """left times right transposed, returned in `dtype`.

    The precision is explicit, since a default float32 product may be computed in TF32 or bfloat16.
    """
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)


class Linear(nnx.Module):
    """x [T, in] -> float32[T, out]: kernel [out, in], bias [out] or none."""

    def __init__(
        self, in_features: int, out_features: int, config: ModelConfig, rngs: nnx.Rngs, *, bias: bool = True
    ) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.kernel = nnx.Param(normal(rngs.params(), (out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros(out_features)) if bias else None

    def __call__(self, x: Float[jax.Array, "T in"]) -> Float32[jax.Array, "T out"]:
        y = project(x, self.kernel.get_raw_value())
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class LayerNorm(nnx.Module):
    """x [T, H] -> [T, H] in x's dtype; statistics in float32. Scale and bias, or neither."""

    def __init__(self, config: ModelConfig, *, affine: bool = True) -> None:
        self.scale = nnx.Param(jnp.ones(config.hidden_size)) if affine else None
        self.bias = nnx.Param(jnp.zeros(config.hidden_size)) if affine else None
        self.eps = config.norm_eps

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T H"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


# Logical axes of a TransformerBlock's parameters.
BLOCK_AXES = {
    "attention_norm": {"scale": ("embed",), "bias": ("embed",)},
    "qkv": {"kernel": ("heads", "embed"), "bias": ("heads",)},
    "out": {"kernel": ("embed", "heads"), "bias": ("embed",)},
    "ffn_norm": {"scale": ("embed",), "bias": ("embed",)},
    "up": {"kernel": ("ffn", "embed"), "bias": ("ffn",)},
    "down": {"kernel": ("embed", "ffn"), "bias": ("embed",)},
}


class TransformerBlock(nnx.Module):
    """The layers of a transformer block; each family joins them in its own way.

    Args:
      attention_bias / ffn_bias: whether the projections of each half have biases.
      affine_norms: whether the norms have a scale and a bias.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        attention_bias: bool = True,
        ffn_bias: bool = True,
        affine_norms: bool = True,
    ) -> None:
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        self.attention_norm = LayerNorm(config, affine=affine_norms)
        self.qkv = Linear(hidden, 3 * inner, config, rngs, bias=attention_bias)
        self.out = Linear(inner, hidden, config, rngs, bias=attention_bias)
        self.ffn_norm = LayerNorm(config, affine=affine_norms)
        self.up = Linear(hidden, config.ffn_size, config, rngs, bias=ffn_bias)
        self.down = Linear(config.ffn_size, hidden, config, rngs, bias=ffn_bias)


class Table(nnx.Module):
    """An embedding table [rows, E]; the token table may also serve as the head."""

    def __init__(self, rows: int, features: int, config: ModelConfig, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.table = nnx.Param(normal(rngs.params(), (rows, features)))

    def __call__(self, index: Int32[jax.Array, " T"]) -> Float[jax.Array, "T E"]:
        table = self.table.get_raw_value()
        if not isinstance(table, Quantized):
            return table.at[index].get(mode="clip")
        values, scales = (part.at[index].get(mode="clip") for part in table)
        return values.astype(scales.dtype) * scales[:, None]


class NormedHead(nnx.Module):
    """The last norm and, unless the embeddings are tied, the table of the head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(config)
        if not config.tie_embeddings:
            self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        return self.norm(x)


def split_heads(
    qkv: Float[jax.Array, "T columns"], config: ModelConfig, dtype: DTypeLike
) -> tuple[Float[jax.Array, "T N D"], Float[jax.Array, "T N D"], Float[jax.Array, "T N D"]]:
    """Splits columns that lie [N, 3, D] into q, k and v.

    The q, k and v of a head are adjacent, so a device that holds a share of the columns holds whole heads.
    """
    parts = qkv.astype(dtype).reshape(-1, config.num_heads, 3, config.head_dim)  # [T, N, 3, D]
    return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


def rotate(
    x: Float[jax.Array, "T N D"], positions: Int32[jax.Array, " T"], size: int, base: float
) -> Float[jax.Array, "T N D"]:
    """Rotary positions (RoFormer, arXiv:2104.09864) in the first `size` numbers of each head.

    Number i of the first half is paired with number i of the second, as in GPT-NeoX; pair i is rotated by
    position / base^(2 i / size).
    """
    frequencies = (1 / base ** (np.arange(0, size, 2) / size)).astype(np.float32)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies  # [T, 1, size / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x, (size // 2, size), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
