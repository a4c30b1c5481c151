"""GPT-NeoX (arXiv:2204.06745; also Pythia): rotary positions, attention and feed-forward side by side, its own head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models.layers import (
    ACTIVATIONS,
    BLOCK_AXES,
    Attend,
    NormedHead,
    Table,
    TransformerBlock,
    rotate,
    split_heads,
)
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "embed")},
    },
    "layer": BLOCK_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "tokens": {"table": ("vocab", "embed")},
    },
}

TENSORS = {
    "embed": {
        "tokens": {"table": Stored("embed_in.weight")},
    },
    "layer": {
        "attention_norm": {
            "scale": Stored("layers.{i}.input_layernorm.weight"),
            "bias": Stored("layers.{i}.input_layernorm.bias"),
        },
        "qkv": {
            "kernel": Stored("layers.{i}.attention.query_key_value.weight"),
            "bias": Stored("layers.{i}.attention.query_key_value.bias"),
        },
        "out": {
            "kernel": Stored("layers.{i}.attention.dense.weight"),
            "bias": Stored("layers.{i}.attention.dense.bias"),
        },
        "ffn_norm": {
            "scale": Stored("layers.{i}.post_attention_layernorm.weight"),
            "bias": Stored("layers.{i}.post_attention_layernorm.bias"),
        },
        "up": {
            "kernel": Stored("layers.{i}.mlp.dense_h_to_4h.weight"),
            "bias": Stored("layers.{i}.mlp.dense_h_to_4h.bias"),
        },
        "down": {
            "kernel": Stored("layers.{i}.mlp.dense_4h_to_h.weight"),
            "bias": Stored("layers.{i}.mlp.dense_4h_to_h.bias"),
        },
    },
    "head": {
        "norm": {"scale": Stored("final_layer_norm.weight"), "bias": Stored("final_layer_norm.bias")},
        "tokens": {"table": Stored("embed_out.weight")},
    },
}
PREFIX = "gpt_neox."
# GrammarMasks and frequencies that older versions of the library saved with each layer.
NO_PARAMETERS = (
    "layers.{i}.attention.bias",
    "layers.{i}.attention.masked_bias",
    "layers.{i}.attention.rotary_emb.inv_freq",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """Attributes:
    rotary_share: which part of a head's queries and keys is rotated, from 0 to 1.
    rotary_base: how many times slower the slowest pair turns than the first, roughly.
    parallel_residual: whether the feed-forward reads what the attention reads, rather than what it leaves.
    attention_bias: whether the attention's projections have biases.
    """

    rotary_share: float = 0.25
    rotary_base: float = 10000.0
    parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def rotary_size(self) -> int:
        """How many numbers of a head are rotated."""
        return int(self.head_dim * self.rotary_share)


def parse_config(entries: Mapping[str, Any]) -> GPTNeoXConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    head_dim = head_size(hidden_size, num_heads)
    fields.refuse("head_dim", unless=head_dim, because="the heads share the hidden size")
    vocab_size = fields.count("vocab_size")
    rotary_share, rotary_base = _rotary(entries, head_dim)
    return GPTNeoXConfig(
        family="gpt_neox",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=fields.count("intermediate_size"),
        max_position=fields.count("max_position_embeddings"),
        alibi=False,
        norm_eps=fields.number("layer_norm_eps", default=1e-5),
        activation=fields.activation("hidden_act", default="gelu"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=2),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=0),
        initializer_range=fields.number("initializer_range", default=0.02),
        rotary_share=rotary_share,
        rotary_base=rotary_base,
        parallel_residual=fields.flag("use_parallel_residual", default=True),
        attention_bias=fields.flag("attention_bias", default=True),
    )


def _rotary(entries: Mapping[str, Any], head_dim: int) -> tuple[float, float]:
    """Rotated share of a head and base: from an object as transformers 5 writes it, else from entries as 4 does."""
    name = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    rope, fields = entries.get(name) or {}, Fields(entries)
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} is {rope!r}; it must be an object")
    inner = Fields(rope)
    for key in ("rope_type", "type"):
        inner.refuse(key, unless="default", because=f"positions are not stretched; see {name}")
    share = inner.number("partial_rotary_factor", default=fields.number("rotary_pct", default=0.25))
    base = inner.number("rope_theta", default=fields.number("rotary_emb_base", default=10000.0))
    fields.refuse("partial_rotary_factor", unless=share, because="rotary_pct says otherwise")
    fields.refuse("rope_theta", unless=base, because="rotary_emb_base says otherwise")
    size = int(head_dim * share)
    if size % 2 or not 2 <= size <= head_dim:
        raise ValueError(
            f"rotary_pct is {share}, which rotates {size} of a head's {head_dim} numbers; it must be pairs of them"
        )
    if base <= 1:
        raise ValueError(f"rotary_emb_base is {base}; it must be more than 1")
    return share, base


def hf_config(config: GPTNeoXConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_position,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "initializer_range": config.initializer_range,
        "rotary_pct": config.rotary_share,
        "rotary_emb_base": config.rotary_base,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class Embed(nnx.Module):
    """tokens [T] -> [T, H]; the layers see to positions."""

    def __init__(self, config: GPTNeoXConfig, rngs: nnx.Rngs) -> None:
        self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        return self.tokens(tokens)


class Block(TransformerBlock):
    """x [T, H] -> [T, H]: attention and feed-forward, each with a norm before and one residual around them."""

    def __init__(self, config: GPTNeoXConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, attention_bias=config.attention_bias)
        self.config = config

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        dtype, config = x.dtype, self.config
        q, k, v = split_heads(self.qkv(self.attention_norm(x)), config, jnp.float32)
        q, k = (rotate(each, positions, config.rotary_size, config.rotary_base) for each in (q, k))
        out, cache = attend(q.astype(dtype), k.astype(dtype), v.astype(dtype), cache)
        attended = x + self.out(out.astype(dtype).reshape(len(x), -1))
        normed = self.ffn_norm(x if config.parallel_residual else attended.astype(dtype))
        inner = ACTIVATIONS[config.activation](self.up(normed)).astype(dtype)
        return (attended + self.down(inner)).astype(dtype), cache


Head = NormedHead
