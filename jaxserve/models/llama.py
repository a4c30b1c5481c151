"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783): RMSNorm and gated feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models import decoder
from jaxserve.models.decoder import AXES, NO_PARAMETERS, PREFIX, TENSORS, DecoderBlock, DecoderConfig
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.rotary import rotated
from jaxserve.models.schema import Fields

__all__ = ["AXES", "NO_PARAMETERS", "PREFIX", "TENSORS", "Block", "Embed", "Head", "hf_config", "parse_config"]


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    bias = fields.flag("attention_bias", default=False)
    return DecoderConfig(
        **rotated(fields, decoder.sizes(fields, "llama")),
        attention_bias=bias,
        out_bias=bias,
        ffn_bias=fields.flag("mlp_bias", default=False),
    )


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "LlamaForCausalLM") | {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.ffn_bias,
    }


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
