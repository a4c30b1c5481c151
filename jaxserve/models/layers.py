"""The layers that the model families share.

Every layer sums in float32; its caller rounds the result once. T is the number of flat tokens of an iteration, H the
hidden size, N the heads, D the head size, V the vocabulary, F the feed-forward size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Float32, Int32

from jaxserve.models.products import Quantized, project
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import ModelConfig

# attend(q [T, N, D], k [T, K, D], v [T, K, D], cache) -> (out [T, N, D], cache); the scores of sinks [N] are a keyword
Attend = Callable[..., tuple[jax.Array, Any]]
_LANES = 128  # numbers of a row of a TPU's memory tile


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_new": lambda x: nnx.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "silu": nnx.silu,
    "tanh": jnp.tanh,
}


class Linear(nnx.Module):
    """x [T, in] -> float32[T, out]: kernel [out, in], bias [out] or none.

    Args:
      shape: of a token's outputs in the result, [T, *shape]; (out,) by default, and where inputs are no whole rows of
        a TPU's memory tiles: it would copy the kernel to give it the shape.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        bias: bool = True,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.kernel = nnx.Param(normal(rngs.params(), (out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros(out_features)) if bias else None
        self.shape = shape if shape and in_features % _LANES == 0 else (out_features,)

    def __call__(self, x: Float[jax.Array, "T in"]) -> Float32[jax.Array, "T ..."]:
        y = project(x, self.kernel.get_raw_value(), shape=self.shape)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32).reshape(self.shape)


class LayerNorm(nnx.Module):
    """x [T, H] -> [T, H] in x's dtype; statistics in float32.

    Args:
      scale / bias: whether it has them.
    """

    sums = 2  # over x's last axis, one after the other

    def __init__(self, config: ModelConfig, *, scale: bool = True, bias: bool = True) -> None:
        self.scale = nnx.Param(jnp.ones(config.hidden_size)) if scale else None
        self.bias = nnx.Param(jnp.zeros(config.hidden_size)) if bias else None
        self.eps = config.norm_eps

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T H"]:
        wide = x.astype(jnp.float32)
        # Divided before they are added up: a TPU needs an operation of its own to divide sums that several read.
        centred = wide - jnp.sum(wide * (1 / wide.shape[-1]), -1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        if self.scale is not None:
            y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x [..., S] -> [..., S] over its root mean square, computed in float32 (arXiv:1910.07467).

    Args:
      size: S; the hidden size by default.
      offset: added to the stored scale.
    """

    sums = 1  # over x's last axis

    def __init__(self, config: ModelConfig, *, size: int | None = None, offset: float = 0.0) -> None:
        self.scale = nnx.Param(jnp.full(size or config.hidden_size, 1.0 - offset))
        self.offset = offset
        self.eps = config.norm_eps

    def __call__(self, x: Float[jax.Array, "*T S"]) -> Float[jax.Array, "*T S"]:
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        scaled = y * self.scale[...].astype(jnp.float32)
        # The offset is not added to the scale: a TPU needs an operation of its own for that.
        return (scaled + self.offset * y if self.offset else scaled).astype(x.dtype)


# Logical axes of the parameters of TokenEmbed and NormedHead.
EMBED_AXES = {"tokens": {"table": ("vocab", "embed")}}
HEAD_AXES = EMBED_AXES | {"norm": {"scale": ("embed",), "bias": ("embed",)}, "bias": ("vocab",)}
# Logical axes of a TransformerBlock's parameters. Queries, keys and values of a KV head are adjacent.
BLOCK_AXES = {
    "attention_norm": {"scale": ("embed",), "bias": ("embed",)},
    "qkv": {"kernel": ("heads", "embed"), "bias": ("heads",)},
    "out": {"kernel": ("embed", "heads"), "bias": ("embed",)},
    "ffn_norm": {"scale": ("embed",), "bias": ("embed",)},
    "up": {"kernel": ("ffn", "embed"), "bias": ("ffn",)},
    "down": {"kernel": ("embed", "ffn"), "bias": ("embed",)},
}
# The same where several query heads may share a KV head, with what gated feed-forwards and norms of heads add.
GROUPED_AXES = BLOCK_AXES | {
    "qkv": {"kernel": ("kv_heads", "embed"), "bias": ("kv_heads",)},
    "q_norm": {"scale": ("head_dim",)},
    "k_norm": {"scale": ("head_dim",)},
    "gate": {"kernel": ("ffn", "embed"), "bias": ("ffn",)},
    "sinks": ("heads",),
}


class TransformerBlock(nnx.Module):
    """Attention and feed-forward of a layer; each family joins them in its own way.

    Args:
      layer: index of the layer; layers of one `ModelConfig.layer_kind` are the same.
      norm: makes the norm before each half, given the configuration.
      one_norm: whether both halves read what one norm gives.
      attention_bias / out_bias / ffn_bias: whether the projections have biases; the output's is the attention's by
        default.
      gated: whether the feed-forward multiplies two projections, one of them activated (arXiv:2002.05202).
      experts: makes what stands for the feed-forward; None for the feed-forward itself.
      head_norm: makes the norm of each head's queries and of its keys; None without one.
      rotary: rotates queries and keys by their positions; None without rotary positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        layer: int = 0,
        *,
        norm: Callable[[ModelConfig], nnx.Module] | None = None,
        one_norm: bool = False,
        attention_bias: bool = True,
        out_bias: bool | None = None,
        ffn_bias: bool = True,
        gated: bool = False,
        experts: Callable[[ModelConfig, nnx.Rngs], nnx.Module] | None = None,
        head_norm: Callable[[ModelConfig], nnx.Module] | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        norm = norm or LayerNorm
        hidden, inner, ffn = config.hidden_size, config.num_heads * config.head_dim, config.ffn_size
        self.config, self.layer, self.rotary = config, layer, rotary
        self.attention_norm = norm(config)
        heads = config.num_heads + 2 * config.num_kv_heads  # of queries, keys and values
        shape = (heads, config.head_dim)
        self.qkv = Linear(hidden, math.prod(shape), config, rngs, bias=attention_bias, shape=shape)
        self.q_norm = head_norm(config) if head_norm else None
        self.k_norm = head_norm(config) if head_norm else None
        self.sinks = nnx.Param(jnp.zeros(config.num_heads)) if config.sinks else None
        self.out = Linear(inner, hidden, config, rngs, bias=attention_bias if out_bias is None else out_bias)
        self.ffn_norm = None if one_norm else norm(config)
        self.experts = experts(config, rngs) if experts else None
        if experts is None:
            self.gate = Linear(hidden, ffn, config, rngs, bias=ffn_bias) if gated else None
            self.up = Linear(hidden, ffn, config, rngs, bias=ffn_bias)
            self.down = Linear(ffn, hidden, config, rngs, bias=ffn_bias)

    def attention(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float32[jax.Array, "T H"], Any]:
        """Self-attention of x, normed or not; returns (its output, the updated cache)."""
        dtype = x.dtype
        heads = by_kv_head(self.project_qkv(x), self.config)
        # Heads of all kinds at once, values too: a TPU would need several operations for each kind.
        turned, place = heads, jnp.arange(heads.shape[2])[:, None]
        if self.q_norm is not None and self.k_norm is not None:
            turned = jnp.where(place < heads.shape[2] - 2, self.q_norm(heads), self.k_norm(heads))
        if self.rotary is not None:
            turned = self.rotary(turned, positions)
        heads = jnp.where(place == heads.shape[2] - 1, heads, turned).astype(dtype)
        q, k, v = heads[:, :, :-2].reshape(len(x), -1, self.config.head_dim), heads[:, :, -2], heads[:, :, -1]
        sinks = {} if self.sinks is None else {"sinks": self.sinks[...]}
        out, cache = attend(q, k, v, cache, **sinks)
        return self.out(out.astype(dtype).reshape(len(x), -1)), cache

    def project_qkv(self, x: Float[jax.Array, "T H"]) -> Float32[jax.Array, "T ..."]:
        """The queries, keys and values of x (see `by_kv_head`)."""
        return self.qkv(x)

    def feed_forward(self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"]) -> Float32[jax.Array, "T H"]:
        """The feed-forward of x, which a norm has seen or not."""
        if self.experts is not None:
            return self.experts(x, positions)
        activation = ACTIVATIONS[self.config.activation]
        inner = activation(self.up(x)) if self.gate is None else activation(self.gate(x)) * self.up(x)
        return self.down(inner.astype(x.dtype))


class PreNormBlock(TransformerBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each behind a norm and with a residual."""

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        dtype = x.dtype
        assert self.ffn_norm is not None
        attended, cache = self.attention(self.attention_norm(x), positions, attend, cache)
        x = (x + attended).astype(dtype)
        return (x + self.feed_forward(self.ffn_norm(x), positions)).astype(dtype), cache


class PostNormBlock(TransformerBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each with a norm behind its residual."""

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        assert self.ffn_norm is not None
        attended, cache = self.attention(x, positions, attend, cache)
        x = self.attention_norm((x + attended).astype(x.dtype))
        return self.ffn_norm((x + self.feed_forward(x, positions)).astype(x.dtype)), cache


class ParallelBlock(TransformerBlock):
    """x [T, H] -> [T, H]: attention beside feed-forward, with one residual around both."""

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        normed = self.attention_norm(x)
        attended, cache = self.attention(normed, positions, attend, cache)
        inner = self.feed_forward(normed if self.ffn_norm is None else self.ffn_norm(x), positions)
        return (x + attended + inner).astype(x.dtype), cache


class Table(nnx.Module):
    """An embedding table [rows, E]; the token table may also serve as the head."""

    def __init__(self, rows: int, features: int, config: ModelConfig, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(config.initializer_range)
        self.table = nnx.Param(normal(rngs.params(), (rows, features)))

    def __call__(self, index: Int32[jax.Array, " T"]) -> Float[jax.Array, "T E"]:
        table = self.table.get_raw_value()
        if not isinstance(table, Quantized):
            return table.at[index].get(mode="clip")
        values, scales = (part.at[index].get(mode="clip") for part in (table.values, table.scales))
        return values.astype(scales.dtype) * scales[:, None]


class TokenEmbed(nnx.Module):
    """tokens [T], positions [T] -> [T, H]: the token table alone; the layers see to positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        return self.tokens(tokens)


class PositionedEmbed(nnx.Module):
    """tokens [T], positions [T] -> [T, H]: the token table and a table of positions.

    Args:
      words: width of the token table; where it is not the hidden size, a projection follows.
      offset: rows of the position table before that of position 0.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, words: int | None = None, offset: int = 0) -> None:
        assert config.max_position is not None
        hidden, words = config.hidden_size, words or config.hidden_size
        self.offset = offset
        self.tokens = Table(config.vocab_size, words, config, rngs)
        self.project = Linear(words, hidden, config, rngs, bias=False) if words != hidden else None
        self.positions = Table(config.max_position + offset, hidden, config, rngs)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        words, places = self.tokens(tokens), self.positions(positions + self.offset)
        return words + places if self.project is None else (self.project(words) + places).astype(places.dtype)


class NormedHead(nnx.Module):
    """The last norm and, unless the embeddings are tied, the table of the head.

    Args:
      bias: whether the logits have a bias.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        norm: Callable[[ModelConfig], nnx.Module] | None = None,
        bias: bool = False,
    ) -> None:
        self.norm = (norm or LayerNorm)(config)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size)) if bias else None
        if not config.tie_embeddings:
            self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        return self.norm(x)


class RMSNormedHead(NormedHead):
    """`NormedHead` with an RMSNorm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, norm=RMSNorm)


def by_kv_head(qkv: Float[jax.Array, "T ..."], config: ModelConfig) -> Float[jax.Array, "T K heads D"]:
    """The columns, or heads, as [T, K, G + 2, D]: K KV heads with G = N / K queries each.

    The queries, the key and the value of a KV head are adjacent, so a device that holds a share of the columns holds
    whole heads.
    """
    group = config.num_heads // config.num_kv_heads
    return qkv.reshape(-1, config.num_kv_heads, group + 2, config.head_dim)


def soft_cap(x: Float[jax.Array, "*S"], cap: float | None) -> Float[jax.Array, "*S"]:
    """cap * tanh(x / cap) (Gemma 2, arXiv:2408.00118, section 2); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
