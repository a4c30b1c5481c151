"""Qwen3 (arXiv:2505.09388): Qwen2 with QK-norm in place of biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models import decoder, qwen2
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
        **rotated(fields, decoder.sizes(fields, "qwen3", eos=None, bos=None, num_kv_heads=32, head_dim=128)),
        windows=qwen2.windows(fields),
        attention_bias=bias,
        out_bias=bias,
        head_norm=True,
    )


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    entries = decoder.hf_config(config, "Qwen3ForCausalLM") | decoder.window_entries(config)
    return entries | {"use_sliding_window": bool(config.windows), "attention_bias": config.attention_bias}


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
