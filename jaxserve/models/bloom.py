"""BLOOM (arXiv:2211.05100): ALiBi, a norm on the embeddings, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models.layers import BLOCK_AXES, Attend, LayerNorm, NormedHead, Table, TransformerBlock
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "embed")},
        "norm": {"scale": ("embed",), "bias": ("embed",)},
    },
    "layer": BLOCK_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "tokens": {"table": ("vocab", "embed")},
    },
}

TENSORS = {
    "embed": {
        "tokens": {"table": Stored("word_embeddings.weight")},
        "norm": {
            "scale": Stored("word_embeddings_layernorm.weight"),
            "bias": Stored("word_embeddings_layernorm.bias"),
        },
    },
    "layer": {
        "attention_norm": {
            "scale": Stored("h.{i}.input_layernorm.weight"),
            "bias": Stored("h.{i}.input_layernorm.bias"),
        },
        "qkv": {
            "kernel": Stored("h.{i}.self_attention.query_key_value.weight"),
            "bias": Stored("h.{i}.self_attention.query_key_value.bias"),
        },
        "out": {
            "kernel": Stored("h.{i}.self_attention.dense.weight"),
            "bias": Stored("h.{i}.self_attention.dense.bias"),
        },
        "ffn_norm": {
            "scale": Stored("h.{i}.post_attention_layernorm.weight"),
            "bias": Stored("h.{i}.post_attention_layernorm.bias"),
        },
        "up": {
            "kernel": Stored("h.{i}.mlp.dense_h_to_4h.weight"),
            "bias": Stored("h.{i}.mlp.dense_h_to_4h.bias"),
        },
        "down": {
            "kernel": Stored("h.{i}.mlp.dense_4h_to_h.weight"),
            "bias": Stored("h.{i}.mlp.dense_4h_to_h.bias"),
        },
    },
    "head": {
        "norm": {"scale": Stored("ln_f.weight"), "bias": Stored("ln_f.bias")},
        "tokens": {"table": Stored("lm_head.weight")},
    },
}
PREFIX = "transformer."
NO_PARAMETERS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig(ModelConfig):
    """Attributes:
    residual_after_norm: whether the residual is taken after the norm of each half (some small BLOOM models).
    """

    residual_after_norm: bool = False


def parse_config(entries: Mapping[str, Any]) -> BloomConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size = fields.count("n_embed", "hidden_size")
    num_heads = fields.count("n_head", "num_attention_heads")
    vocab_size = fields.count("vocab_size")
    fields.refuse("n_inner", unless=4 * hidden_size, because="BLOOM's feed-forward is four times its hidden size")
    return BloomConfig(
        family="bloom",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(hidden_size, num_heads),
        ffn_size=4 * hidden_size,
        max_position=None,
        alibi=True,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation="gelu_new",
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=2),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=1),
        initializer_range=fields.number("initializer_range", default=0.02),
        residual_after_norm=fields.flag("apply_residual_connection_post_layernorm", default=False),
    )


def hf_config(config: BloomConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.initializer_range,
        "apply_residual_connection_post_layernorm": config.residual_after_norm,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class Embed(nnx.Module):
    """tokens [T] -> [T, H]."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs) -> None:
        self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)
        self.norm = LayerNorm(config)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        return self.norm(self.tokens(tokens))


class Block(TransformerBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each with a norm before and a residual around it."""

    config: BloomConfig

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        dtype, after_norm = x.dtype, self.config.residual_after_norm
        assert self.ffn_norm is not None
        normed = self.attention_norm(x)
        attended, cache = self.attention(normed, positions, attend, cache)
        x = ((normed if after_norm else x) + attended).astype(dtype)
        normed = self.ffn_norm(x)
        return ((normed if after_norm else x) + self.feed_forward(normed, positions)).astype(dtype), cache


Head = NormedHead
