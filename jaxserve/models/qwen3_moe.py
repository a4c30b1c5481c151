"""Qwen3 with experts (arXiv:2505.09388): Qwen3's layers with many small feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Attributes:
    weights_add_up: whether the weights of a token's experts add up to 1.
    """

    weights_add_up: bool


def TENSORS(config: ModelConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    each = partial(linear, bias=False, experts=config.num_experts)
    layer = decoder.TENSORS["layer"] | {
        "experts": {
            "router": linear("layers.{i}.mlp.gate", bias=False),
            **{name: each(f"layers.{{i}}.mlp.experts.{{e}}.{name}_proj") for name in ("gate", "up", "down")},
        }
    }
    return decoder.TENSORS | {"layer": layer}


def parse_config(entries: Mapping[str, Any]) -> Qwen3MoeConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("use_sliding_window", unless=False, because="all layers attend to the whole context")
    fields.refuse("dual_chunk_attention_config", because="a layer attends to all tokens")
    fields.refuse("decoder_sparse_step", unless=1, because="every layer has experts")
    fields.refuse("mlp_only_layers", unless=[], because="every layer has experts")
    values = rotated(fields, decoder.sizes(fields, "qwen3_moe", eos=None, bos=None, num_kv_heads=4))
    bias = fields.flag("attention_bias", default=False)
    values["ffn_size"] = fields.count("moe_intermediate_size", default=768)
    return Qwen3MoeConfig(
        **values,
        **decoder.mixture(fields, "num_experts", "num_local_experts", default=128, per_token=8),
        attention_bias=bias,
        out_bias=bias,
        head_norm=True,
        weights_add_up=fields.flag("norm_topk_prob", default=False),
    )


def hf_config(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "Qwen3MoeForCausalLM") | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.ffn_size,
        "norm_topk_prob": config.weights_add_up,
        "attention_bias": config.attention_bias,
    }


def Block(config: Qwen3MoeConfig, rngs: nnx.Rngs, layer: int = 0) -> DecoderBlock:
    """The layer."""
    return DecoderBlock(config, rngs, layer, experts=partial(Experts, weights_add_up=config.weights_add_up))


Embed, Head = TokenEmbed, RMSNormedHead
