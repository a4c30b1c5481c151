"""GPT-2 (Radford et al., 2019): learned positions, norms before each half, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import BLOCK_AXES, EMBED_AXES, HEAD_AXES, NormedHead, PositionedEmbed, PreNormBlock
from jaxserve.models.schema import Fields, ModelConfig

NAMES = ConfigNames(
    hidden_size=("n_embd", "hidden_size"),
    num_layers=("n_layer", "num_hidden_layers"),
    num_heads=("n_head", "num_attention_heads"),
    ffn_size=("n_inner",),
    max_position=("n_positions", "max_position_embeddings", "n_ctx"),
    activation=("activation_function",),
)
AXES = {
    "embed": EMBED_AXES | {"positions": {"table": ("positions", "embed")}},
    "layer": BLOCK_AXES,
    "head": HEAD_AXES,
}
TENSORS = {
    "embed": {"tokens": table("wte"), "positions": table("wpe")},
    "layer": {
        "attention_norm": norm("h.{i}.ln_1"),
        "qkv": linear("h.{i}.attn.c_attn", transposed=True, parts=True),
        "out": linear("h.{i}.attn.c_proj", transposed=True),
        "ffn_norm": norm("h.{i}.ln_2"),
        "up": linear("h.{i}.mlp.c_fc", transposed=True),
        "down": linear("h.{i}.mlp.c_proj", transposed=True),
    },
    "head": {"norm": norm("ln_f"), "tokens": table("lm_head")},
}
PREFIX = "transformer."
# Masks that older versions of the library saved with each layer.
NO_PARAMETERS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(ModelConfig):
    """Attributes:
    scale_attention: whether scores are divided by the square root of the head's size.
    scale_attention_by_layer: whether they are divided by the layer's number, from 1, as well.
    """

    scale_attention: bool = True
    scale_attention_by_layer: bool = False

    def attention_scale(self, layer: int) -> float:
        scale = self.head_dim**-0.5 if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_attention_by_layer else scale


def parse_config(entries: Mapping[str, Any]) -> GPT2Config:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("add_cross_attention", unless=False, because="there is no encoder to attend to")
    return GPT2Config(
        **NAMES.read(fields, "gpt2", eos=50256, bos=50256, tied=True, activation="gelu_new", ffn_ratio=4),
        scale_attention=fields.flag("scale_attn_weights", default=True),
        scale_attention_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", default=False),
    )


def hf_config(config: GPT2Config) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "GPT2LMHeadModel") | {
        "scale_attn_weights": config.scale_attention,
        "scale_attn_by_inverse_layer_idx": config.scale_attention_by_layer,
    }


Embed, Block, Head = PositionedEmbed, PreNormBlock, NormedHead
