"""OPT (arXiv:2205.01068): learned positions, norms before or after; one has a narrow table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float

from jaxserve.models import layers
from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import LayerNorm, Linear, Table
from jaxserve.models.schema import Fields, ModelConfig

_OFFSET = 2  # rows of the position table before that of position 0; the library leaves them unused

NAMES = ConfigNames(
    ffn_size=("ffn_dim",), norm_eps=(), activation=("activation_function",), initializer_range=("init_std",)
)
AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "word_embed")},
        "project": {"kernel": ("embed", "word_embed")},
        "positions": {"table": ("positions", "embed")},
    },
    "layer": layers.BLOCK_AXES,
    "head": layers.HEAD_AXES
    | {"project": {"kernel": ("word_embed", "embed")}, "tokens": {"table": ("vocab", "word_embed")}},
}
TENSORS = {
    "embed": {
        "tokens": table("embed_tokens"),
        "project": linear("project_in", bias=False),
        "positions": table("embed_positions"),
    },
    "layer": {
        "attention_norm": norm("layers.{i}.self_attn_layer_norm"),
        "qkv": linear("layers.{i}.self_attn.{qkv}_proj"),
        "out": linear("layers.{i}.self_attn.out_proj"),
        "ffn_norm": norm("layers.{i}.final_layer_norm"),
        "up": linear("layers.{i}.fc1"),
        "down": linear("layers.{i}.fc2"),
    },
    "head": {
        "norm": norm("final_layer_norm"),
        "project": linear("project_out", bias=False),
        "tokens": table("lm_head"),
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
    values = NAMES.read(fields, "opt", eos=2, bos=2, tied=True, activation="relu")
    norm_first = fields.flag("do_layer_norm_before", default=True)
    return OPTConfig(
        **values,
        word_embed_size=fields.count("word_embed_proj_dim", default=values["hidden_size"]),
        norm_first=norm_first,
        last_norm=norm_first and not fields.flag("_remove_final_layer_norm", default=False),
        bias=fields.flag("enable_bias", default=True),
        affine_norms=fields.flag("layer_norm_elementwise_affine", default=True),
    )


def hf_config(config: OPTConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return NAMES.entries(config, "OPTForCausalLM") | {
        "word_embed_proj_dim": config.word_embed_size,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.last_norm,
        "enable_bias": config.bias,
        "layer_norm_elementwise_affine": config.affine_norms,
    }


def embed(config: OPTConfig, rngs: nnx.Rngs) -> layers.PositionedEmbed:
    """Tokens, from a table that may be narrow, and positions."""
    return layers.PositionedEmbed(config, rngs, words=config.word_embed_size, offset=_OFFSET)


def block(config: OPTConfig, rngs: nnx.Rngs, layer: int = 0) -> layers.TransformerBlock:
    """Attention, then feed-forward, each with a residual and one norm."""
    make = layers.PreNormBlock if config.norm_first else layers.PostNormBlock
    norm = partial(LayerNorm, scale=config.affine_norms, bias=config.affine_norms)
    return make(config, rngs, layer, norm=norm, attention_bias=config.bias, ffn_bias=config.bias)


class OPTHead(nnx.Module):
    """Last norm, projection to a narrower token table, and own head: each where there is one."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs) -> None:
        words, hidden = config.word_embed_size, config.hidden_size
        self.norm = LayerNorm(config, scale=config.affine_norms, bias=config.affine_norms) if config.last_norm else None
        self.project = Linear(hidden, words, config, rngs, bias=False) if words != hidden else None
        if not config.tie_embeddings:
            self.tokens = Table(config.vocab_size, words, config, rngs)

    def __call__(self, x: Float[jax.Array, "T H"]) -> Float[jax.Array, "T E"]:
        x = x if self.norm is None else self.norm(x)
        return x if self.project is None else self.project(x).astype(x.dtype)


Embed, Block, Head = embed, block, OPTHead
