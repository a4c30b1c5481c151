"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): fused projections, window, partial rotary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models import decoder
from jaxserve.models.decoder import AXES, NO_PARAMETERS, PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.hf_names import linear
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.rotary import rotated
from jaxserve.models.schema import Fields

__all__ = ["AXES", "NO_PARAMETERS", "PREFIX", "TENSORS", "Block", "Embed", "Head", "hf_config", "parse_config"]

TENSORS = decoder.TENSORS | {
    "layer": decoder.TENSORS["layer"]
    | {
        "qkv": linear("layers.{i}.self_attn.qkv_proj", bias=False, parts=True),
        "gate": linear("layers.{i}.mlp.gate_up_proj", bias=False, share=(0, 2)),
        "up": linear("layers.{i}.mlp.gate_up_proj", bias=False, share=(1, 2)),
    }
}


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("attention_bias", unless=False, because="the projections have no biases")
    values = rotated(fields, decoder.sizes(fields, "phi3", eos=32000, norm_eps=1e-5), share=1.0, kinds=("default",))
    size = fields.count_or_none("sliding_window", default=None)
    return DecoderConfig(**values, windows=decoder.windows(fields, values["num_layers"], size))


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "Phi3ForCausalLM") | decoder.window_entries(config)


Embed, Block, Head = TokenEmbed, DecoderBlock, RMSNormedHead
