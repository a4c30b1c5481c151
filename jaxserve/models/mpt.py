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

from jaxserve.models.layers import GROUPED_AXES, LayerNorm, NormedHead, PreNormBlock, TokenEmbed
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {"tokens": {"table": ("vocab", "embed")}},
    "layer": GROUPED_AXES,
    "head": {"norm": {"scale": ("embed",)}, "tokens": {"table": ("vocab", "embed")}},
}
TENSORS = {
    "embed": {"tokens": {"table": Stored("wte.weight")}},
    "layer": {
        "attention_norm": {"scale": Stored("blocks.{i}.norm_1.weight")},
        "qkv": {"kernel": Stored("blocks.{i}.attn.Wqkv.weight", parts=True)},
        "out": {"kernel": Stored("blocks.{i}.attn.out_proj.weight")},
        "ffn_norm": {"scale": Stored("blocks.{i}.norm_2.weight")},
        "up": {"kernel": Stored("blocks.{i}.ffn.up_proj.weight")},
        "down": {"kernel": Stored("blocks.{i}.ffn.down_proj.weight")},
    },
    "head": {"norm": {"scale": Stored("norm_f.weight")}, "tokens": {"table": Stored("lm_head.weight")}},
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
    attention.refuse("attn_type", unless="multihead_attention", because="key heads are not shared")
    attention.refuse("alibi", unless=True, because="positions are not learned")
    attention.refuse("alibi_bias_max", unless=8, because="the flattest slope is 2^-8")
    attention.refuse("qk_ln", unless=False, because="queries and keys are not normed")
    attention.refuse("prefix_lm", unless=False, because="attention is causal")
    fields.refuse("no_bias", unless=True, because="nothing has biases")
    fields.refuse("expansion_ratio", unless=4, because="the feed-forward is four times the hidden size")
    fields.refuse("norm_type", unless="low_precision_layernorm", because="norms are layer norms")
    hidden_size, num_heads = fields.count("d_model", "hidden_size"), fields.count("n_heads", "num_attention_heads")
    vocab_size = fields.count("vocab_size")
    return MPTConfig(
        family="mpt",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("n_layers", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(hidden_size, num_heads),
        ffn_size=4 * hidden_size,
        max_position=None,
        alibi=True,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation="gelu",
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=None),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=None),
        initializer_range=fields.number("initializer_range", default=0.02),
        clip_qkv=attention.number("clip_qkv", default=0.0) or None,
        softmax_scale=attention.number("softmax_scale", default=0.0) or None,
        trained=fields.count("max_seq_len", default=2048),
    )


def hf_config(config: MPTConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "max_seq_len": config.trained,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.initializer_range,
        "attn_config": {
            "alibi": True,
            "clip_qkv": config.clip_qkv,
            "softmax_scale": config.softmax_scale,
        },
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class Block(PreNormBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each with a norm before and a residual around it."""

    config: MPTConfig

    def __init__(self, config: MPTConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        norm = partial(LayerNorm, bias=False)
        super().__init__(config, rngs, layer, norm=norm, attention_bias=False, ffn_bias=False)

    def project_qkv(self, x: Float[jax.Array, "T H"]) -> Float32[jax.Array, "T columns"]:
        """The queries, keys and values of x, within their bound."""
        y, bound = self.qkv(x), self.config.clip_qkv
        return y if bound is None else jnp.clip(y, -bound, bound)


Embed, Head = TokenEmbed, partial(NormedHead, norm=partial(LayerNorm, bias=False))
