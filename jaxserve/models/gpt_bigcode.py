"""GPT-BigCode (StarCoder, arXiv:2305.06161): GPT-2 with one KV head for all queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models import gpt2
from jaxserve.models.gpt2 import NAMES, NO_PARAMETERS, PREFIX, Embed
from jaxserve.models.hf_names import linear
from jaxserve.models.layers import GROUPED_AXES, NormedHead, PreNormBlock
from jaxserve.models.schema import Fields, ModelConfig

__all__ = ["NO_PARAMETERS", "PREFIX", "Embed"]

AXES = gpt2.AXES | {"layer": GROUPED_AXES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BigCodeConfig(ModelConfig):
    """Attributes:
    scale_attention: whether scores are scaled by head_dim^-0.5.
    """

    scale_attention: bool = True

    def attention_scale(self, layer: int) -> float:
        """The factor applied to query-key products in this layer."""
        return super(BigCodeConfig, self).attention_scale(layer) if self.scale_attention else 1.0


def TENSORS(config: ModelConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    layer = gpt2.TENSORS["layer"] | {
        "qkv": linear("h.{i}.attn.c_attn", parts=config.num_kv_heads == 1),
        "out": linear("h.{i}.attn.c_proj"),
        "up": linear("h.{i}.mlp.c_fc"),
        "down": linear("h.{i}.mlp.c_proj"),
    }
    return gpt2.TENSORS | {"layer": layer}


def parse_config(entries: Mapping[str, Any]) -> BigCodeConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("add_cross_attention", unless=False, because="there is no encoder")
    values = NAMES.read(
        fields, "gpt_bigcode", eos=50256, bos=50256, tied=True, activation="gelu_pytorch_tanh", ffn_ratio=4
    )
    if fields.flag("multi_query", default=True):
        values["num_kv_heads"] = 1
    return BigCodeConfig(**values, scale_attention=fields.flag("scale_attn_weights", default=True))


def hf_config(config: BigCodeConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "GPTBigCodeForCausalLM") | {
        "multi_query": config.num_kv_heads < config.num_heads,
        "scale_attn_weights": config.scale_attention,
    }


Block, Head = PreNormBlock, NormedHead
