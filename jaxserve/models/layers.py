"""The layers that the families are composed of.

Every layer computes its sums in float32 and leaves the rounding to its caller, who does it once. T is the number of
flat tokens of an iteration, H the hidden size, N the heads, D the size of a head, V the vocabulary, F the
feed-forward size.
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
from jaxtyping import Float, Float32, Int8, Int32

from jaxserve.models.schema import ModelConfig
from pallas_kernels.cpu.product import NativeProduct

# attend(q [T, N, D], k [T, K, D], v [T, K, D], cache) -> (out [T, N, D], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

_FEW_ROWS, _MANY_ROWS = 4, 256  # between them kernels stand first in a CPU's products (`_project_cpu`)
_INTEGER_ROWS, _TILE = 8, 256  # up to so many rows are multiplied as integers; rows of a kernel widened at a time

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_new": lambda x: nnx.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "silu": nnx.silu,
    "tanh": jnp.tanh,
}


class Quantized(NamedTuple):
    """A matrix in eight bits: row r is about values[r] * scales[r]. Scales are of the dtype the model computes in."""

    values: Any  # int8[out, in]
    scales: Any  # [out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A kernel, and the product that `project` takes in the place of XLA's."""

    kernel: Float[jax.Array, "out in"]
    product: NativeProduct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape


def through(weights: Any, product: NativeProduct) -> Any:
    """A tree of weights whose kernels and tables, but those in eight bits, are multiplied through a native product."""

    def wrap(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Quantized) or len(leaf.shape) < 2 else NativeWeight(leaf, product)

    return jax.tree.map(wrap, weights, is_leaf=lambda node: isinstance(node, Quantized))


@dataclass(frozen=True, slots=True, eq=False)
class LoopedWeight:
    """The kernel of the layer that a loop is at. `project` branches to that layer's own, so that it is read where it
    lies; a slice of stacked kernels would be copied first."""

    kernels: Sequence[Float[jax.Array, "out in"] | Quantized | NativeWeight]
    layer: Int32[jax.Array, ""]


def varying(layers: Sequence[dict[str, Any]]) -> Callable[[jax.Array], dict[str, Any]]:
    """The weights of one layer as a function of its number int32[], for a loop over `layers`."""
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
    kernel: Float[jax.Array, "out in"] | Quantized | NativeWeight | LoopedWeight,
    dtype: DTypeLike | None = None,
) -> Float32[jax.Array, "T out"]:
    """x times the kernel, summed in float32.

    The kernel lies [out, in] for the CPU's sake, where reading it in order is what a matmul of few rows costs; an
    accelerator takes either order.

    Args:
      dtype: what an accelerator hands on between its sums and the caller, where partial sums of several devices are
        added up; x's own if None.
    """
    dtype = x.dtype if dtype is None else dtype
    if isinstance(kernel, LoopedWeight):
        branches = [partial(_project_one, kernel=one, dtype=dtype, alone=True) for one in kernel.kernels]
        return jax.lax.switch(kernel.layer, branches, x)
    return _project_one(x, kernel, dtype, alone=False)


def _project_one(
    x: jax.Array, kernel: jax.Array | Quantized | NativeWeight, dtype: DTypeLike, *, alone: bool
) -> jax.Array:
    """Args:
    alone: whether the kernel is known to lie on one device.
    """
    if isinstance(kernel, NativeWeight):
        product = kernel.product(x, kernel.kernel)
        if product is not None:
            return product
        kernel = kernel.kernel
    if not isinstance(kernel, Quantized):
        return jax.lax.platform_dependent(x, kernel, cpu=_project_cpu, default=partial(_project, dtype=dtype))
    on_cpu = _project_tiles if alone and len(x) > _INTEGER_ROWS else _project_integers
    # The compilers of GPUs and TPUs widen what a dot reads on its way: the kernel is never there in other than 8 bits.
    sums = jax.lax.platform_dependent(
        x, kernel.values, cpu=on_cpu, default=lambda x, values: _project(x, values.astype(x.dtype), dtype)
    )
    return sums * kernel.scales.astype(jnp.float32)


def _project(x: jax.Array, kernel: jax.Array, dtype: DTypeLike) -> jax.Array:
    return _dot(x, kernel, dtype).astype(jnp.float32)


def _project_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The order of operands that XLA's CPU matmul is fastest with (measured in jax 0.10.2).

    For a few to some 200 rows that is kernel times x: half the time of the reverse at 8 rows in float32, five sixths
    at 32 in bfloat16. XLA would swap the operands to do away with the transpose, hence the barrier. For more rows it
    is still so by some percent where the result is no wider than x. One row in bfloat16 is made two (it is 16 times
    slower), and float32 sums are handed on (bfloat16 ones are 3 to 7 times slower). Either order takes two thirds of
    the time that a kernel [in, out] does at 8 rows, and 5% more or less at 256.
    """
    rows, (out_features, in_features) = x.shape[0], kernel.shape
    few = 1 if x.dtype == jnp.float32 else _FEW_ROWS
    if few <= rows < _MANY_ROWS or (rows >= _MANY_ROWS and out_features <= in_features):
        return jax.lax.optimization_barrier(_dot(kernel, x, jnp.float32)).T
    if rows == 1:
        return _dot(jnp.pad(x, ((0, 1), (0, 0))), kernel, jnp.float32)[:1]
    return _dot(x, kernel, jnp.float32)


def _project_tiles(x: jax.Array, kernel: Int8[jax.Array, "out in"]) -> jax.Array:
    """Widens a kernel a tile at a time, which stays in the cache; XLA's CPU compiler would write all of it to memory
    first, which takes ten times as long as reading float32."""
    tile = min(_TILE, kernel.shape[0])

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:  # the last tile may reach back: slices are kept inside
        part = jax.lax.dynamic_slice_in_dim(kernel, i * tile, tile).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(sums, _project_cpu(x, part), i * tile, 1)

    return jax.lax.fori_loop(0, -(-kernel.shape[0] // tile), step, jnp.zeros((len(x), len(kernel)), jnp.float32))


def _project_integers(x: jax.Array, kernel: Int8[jax.Array, "out in"]) -> jax.Array:
    """Multiplies as integers: a row of x is a sum of two int8 rows, 15 bits of its largest number, and sums are exact.

    It reads the kernel as it lies. One row takes half the time of a bfloat16 kernel, 8 as long, more are slower.
    """
    wide = x.astype(jnp.float32)
    step = jnp.max(jnp.abs(wide), axis=1, keepdims=True) / 127
    step = jnp.where(step == 0, 1, step)  # NaN for a row that is not finite, and so are its sums
    high = jnp.round(wide / step)
    low = jnp.round((wide - high * step) * (254 / step))
    rows = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = jax.lax.dot_general(rows, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high_sums, low_sums = jnp.split(sums.astype(jnp.float32), 2)
    return (high_sums + low_sums / 254) * step


def _dot(
    left: Float[jax.Array, "rows in"], right: Float[jax.Array, "columns in"], dtype: DTypeLike
) -> Float[jax.Array, "rows columns"]:
    """left times right, transposed. The precision is explicit: a default float32 may mean TF32 or bfloat16."""
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
    """The layers that a block of any family has; how they are joined is the family's to say.

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
    """Rows by number: table [rows, E]. Serves as embedding and, for the token table, as the head."""

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
    """The last norm and, where it is not the token table, the table of the head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(config)
        if not config.tie_embeddings:
            self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        return self.norm(x)


def head(
    x: Float[jax.Array, "S E"], table: Float[jax.Array, "V E"] | Quantized | NativeWeight
) -> Float32[jax.Array, "S V"]:
    """Logits."""
    return project(x, table, jnp.float32)


def split_heads(
    qkv: Float[jax.Array, "T columns"], config: ModelConfig, dtype: DTypeLike
) -> tuple[Float[jax.Array, "T N D"], Float[jax.Array, "T N D"], Float[jax.Array, "T N D"]]:
    """q, k and v out of columns that lie [N, 3, D].

    A head's q, k and v stand together, so a device that holds some of the columns holds whole heads.
    """
    parts = qkv.astype(dtype).reshape(-1, config.num_heads, 3, config.head_dim)  # [T, N, 3, D]
    return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


def rotate(
    x: Float[jax.Array, "T N D"], positions: Int32[jax.Array, " T"], size: int, base: float
) -> Float[jax.Array, "T N D"]:
    """Rotary positions (RoFormer, arXiv:2104.09864) in the first `size` numbers of each head.

    A number of their first half makes a pair with its counterpart in the second, as in GPT-NeoX; pair i is turned by
    position / base^(2 i / size).
    """
    frequencies = (1 / base ** (np.arange(0, size, 2) / size)).astype(np.float32)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies  # [T, 1, size / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x, (size // 2, size), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
