"""Falcon (arXiv:2311.16867): multi-query or grouped heads, parallel halves, rotary or ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import (
    EMBED_AXES,
    GROUPED_AXES,
    HEAD_AXES,
    NormedHead,
    ParallelBlock,
    PreNormBlock,
    TokenEmbed,
    TransformerBlock,
)
from jaxserve.models.rotary import Rotary, rotated, rotated_entries
from jaxserve.models.schema import Fields, ModelConfig, alibi_slopes

NAMES = ConfigNames(
    num_layers=("num_hidden_layers", "n_layer"),
    num_heads=("num_attention_heads", "n_head"),
    num_kv_heads=("num_kv_heads", "n_head_kv"),
    ffn_size=("ffn_hidden_size",),
    activation=("activation",),
)
AXES = {"embed": EMBED_AXES, "layer": GROUPED_AXES, "head": HEAD_AXES}
PREFIX = "transformer."
NO_PARAMETERS = ("h.{i}.self_attention.rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys; None with ALiBi.
    parallel: whether attention and feed-forward are side by side.
    norms: norms of a layer: 1 for both halves, or 2.
    grouped: whether config.json gives the number of KV heads ("new_decoder_architecture").
    bias: whether the projections have biases.
    """

    rotary: Rotary | None
    parallel: bool
    norms: int
    grouped: bool
    bias: bool

    @property
    def alibi_slopes(self) -> np.ndarray | None:
        """float32[N] ALiBi slopes, or None; the bias is added before scores are scaled."""
        return alibi_slopes(self.num_heads) * np.float32(self.attention_scale(0)) if self.alibi else None


def TENSORS(config: FalconConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    two = config.parallel and config.norms == 2
    return {
        "embed": {"tokens": table("word_embeddings")},
        "layer": {
            "attention_norm": norm("h.{i}.ln_attn" if two else "h.{i}.input_layernorm"),
            "qkv": linear("h.{i}.self_attention.query_key_value"),
            "out": linear("h.{i}.self_attention.dense"),
            "ffn_norm": norm("h.{i}.ln_mlp" if two else "h.{i}.post_attention_layernorm"),
            "up": linear("h.{i}.mlp.dense_h_to_4h"),
            "down": linear("h.{i}.mlp.dense_4h_to_h"),
        },
        "head": {"norm": norm("ln_f"), "tokens": table("lm_head")},
    }


def parse_config(entries: Mapping[str, Any]) -> FalconConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    grouped, alibi = fields.flag("new_decoder_architecture", default=False), fields.flag("alibi", default=False)
    values = NAMES.read(
        fields, "falcon", eos=11, bos=11, tied=True, activation="gelu", ffn_ratio=4, alibi=alibi, max_position=2048
    )
    if not grouped:
        values["num_kv_heads"] = 1 if fields.flag("multi_query", default=True) else values["num_heads"]
    values["rotary"] = None
    parallel = fields.flag("parallel_attn", default=True) or grouped
    return FalconConfig(
        **(values if alibi else rotated(fields, values)),
        parallel=parallel,
        norms=(fields.count("num_ln_in_parallel_attn", default=2) if grouped else 1) if parallel else 2,
        grouped=grouped,
        bias=fields.flag("bias", default=False),
    )


def hf_config(config: FalconConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        **NAMES.entries(config, "FalconForCausalLM"),
        **({} if config.rotary is None else rotated_entries(config.rotary, config)),
        "new_decoder_architecture": config.grouped,
        "multi_query": config.num_kv_heads == 1,
        "parallel_attn": config.parallel,
        "num_ln_in_parallel_attn": config.norms if config.grouped else None,
        "alibi": config.alibi,
        "bias": config.bias,
    }


def Block(config: FalconConfig, rngs: nnx.Rngs, layer: int = 0) -> TransformerBlock:
    """The layer: attention and feed-forward, side by side or in turn."""
    kind = ParallelBlock if config.parallel else PreNormBlock
    return kind(
        config,
        rngs,
        layer,
        one_norm=config.norms == 1,
        attention_bias=config.bias,
        ffn_bias=config.bias,
        rotary=config.rotary,
    )


Embed, Head = TokenEmbed, NormedHead
