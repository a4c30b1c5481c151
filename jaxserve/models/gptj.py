"""GPT-J (github.com/kingoflolz/mesh-transformer-jax): rotary pairs of neighbours, both halves behind one norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx

from jaxserve.models.layers import GROUPED_AXES, NormedHead, ParallelBlock, TokenEmbed
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {"tokens": {"table": ("vocab", "embed")}},
    "layer": GROUPED_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "tokens": {"table": ("vocab", "embed")},
        "bias": ("vocab",),
    },
}
TENSORS = {
    "embed": {"tokens": {"table": Stored("wte.weight")}},
    "layer": {
        "attention_norm": {"scale": Stored("h.{i}.ln_1.weight"), "bias": Stored("h.{i}.ln_1.bias")},
        "qkv": {"kernel": Stored("h.{i}.attn.{qkv}_proj.weight")},
        "out": {"kernel": Stored("h.{i}.attn.out_proj.weight")},
        "up": {"kernel": Stored("h.{i}.mlp.fc_in.weight"), "bias": Stored("h.{i}.mlp.fc_in.bias")},
        "down": {"kernel": Stored("h.{i}.mlp.fc_out.weight"), "bias": Stored("h.{i}.mlp.fc_out.bias")},
    },
    "head": {
        "norm": {"scale": Stored("ln_f.weight"), "bias": Stored("ln_f.bias")},
        "tokens": {"table": Stored("lm_head.weight")},
        "bias": Stored("lm_head.bias"),
    },
}
PREFIX = "transformer."
# Masks that older versions of the library saved with each layer.
NO_PARAMETERS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTJConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys.
    """

    rotary: Rotary


def parse_config(entries: Mapping[str, Any]) -> GPTJConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size, num_heads = fields.count("n_embd", "hidden_size"), fields.count("n_head", "num_attention_heads")
    vocab_size, head_dim = fields.count("vocab_size"), head_size(hidden_size, num_heads)
    size = fields.count("rotary_dim", default=min(64, head_dim))
    if size % 2 or size > head_dim:
        raise ValueError(f"rotary_dim is {size}; it must be even and at most {head_dim}, the size of a head")
    return GPTJConfig(
        family="gptj",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=fields.count("n_inner", default=4 * hidden_size),
        max_position=fields.count("n_positions", "max_position_embeddings"),
        alibi=False,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation=fields.activation("activation_function", default="gelu_new"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=50256),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=50256),
        initializer_range=fields.number("initializer_range", default=0.02),
        rotary=Rotary(size=size, interleaved=True),
    )


def hf_config(config: GPTJConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.max_position,
        "rotary_dim": config.rotary.size,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


def Block(config: GPTJConfig, rngs: nnx.Rngs, layer: int = 0) -> ParallelBlock:
    """The layer: attention, whose projections have no biases, beside the feed-forward, behind one norm."""
    return ParallelBlock(config, rngs, layer, one_norm=True, attention_bias=False, rotary=config.rotary)


Embed, Head = TokenEmbed, partial(NormedHead, bias=True)
