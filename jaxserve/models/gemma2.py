"""Gemma 2 (arXiv:2408.00118): norms around each half, soft caps, alternating windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models import decoder, rotary
from jaxserve.models.decoder import NO_PARAMETERS, PREFIX, DecoderBlock, DecoderConfig
from jaxserve.models.hf_names import norm
from jaxserve.models.layers import Attend, NormedHead, RMSNorm, TokenEmbed
from jaxserve.models.schema import Fields

__all__ = ["NO_PARAMETERS", "PREFIX"]

NAMES = dataclasses.replace(decoder.NAMES, activation=("hidden_activation",))
_NORM = {"scale": ("embed",)}
AXES = decoder.AXES | {"layer": decoder.AXES["layer"] | {"attention_out_norm": _NORM, "ffn_out_norm": _NORM}}
TENSORS = decoder.TENSORS | {
    "layer": decoder.TENSORS["layer"]
    | {
        "attention_out_norm": norm("layers.{i}.post_attention_layernorm", bias=False),
        "ffn_norm": norm("layers.{i}.pre_feedforward_layernorm", bias=False),
        "ffn_out_norm": norm("layers.{i}.post_feedforward_layernorm", bias=False),
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Attributes:
    query_scalar: scores are scaled by its inverse square root.
    """

    query_scalar: int

    def attention_scale(self, layer: int) -> float:
        """The factor applied to query-key products in this layer."""
        return self.query_scalar**-0.5


def sizes(fields: Fields, family: str, *, sliding: Callable[[int], bool]) -> dict[str, Any]:
    """What the configurations of Gemma 2 and 3 have in common; positions are not rotated yet.

    Args:
      sliding: whether a layer has a window where `layer_types` does not say.
    """
    fields.refuse("use_bidirectional_attention", unless=False, because="tokens attend to what came before them")
    values = NAMES.read(
        fields,
        family,
        eos=1,
        bos=2,
        tied=True,
        num_kv_heads=4,
        head_dim=256,
        norm_eps=1e-6,
        activation="gelu_pytorch_tanh",
    )
    size = fields.count_or_none("sliding_window", default=4096)
    bias = fields.flag("attention_bias", default=False)
    return values | {
        "windows": decoder.windows(fields, values["num_layers"], size, sliding=sliding),
        "query_scalar": fields.count("query_pre_attn_scalar", default=256),
        "attention_bias": bias,
        "out_bias": bias,
    }


def parse_config(entries: Mapping[str, Any]) -> GemmaConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    return GemmaConfig(
        **rotary.rotated(fields, sizes(fields, "gemma2", sliding=lambda layer: layer % 2 == 0)),
        soft_cap=fields.number_or_none("attn_logit_softcapping", default=50.0),
        logit_soft_cap=fields.number_or_none("final_logit_softcapping", default=30.0),
    )


def hf_config(config: GemmaConfig, architecture: str = "Gemma2ForCausalLM") -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        **NAMES.entries(config, architecture),
        **rotary.rotated_entries(config.rotary, config),
        "query_pre_attn_scalar": config.query_scalar,
        "attn_logit_softcapping": config.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "attention_bias": config.attention_bias,
        **decoder.window_entries(config),
    }


_norm = partial(RMSNorm, offset=1.0)


class GemmaEmbed(TokenEmbed):
    """tokens [T], positions [T] -> [T, H]: rows of the table times sqrt(H), in their dtype."""

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        x = super().__call__(tokens, positions)
        return x * jnp.asarray(math.sqrt(x.shape[1]), x.dtype)


class GemmaBlock(DecoderBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each between two norms, with a residual."""

    def __init__(self, config: GemmaConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        super().__init__(config, rngs, layer, norm=_norm)
        self.attention_out_norm, self.ffn_out_norm = _norm(config), _norm(config)

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        dtype = x.dtype
        assert self.ffn_norm is not None
        attended, cache = self.attention(self.attention_norm(x), positions, attend, cache)
        x = (x + self.attention_out_norm(attended)).astype(dtype)
        inner = self.feed_forward(self.ffn_norm(x), positions)
        return (x + self.ffn_out_norm(inner)).astype(dtype), cache


Embed, Block, Head = GemmaEmbed, GemmaBlock, partial(NormedHead, norm=_norm)
