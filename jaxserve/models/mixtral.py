"""Mixtral (arXiv:2401.04088): Mistral with eight feed-forwards, two for each token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flax import nnx

from jaxserve.models import decoder, experts
from jaxserve.models.decoder import NO_PARAMETERS, PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.experts import Experts
from jaxserve.models.hf_names import linear
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.rotary import rotated
from jaxserve.models.schema import Fields, ModelConfig

__all__ = ["NO_PARAMETERS", "PREFIX"]

AXES = decoder.AXES | {"layer": decoder.AXES["layer"] | {"experts": experts.AXES}}


def TENSORS(config: ModelConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    each = partial(linear, bias=False, experts=config.num_experts)
    layer = decoder.TENSORS["layer"] | {
        "experts": {
            "router": linear("layers.{i}.block_sparse_moe.gate", bias=False),
            "gate": each("layers.{i}.block_sparse_moe.experts.{e}.w1"),
            "up": each("layers.{i}.block_sparse_moe.experts.{e}.w3"),
            "down": each("layers.{i}.block_sparse_moe.experts.{e}.w2"),
        }
    }
    return decoder.TENSORS | {"layer": layer}


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    values = rotated(fields, decoder.sizes(fields, "mixtral", num_kv_heads=8, norm_eps=1e-5), theta=1e6)
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
