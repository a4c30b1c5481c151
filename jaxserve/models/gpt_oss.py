"""gpt-oss (arXiv:2508.10925): attention sinks, alternating windows, experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models import decoder, experts
from jaxserve.models.decoder import PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.experts import Experts
from jaxserve.models.hf_names import linear
from jaxserve.models.layers import RMSNormedHead, TokenEmbed
from jaxserve.models.rotary import rotated
from jaxserve.models.schema import Fields, Stored

__all__ = ["PREFIX"]

AXES = decoder.AXES | {"layer": decoder.AXES["layer"] | {"experts": experts.AXES}}
_EXPERTS = "layers.{i}.mlp.experts."
TENSORS = decoder.TENSORS | {
    "layer": decoder.TENSORS["layer"]
    | {
        "sinks": Stored("layers.{i}.self_attn.sinks"),
        "experts": {
            "router": linear("layers.{i}.mlp.router"),
            "gate": {
                "kernel": Stored(f"{_EXPERTS}gate_up_proj", transposed=True, every=(0, 2)),
                "bias": Stored(f"{_EXPERTS}gate_up_proj_bias", every=(0, 2)),
            },
            "up": {
                "kernel": Stored(f"{_EXPERTS}gate_up_proj", transposed=True, every=(1, 2)),
                "bias": Stored(f"{_EXPERTS}gate_up_proj_bias", every=(1, 2)),
            },
            "down": {
                "kernel": Stored(f"{_EXPERTS}down_proj", transposed=True),
                "bias": Stored(f"{_EXPERTS}down_proj_bias"),
            },
        },
    }
}
NO_PARAMETERS: tuple[str, ...] = ()
_LIMIT, _SLOPE = 7.0, 1.702  # of the activation
_ROTATION = {  # where config.json says none
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def parse_config(entries: Mapping[str, Any]) -> DecoderConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields({**entries, "rope_parameters": entries.get("rope_parameters") or _ROTATION})
    fields.refuse("swiglu_alpha", unless=_SLOPE, because="the activation has that slope")
    fields.refuse("swiglu_limit", unless=_LIMIT, because="the activation is bounded there")
    fields.refuse("attention_bias", unless=True, because="the attention's projections have biases")
    values = rotated(
        fields,
        decoder.sizes(fields, "gpt_oss", eos=None, bos=None, norm_eps=1e-5, num_kv_heads=8, head_dim=64),
        theta=150000.0,
    )
    size = fields.count("sliding_window", default=128)
    return DecoderConfig(
        **values,
        **decoder.mixture(fields, "num_local_experts", default=128, per_token=4),
        windows=decoder.windows(fields, values["num_layers"], size, sliding=lambda layer: layer % 2 == 0),
        attention_bias=True,
        out_bias=True,
        sinks=True,
    )


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return decoder.hf_config(config, "GptOssForCausalLM") | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "attention_bias": True,
        "swiglu_limit": _LIMIT,
        **decoder.window_entries(config),
    }


def _activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A bounded SwiGLU whose linear part is shifted by one."""
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return gate * nnx.sigmoid(_SLOPE * gate) * (up + 1)


def Block(config: DecoderConfig, rngs: nnx.Rngs, layer: int = 0) -> DecoderBlock:
    """The layer."""
    return DecoderBlock(config, rngs, layer, experts=partial(Experts, bias=True, activation=_activation))


Embed, Head = TokenEmbed, RMSNormedHead
