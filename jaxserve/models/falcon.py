"""Falcon (arXiv:2311.16867): shared key heads, both halves side by side, rotary positions or ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.models import rotary
from jaxserve.models.layers import GROUPED_AXES, NormedHead, ParallelBlock, PreNormBlock, TokenEmbed, TransformerBlock
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig, Stored, alibi_slopes, head_size

AXES = {
    "embed": {"tokens": {"table": ("vocab", "embed")}},
    "layer": GROUPED_AXES,
    "head": {"norm": {"scale": ("embed",), "bias": ("embed",)}, "tokens": {"table": ("vocab", "embed")}},
}
PREFIX = "transformer."
NO_PARAMETERS = ("h.{i}.self_attention.rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys; None with ALiBi.
    parallel: whether attention and feed-forward are side by side.
    norms: norms of a layer: 1 for both halves, or 2.
    grouped: whether config.json gives the number of key heads ("new_decoder_architecture").
    bias: whether the projections have biases.
    trained: positions that it was trained on.
    """

    rotary: Rotary | None
    parallel: bool
    norms: int
    grouped: bool
    bias: bool
    trained: int

    @property
    def alibi_slopes(self) -> np.ndarray | None:
        """float32[N] ALiBi slopes, or None; the bias is added before scores are scaled."""
        return alibi_slopes(self.num_heads) * np.float32(self.attention_scale(0)) if self.alibi else None


def TENSORS(config: FalconConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    def pair(name: str, first: str) -> dict[str, Stored]:
        return {first: Stored(f"{name}.weight"), "bias": Stored(f"{name}.bias")}

    names = ("ln_attn", "ln_mlp") if config.parallel and config.norms == 2 else ("input_layernorm", _SECOND_NORM)
    return {
        "embed": {"tokens": {"table": Stored("word_embeddings.weight")}},
        "layer": {
            "attention_norm": pair(f"h.{{i}}.{names[0]}", "scale"),
            "qkv": pair("h.{i}.self_attention.query_key_value", "kernel"),
            "out": pair("h.{i}.self_attention.dense", "kernel"),
            "ffn_norm": pair(f"h.{{i}}.{names[1]}", "scale"),
            "up": pair("h.{i}.mlp.dense_h_to_4h", "kernel"),
            "down": pair("h.{i}.mlp.dense_4h_to_h", "kernel"),
        },
        "head": {"norm": pair("ln_f", "scale"), "tokens": {"table": Stored("lm_head.weight")}},
    }


_SECOND_NORM = "post_attention_layernorm"


def parse_config(entries: Mapping[str, Any]) -> FalconConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads", "n_head")
    vocab_size, head_dim = fields.count("vocab_size"), head_size(hidden_size, num_heads)
    grouped, alibi = fields.flag("new_decoder_architecture", default=False), fields.flag("alibi", default=False)
    one = 1 if fields.flag("multi_query", default=True) else num_heads
    num_kv_heads = fields.count("num_kv_heads", "n_head_kv", default=num_heads) if grouped else one
    parallel = fields.flag("parallel_attn", default=True) or grouped
    trained = fields.count("max_position_embeddings", default=2048)
    turned = None if alibi else rotary.parse(entries, head_dim, max_position=trained)
    return FalconConfig(
        family="falcon",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.count("ffn_hidden_size", default=4 * hidden_size),
        max_position=None if turned is None else turned.longest(trained),
        alibi=alibi,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation=fields.activation("activation", default="gelu"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=11),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=11),
        initializer_range=fields.number("initializer_range", default=0.02),
        rotary=turned,
        parallel=parallel,
        norms=(fields.count("num_ln_in_parallel_attn", default=2) if grouped else 1) if parallel else 2,
        grouped=grouped,
        bias=fields.flag("bias", default=False),
        trained=trained,
    )


def hf_config(config: FalconConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "new_decoder_architecture": config.grouped,
        "multi_query": config.num_kv_heads == 1,
        "parallel_attn": config.parallel,
        "num_ln_in_parallel_attn": config.norms if config.grouped else None,
        "ffn_hidden_size": config.ffn_size,
        "max_position_embeddings": config.trained,
        "alibi": config.alibi,
        "bias": config.bias,
        "layer_norm_epsilon": config.norm_eps,
        "activation": config.activation,
        "initializer_range": config.initializer_range,
        "rope_parameters": None if config.rotary is None else config.rotary.entries(),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
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
