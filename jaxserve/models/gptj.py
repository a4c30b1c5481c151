"""GPT-J (github.com/kingoflolz/mesh-transformer-jax): interleaved rotary, parallel halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx

from jaxserve.models.gpt2 import NAMES, NO_PARAMETERS, PREFIX
from jaxserve.models.hf_names import linear, norm, table
from jaxserve.models.layers import EMBED_AXES, GROUPED_AXES, HEAD_AXES, NormedHead, ParallelBlock, TokenEmbed
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig, Stored

__all__ = ["NO_PARAMETERS", "PREFIX"]

AXES = {"embed": EMBED_AXES, "layer": GROUPED_AXES, "head": HEAD_AXES}
TENSORS = {
    "embed": {"tokens": table("wte")},
    "layer": {
        "attention_norm": norm("h.{i}.ln_1"),
        "qkv": linear("h.{i}.attn.{qkv}_proj", bias=False),
        "out": linear("h.{i}.attn.out_proj", bias=False),
        "up": linear("h.{i}.mlp.fc_in"),
        "down": linear("h.{i}.mlp.fc_out"),
    },
    "head": {"norm": norm("ln_f"), "tokens": table("lm_head"), "bias": Stored("lm_head.bias")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTJConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys.
    """

    rotary: Rotary


def parse_config(entries: Mapping[str, Any]) -> GPTJConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    values = NAMES.read(fields, "gptj", eos=50256, bos=50256, tied=False, activation="gelu_new", ffn_ratio=4)
    head_dim = values["head_dim"]
    size = fields.count("rotary_dim", default=min(64, head_dim))
    if size % 2 or size > head_dim:
        raise ValueError(f"rotary_dim is {size}; it must be even and at most {head_dim}, the size of a head")
    return GPTJConfig(**values, rotary=Rotary(size=size, interleaved=True))


def hf_config(config: GPTJConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "GPTJForCausalLM") | {"rotary_dim": config.rotary.size}


def Block(config: GPTJConfig, rngs: nnx.Rngs, layer: int = 0) -> ParallelBlock:
    """The layer: attention without projection biases beside the feed-forward, behind one norm."""
    return ParallelBlock(config, rngs, layer, one_norm=True, attention_bias=False, rotary=config.rotary)


Embed, Head = TokenEmbed, partial(NormedHead, bias=True)
