"""GPT-2 (Radford et al., 2019): learned positions, norms before each half, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models.layers import BLOCK_AXES, NormedHead, PreNormBlock, Table
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "embed")},
        "positions": {"table": ("positions", "embed")},
    },
    "layer": BLOCK_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "tokens": {"table": ("vocab", "embed")},
    },
}

TENSORS = {
    "embed": {
        "tokens": {"table": Stored("wte.weight")},
        "positions": {"table": Stored("wpe.weight")},
    },
    "layer": {
        "attention_norm": {"scale": Stored("h.{i}.ln_1.weight"), "bias": Stored("h.{i}.ln_1.bias")},
        "qkv": {
            "kernel": Stored("h.{i}.attn.c_attn.weight", transposed=True, parts=True),
            "bias": Stored("h.{i}.attn.c_attn.bias", parts=True),
        },
        "out": {
            "kernel": Stored("h.{i}.attn.c_proj.weight", transposed=True),
            "bias": Stored("h.{i}.attn.c_proj.bias"),
        },
        "ffn_norm": {"scale": Stored("h.{i}.ln_2.weight"), "bias": Stored("h.{i}.ln_2.bias")},
        "up": {"kernel": Stored("h.{i}.mlp.c_fc.weight", transposed=True), "bias": Stored("h.{i}.mlp.c_fc.bias")},
        "down": {"kernel": Stored("h.{i}.mlp.c_proj.weight", transposed=True), "bias": Stored("h.{i}.mlp.c_proj.bias")},
    },
    "head": {
        "norm": {"scale": Stored("ln_f.weight"), "bias": Stored("ln_f.bias")},
        "tokens": {"table": Stored("lm_head.weight")},
    },
}
PREFIX = "transformer."
# GrammarMasks that older versions of the library saved with each layer.
NO_PARAMETERS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(ModelConfig):
    """Attributes:
    scale_attention: whether scores are divided by the square root of the head's size.
    scale_attention_by_layer: whether they are divided by the layer's number, from 1, as well.
    """

    scale_attention: bool = True
    scale_attention_by_layer: bool = False

    def attention_scale(self, layer: int) -> float:
        scale = self.head_dim**-0.5 if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_attention_by_layer else scale


def parse_config(entries: Mapping[str, Any]) -> GPT2Config:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("add_cross_attention", unless=False, because="there is no encoder to attend to")
    hidden_size = fields.count("n_embd", "hidden_size")
    num_heads = fields.count("n_head", "num_attention_heads")
    vocab_size = fields.count("vocab_size")
    return GPT2Config(
        family="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(hidden_size, num_heads),
        ffn_size=fields.count("n_inner", default=4 * hidden_size),
        max_position=fields.count("n_positions", "max_position_embeddings", "n_ctx"),
        alibi=False,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation=fields.activation("activation_function", default="gelu_new"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=50256),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=50256),
        initializer_range=fields.number("initializer_range", default=0.02),
        scale_attention=fields.flag("scale_attn_weights", default=True),
        scale_attention_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", default=False),
    )


def hf_config(config: GPT2Config) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
        "initializer_range": config.initializer_range,
        "scale_attn_weights": config.scale_attention,
        "scale_attn_by_inverse_layer_idx": config.scale_attention_by_layer,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class Embed(nnx.Module):
    """tokens [T], positions [T] -> [T, H]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        assert config.max_position is not None
        self.tokens = Table(config.vocab_size, config.hidden_size, config, rngs)
        self.positions = Table(config.max_position, config.hidden_size, config, rngs)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        return self.tokens(tokens) + self.positions(positions)


Block, Head = PreNormBlock, NormedHead
