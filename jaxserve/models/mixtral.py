"""Mixtral (arXiv:2401.04088): Mistral's layers with eight feed-forwards, two of which serve a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxserve.models import decoder, experts
from jaxserve.models.decoder import NO_PARAMETERS, PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.experts import Experts
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.schema import Fields, ModelConfig, Stored

__all__ = ["NO_PARAMETERS", "PREFIX"]

AXES = decoder.AXES | {"layer": decoder.AXES["layer"] | {"experts": experts.AXES}}


def TENSORS(config: ModelConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    def each(name: str) -> dict[str, Stored]:
        return {
            "kernel": Stored(f"layers.{{i}}.block_sparse_moe.experts.{{e}}.{name}.weight", experts=config.num_experts)
        }

    layer = decoder.TENSORS["layer"] | {
        "experts": {
            "router": {"kernel": Stored("layers.{i}.block_sparse_moe.gate.weight")},
            "gate": each("w1"),
            "up": each("w3"),
            "down": each("w2"),
        }
    }
    return decoder.TENSORS | {"layer": layer}


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    values = decoder.rotated(fields, decoder.sizes(fields, "mixtral", eps=1e-5), theta=1e6)
    size = fields.count_or_none("sliding_window", default=None)
    return DecoderConfig(
        **values,
        **decoder.mixture(fields, "num_local_experts", default=8),
        windows=decoder.windows(fields, values["num_layers"], size),
    )


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "MixtralForCausalLM") | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        **decoder.window_entries(config),
    }


def Block(config: DecoderConfig, rngs: nnx.Rngs, layer: int = 0) -> DecoderBlock:
    """The layer."""
    return DecoderBlock(config, rngs, layer, experts=Experts)


Embed, Head = TokenEmbed, RMSNormedHead
