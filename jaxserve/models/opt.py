"""OPT (arXiv:2205.01068): learned positions, norms before or after each half, in one size a narrower token table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Int32

from jaxserve.models.layers import BLOCK_AXES, Attend, LayerNorm, Linear, PreNormBlock, Table
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

_OFFSET = 2  # rows of the position table before that of position 0; the library leaves them unused

AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "word_embed")},
        "project": {"kernel": ("embed", "word_embed")},
        "positions": {"table": ("positions", "embed")},
    },
    "layer": BLOCK_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "project": {"kernel": ("word_embed", "embed")},
        "tokens": {"table": ("vocab", "word_embed")},
    },
}

TENSORS = {
    "embed": {
        "tokens": {"table": Stored("embed_tokens.weight")},
        "project": {"kernel": Stored("project_in.weight")},
        "positions": {"table": Stored("embed_positions.weight")},
    },
    "layer": {
        "attention_norm": {
            "scale": Stored("layers.{i}.self_attn_layer_norm.weight"),
            "bias": Stored("layers.{i}.self_attn_layer_norm.bias"),
        },
        "qkv": {
            "kernel": Stored("layers.{i}.self_attn.{qkv}_proj.weight"),
            "bias": Stored("layers.{i}.self_attn.{qkv}_proj.bias"),
        },
        "out": {
            "kernel": Stored("layers.{i}.self_attn.out_proj.weight"),
            "bias": Stored("layers.{i}.self_attn.out_proj.bias"),
        },
        "ffn_norm": {
            "scale": Stored("layers.{i}.final_layer_norm.weight"),
            "bias": Stored("layers.{i}.final_layer_norm.bias"),
        },
        "up": {"kernel": Stored("layers.{i}.fc1.weight"), "bias": Stored("layers.{i}.fc1.bias")},
        "down": {"kernel": Stored("layers.{i}.fc2.weight"), "bias": Stored("layers.{i}.fc2.bias")},
    },
    "head": {
        "norm": {"scale": Stored("final_layer_norm.weight"), "bias": Stored("final_layer_norm.bias")},
        "project": {"kernel": Stored("project_out.weight")},
        "tokens": {"table": Stored("lm_head.weight")},
    },
}
PREFIX = "model.decoder."
NO_PARAMETERS = ("version",)  # of the format that the first checkpoints were converted from


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(ModelConfig):
    """Attributes:
    word_embed_size: width of the token table; where it is not the hidden size, projections lie between.
    norm_first: whether the norm of each half comes before it, rather than after its residual.
    last_norm: whether there is a norm after the layers.
    bias: whether the layers' projections have biases.
    affine_norms: whether the norms have a scale and a bias.
    """

    word_embed_size: int
    norm_first: bool = True
    last_norm: bool = True
    bias: bool = True
    affine_norms: bool = True


def parse_config(entries: Mapping[str, Any]) -> OPTConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    vocab_size = fields.count("vocab_size")
    norm_first = fields.flag("do_layer_norm_before", default=True)
    return OPTConfig(
        family="opt",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_size(hidden_size, num_heads),
        ffn_size=fields.count("ffn_dim"),
        max_position=fields.count("max_position_embeddings"),
        alibi=False,
        norm_eps=1e-5,
        activation=fields.activation("activation_function", default="relu"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=2),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=2),
        initializer_range=fields.number("init_std", default=0.02),
        word_embed_size=fields.count("word_embed_proj_dim", default=hidden_size),
        norm_first=norm_first,
        last_norm=norm_first and not fields.flag("_remove_final_layer_norm", default=False),
        bias=fields.flag("enable_bias", default=True),
        affine_norms=fields.flag("layer_norm_elementwise_affine", default=True),
    )


def hf_config(config: OPTConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.ffn_size,
        "max_position_embeddings": config.max_position,
        "word_embed_proj_dim": config.word_embed_size,
        "activation_function": config.activation,
        "init_std": config.initializer_range,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.last_norm,
        "enable_bias": config.bias,
        "layer_norm_elementwise_affine": config.affine_norms,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class Embed(nnx.Module):
    """tokens [T], positions [T] -> [T, H]."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs) -> None:
        assert config.max_position is not None
        words, hidden = config.word_embed_size, config.hidden_size
        self.tokens = Table(config.vocab_size, words, config, rngs)
        self.project = Linear(words, hidden, config, rngs, bias=False) if words != hidden else None
        self.positions = Table(config.max_position + _OFFSET, hidden, config, rngs)

    def __call__(self, tokens: Int32[jax.Array, " T"], positions: Int32[jax.Array, " T"]) -> Float[jax.Array, "T H"]:
        words, places = self.tokens(tokens), self.positions(positions + _OFFSET)
        return words + places if self.project is None else (self.project(words) + places).astype(places.dtype)


class Block(PreNormBlock):
    """x [T, H] -> [T, H]: attention, then feed-forward, each with a residual around it and a norm before or after."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs, layer: int = 0) -> None:
        super().__init__(
            config,
            rngs,
            layer,
            norm=partial(LayerNorm, scale=config.affine_norms, bias=config.affine_norms),
            attention_bias=config.bias,
            ffn_bias=config.bias,
        )
        self.norm_first = config.norm_first

    def __call__(
        self, x: Float[jax.Array, "T H"], positions: Int32[jax.Array, " T"], attend: Attend, cache: Any
    ) -> tuple[Float[jax.Array, "T H"], Any]:
        if self.norm_first:
            return super().__call__(x, positions, attend, cache)
        assert self.ffn_norm is not None
        attended, cache = self.attention(x, positions, attend, cache)
        x = self.attention_norm((x + attended).astype(x.dtype))
        return self.ffn_norm((x + self.feed_forward(x, positions)).astype(x.dtype)), cache


class Head(nnx.Module):
    """The last norm, the projection to a narrower token table, and the head's own table: each where there is one."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs) -> None:
        words, hidden = config.word_embed_size, config.hidden_size
        self.norm = LayerNorm(config, scale=config.affine_norms, bias=config.affine_norms) if config.last_norm else None
        self.project = Linear(hidden, words, config, rngs, bias=False) if words != hidden else None
        if not config.tie_embeddings:
            self.tokens = Table(config.vocab_size, words, config, rngs)

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        x = x if self.norm is None else self.norm(x)
        return x if self.project is None else self.project(x).astype(x.dtype)
