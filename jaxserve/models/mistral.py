"""Mistral (arXiv:2310.06825): Llama with a sliding window in all or some layers."""

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
    values = rotated(fields, decoder.sizes(fields, "mistral", num_kv_heads=8))
    size = fields.count_or_none("sliding_window", default=4096)
    return DecoderConfig(**values, windows=decoder.windows(fields, values["num_layers"], size))


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "MistralForCausalLM") | decoder.window_entries(config)


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
