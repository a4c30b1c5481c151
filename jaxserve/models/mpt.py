"""MPT (MosaicML): ALiBi, no biases, tied head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Float32

from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import EMBED_AXES, GROUPED_AXES, HEAD_AXES, LayerNorm, NormedHead, PreNormBlock, TokenEmbed
from jaxserve.models.schema import Fields, ModelConfig

NAMES = ConfigNames(
    hidden_size=("d_model", "hidden_size"),
    num_layers=("n_layers", "num_hidden_layers"),
    num_heads=("n_heads", "num_attention_heads"),
    ffn_size=(),
    max_position=(),
    activation=(),
)
AXES = {"embed": EMBED_AXES, "layer": GROUPED_AXES, "head": HEAD_AXES}
TENSORS = {
    "embed": {"tokens": table("wte")},
    "layer": {
        "attention_norm": norm("blocks.{i}.norm_1", bias=False),
        "qkv": linear("blocks.{i}.attn.Wqkv", bias=False, parts=True),
        "out": linear("blocks.{i}.attn.out_proj", bias=False),
        "ffn_norm": norm("blocks.{i}.norm_2", bias=False),
        "up": linear("blocks.{i}.ffn.up_proj", bias=False),
        "down": linear("blocks.{i}.ffn.down_proj", bias=False),
    },
    "head": {"norm": norm("norm_f", bias=False), "tokens": table("lm_head")},
}
PREFIX = "transformer."
NO_PARAMETERS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MPTConfig(ModelConfig):
    """Attributes:
    clip_qkv: bound of queries, keys and values, or None.
    softmax_scale: factor of the scores, or None for head_dim^-0.5.
    trained: positions that it was trained on.
    """

    clip_qkv: float | None = None
    softmax_scale: float | None = None
    trained: int = 2048

    @property
    def alibi_slopes(self) -> np.ndarray:
        """float32[N]; of the slopes for a power of two of heads, the odd ones come first."""
        power = 2 ** math.ceil(math.log2(self.num_heads))
        slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
        if power != self.num_heads:
            slopes = np.concatenate([slopes[1::2], slopes[::2]])[: self.num_heads]
        return slopes.astype(np.float32)

    def attention_scale(self, layer: int) -> float:
        """The factor applied to query-key products in this layer."""
        return self.softmax_scale or 1 / math.sqrt(self.head_dim)


def parse_config(entries: Mapping[str, Any]) -> MPTConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    attention = fields.within("attn_config")
    attention.refuse("attn_type", unless="multihead_attention", because="KV heads are not shared")
    attention.refuse("alibi", unless=True, because="positions are not learned")
    attention.refuse("alibi_bias_max", unless=8, because="the flattest slope is 2^-8")
    attention.refuse("qk_ln", unless=False, because="queries and keys are not normed")
    attention.refuse("prefix_lm", unless=False, because="attention is causal")
    fields.refuse("no_bias", unless=True, because="nothing has biases")
    fields.refuse("expansion_ratio", unless=4, because="the feed-forward is four times the hidden size")
    fields.refuse("norm_type", unless="low_precision_layernorm", because="norms are layer norms")
    return MPTConfig(
        **NAMES.read(fields, "mpt", eos=None, bos=None, tied=True, activation="gelu", ffn_ratio=4, alibi=True),
        clip_qkv=attention.number("clip_qkv", default=0.0) or None,
        softmax_scale=attention.number("softmax_scale", default=0.0) or None,
        trained=fields.count("max_seq_len", default=2048),
    )


def hf_config(config: MPTConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "MptForCausalLM") | {
        "max_seq_len": config.trained,
        "attn_config": {"alibi": True, "clip_qkv": config.clip_qkv, "softmax_scale": config.softmax_scale},
    }


_norm = partial(LayerNorm, bias=False)


class MPTBlock(PreNormBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each behind a norm and with a residual."""

    config: MPTConfig

    def __init__(self, config: MPTConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        super().__init__(config, rngs, layer, norm=_norm, attention_bias=False, ffn_bias=False)

    def project_qkv(self, x: Float[jax.Array, "T H"]) -> Float32[jax.Array, "T ..."]:
        """The queries, keys and values of x, within their bound."""
        y, bound = self.qkv(x), self.config.clip_qkv
        return y if bound is None else jnp.clip(y, -bound, bound)


Embed, Block, Head = TokenEmbed, MPTBlock, partial(NormedHead, norm=_norm)
