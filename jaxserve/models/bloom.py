"""BLOOM (arXiv:2211.05100): ALiBi, a norm on the embeddings, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import (
    BLOCK_AXES,
    EMBED_AXES,
    HEAD_AXES,
    Attend,
    LayerNorm,
    NormedHead,
    Table,
    TransformerBlock,
)
from jaxserve.models.schema import Fields, ModelConfig

NAMES = ConfigNames(
    hidden_size=("n_embed", "hidden_size"),
    num_layers=("n_layer", "num_hidden_layers"),
    num_heads=("n_head", "num_attention_heads"),
    ffn_size=(),
    max_position=(),
    activation=(),
)
AXES = {
    "embed": EMBED_AXES | {"norm": HEAD_AXES["norm"]},
    "layer": BLOCK_AXES,
    "head": HEAD_AXES,
}
TENSORS = {
    "embed": {"tokens": table("word_embeddings"), "norm": norm("word_embeddings_layernorm")},
    "layer": {
        "attention_norm": norm("h.{i}.input_layernorm"),
        "qkv": linear("h.{i}.self_attention.query_key_value"),
        "out": linear("h.{i}.self_attention.dense"),
        "ffn_norm": norm("h.{i}.post_attention_layernorm"),
        "up": linear("h.{i}.mlp.dense_h_to_4h"),
        "down": linear("h.{i}.mlp.dense_4h_to_h"),
    },
    "head": {"norm": norm("ln_f"), "tokens": table("lm_head")},
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
    values = NAMES.read(fields, "bloom", eos=2, bos=1, tied=True, activation="gelu_new", ffn_ratio=4, alibi=True)
    fields.refuse("n_inner", unless=values["ffn_size"], because="the feed-forward is four times the hidden size")
    return BloomConfig(
        **values,
        residual_after_norm=fields.flag("apply_residual_connection_post_layernorm", default=False),
    )


def hf_config(config: BloomConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "BloomForCausalLM") | {
        "apply_residual_connection_post_layernorm": config.residual_after_norm,
    }


class BloomEmbed(nnx.Module):
    """tokens [T] -> [T, H]."""

    def __init__(self, config: BloomConfig, rngs: nnx.Rngs) -> None:
        self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)
        self.norm = LayerNorm(config)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        return self.norm(self.tokens(tokens))


class BloomBlock(TransformerBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each behind a norm and with a residual."""

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


Embed, Block, Head = BloomEmbed, BloomBlock, NormedHead
