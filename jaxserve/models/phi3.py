"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): Llama with fused projections, a window and partly rotated heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models import decoder
from jaxserve.models.decoder import AXES, NO_PARAMETERS, PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.schema import Fields, Stored

__all__ = ["AXES", "NO_PARAMETERS", "PREFIX", "TENSORS", "Block", "Embed", "Head", "hf_config", "parse_config"]

TENSORS = decoder.TENSORS | {
    "layer": decoder.TENSORS["layer"]
    | {
        "qkv": {"kernel": Stored("layers.{i}.self_attn.qkv_proj.weight", parts=True)},
        "gate": {"kernel": Stored("layers.{i}.mlp.gate_up_proj.weight", share=(0, 2))},
        "up": {"kernel": Stored("layers.{i}.mlp.gate_up_proj.weight", share=(1, 2))},
    }
}


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("attention_bias", unless=False, because="the projections have no biases")
    values = decoder.rotated(fields, decoder.sizes(fields, "phi3", eos=32000, eps=1e-5), kinds=("default",))
    size = fields.count_or_none("sliding_window", default=None)
    return DecoderConfig(**values, windows=decoder.windows(fields, values["num_layers"], size))


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    entries = decoder.hf_config(config, "Phi3ForCausalLM") | decoder.window_entries(config)
    share = config.rotary.size / config.head_dim
    return entries | {"rope_parameters": config.rotary.entries() | {"partial_rotary_factor": share}}


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
