"""GPT-NeoX (arXiv:2204.06745; also Pythia): rotary, parallel halves, untied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import (
    BLOCK_AXES,
    EMBED_AXES,
    HEAD_AXES,
    NormedHead,
    ParallelBlock,
    PreNormBlock,
    TokenEmbed,
    TransformerBlock,
)
from jaxserve.models.rotary import Rotary, rotated, rotated_entries
from jaxserve.models.schema import Fields, ModelConfig

NAMES = ConfigNames(norm_eps=("layer_norm_eps",))
AXES = {"embed": EMBED_AXES, "layer": BLOCK_AXES, "head": HEAD_AXES}
TENSORS = {
    "embed": {"tokens": table("embed_in")},
    "layer": {
        "attention_norm": norm("layers.{i}.input_layernorm"),
        "qkv": linear("layers.{i}.attention.query_key_value"),
        "out": linear("layers.{i}.attention.dense"),
        "ffn_norm": norm("layers.{i}.post_attention_layernorm"),
        "up": linear("layers.{i}.mlp.dense_h_to_4h"),
        "down": linear("layers.{i}.mlp.dense_4h_to_h"),
    },
    "head": {"norm": norm("final_layer_norm"), "tokens": table("embed_out")},
}
PREFIX = "gpt_neox."
# Masks and frequencies that older versions of the library saved with each layer.
NO_PARAMETERS = (
    "layers.{i}.attention.bias",
    "layers.{i}.attention.masked_bias",
    "layers.{i}.attention.rotary_emb.inv_freq",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys.
    parallel_residual: whether the feed-forward reads what the attention reads, rather than what it leaves.
    attention_bias: whether the attention's projections have biases.
    """

    rotary: Rotary
    parallel_residual: bool = True
    attention_bias: bool = True


def parse_config(entries: Mapping[str, Any]) -> GPTNeoXConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    values = NAMES.read(fields, "gpt_neox", eos=2, bos=0, tied=False, activation="gelu")
    fields.refuse("head_dim", unless=values["head_dim"], because="the heads share the hidden size")
    theta, share = fields.number("rotary_emb_base", default=10000.0), fields.number("rotary_pct", default=0.25)
    return GPTNeoXConfig(
        **rotated(fields, values, theta=theta, share=share),
        parallel_residual=fields.flag("use_parallel_residual", default=True),
        attention_bias=fields.flag("attention_bias", default=True),
    )


def hf_config(config: GPTNeoXConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        **NAMES.entries(config, "GPTNeoXForCausalLM"),
        **rotated_entries(config.rotary, config),
        "rotary_pct": config.rotary.size / config.head_dim,
        "rotary_emb_base": config.rotary.theta,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.attention_bias,
    }


def Block(config: GPTNeoXConfig, rngs: nnx.Rngs, layer: int = 0) -> TransformerBlock:
    """The layer: attention and feed-forward with a norm before each, side by side or in turn."""
    kind = ParallelBlock if config.parallel_residual else PreNormBlock
    return kind(config, rngs, layer, attention_bias=config.attention_bias, rotary=config.rotary)


Embed, Head = TokenEmbed, NormedHead
