"""Qwen2 and Qwen2.5 (arXiv:2407.10671, 2412.15115): Llama with QKV biases, some windows."""

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
    fields.refuse("use_mrope", unless=False, because="a token has one position")
    return DecoderConfig(
        **rotated(fields, decoder.sizes(fields, "qwen2", eos=None, bos=None, num_kv_heads=32)),
        windows=windows(fields),
        attention_bias=True,
    )


def windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's window: from `max_window_layers` on, if `use_sliding_window`."""
    fields.refuse("dual_chunk_attention_config", because="a layer attends to all tokens or to a window of them")
    used = fields.flag("use_sliding_window", default=False)
    size = fields.count_or_none("sliding_window", default=4096) if used else None
    first = int(fields.number("max_window_layers", default=28.0))  # may be 0
    return decoder.windows(fields, fields.count("num_hidden_layers"), size, sliding=lambda layer: layer >= first)


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    entries = decoder.hf_config(config, "Qwen2ForCausalLM") | decoder.window_entries(config)
    return entries | {"use_sliding_window": bool(config.windows)}


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
