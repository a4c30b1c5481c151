"""GPT-NeoX (arXiv:2204.06745; also Pythia): rotary positions, attention and feed-forward side by side, its own head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxserve.models import rotary
from jaxserve.models.layers import BLOCK_AXES, NormedHead, ParallelBlock, PreNormBlock, TokenEmbed, TransformerBlock
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {
        "tokens": {"table": ("vocab", "embed")},
    },
    "layer": BLOCK_AXES,
    "head": {
        "norm": {"scale": ("embed",), "bias": ("embed",)},
        "tokens": {"table": ("vocab", "embed")},
    },
}

TENSORS = {
    "embed": {
        "tokens": {"table": Stored("embed_in.weight")},
    },
    "layer": {
        "attention_norm": {
            "scale": Stored("layers.{i}.input_layernorm.weight"),
            "bias": Stored("layers.{i}.input_layernorm.bias"),
        },
        "qkv": {
            "kernel": Stored("layers.{i}.attention.query_key_value.weight"),
            "bias": Stored("layers.{i}.attention.query_key_value.bias"),
        },
        "out": {
            "kernel": Stored("layers.{i}.attention.dense.weight"),
            "bias": Stored("layers.{i}.attention.dense.bias"),
        },
        "ffn_norm": {
            "scale": Stored("layers.{i}.post_attention_layernorm.weight"),
            "bias": Stored("layers.{i}.post_attention_layernorm.bias"),
        },
        "up": {
            "kernel": Stored("layers.{i}.mlp.dense_h_to_4h.weight"),
            "bias": Stored("layers.{i}.mlp.dense_h_to_4h.bias"),
        },
        "down": {
            "kernel": Stored("layers.{i}.mlp.dense_4h_to_h.weight"),
            "bias": Stored("layers.{i}.mlp.dense_4h_to_h.bias"),
        },
    },
    "head": {
        "norm": {"scale": Stored("final_layer_norm.weight"), "bias": Stored("final_layer_norm.bias")},
        "tokens": {"table": Stored("embed_out.weight")},
    },
}
PREFIX = "gpt_neox."
# Masks and frequencies that older versions of the library saved with each layer.
NO_PARAMETERS = (
    "layers.{i}.attention.bias",
    "layers.{i}.attention.masked_bias",
    "layers.{i}.attention.rotary_emb.inv_freq",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys.
    parallel_residual: whether the feed-forward reads what the attention reads, rather than what it leaves.
    attention_bias: whether the attention's projections have biases.
    """

    rotary: Rotary
    parallel_residual: bool = True
    attention_bias: bool = True


def parse_config(entries: Mapping[str, Any]) -> GPTNeoXConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    head_dim = head_size(hidden_size, num_heads)
    fields.refuse("head_dim", unless=head_dim, because="the heads share the hidden size")
    vocab_size = fields.count("vocab_size")
    max_position = fields.count("max_position_embeddings")
    turned = rotary.parse(
        entries,
        head_dim,
        max_position=max_position,
        theta=fields.number("rotary_emb_base", default=10000.0),
        share=fields.number("rotary_pct", default=0.25),
    )
    return GPTNeoXConfig(
        family="gpt_neox",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=fields.count("intermediate_size"),
        max_position=turned.longest(max_position),
        alibi=False,
        norm_eps=fields.number("layer_norm_eps", default=1e-5),
        activation=fields.activation("hidden_act", default="gelu"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=2),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=0),
        initializer_range=fields.number("initializer_range", default=0.02),
        rotary=turned,
        parallel_residual=fields.flag("use_parallel_residual", default=True),
        attention_bias=fields.flag("attention_bias", default=True),
    )


def hf_config(config: GPTNeoXConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.rotary.original or config.max_position,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "initializer_range": config.initializer_range,
        "rotary_pct": config.rotary.size / config.head_dim,
        "rotary_emb_base": config.rotary.theta,
        "rope_parameters": config.rotary.entries() | {"partial_rotary_factor": config.rotary.size / config.head_dim},
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


def Block(config: GPTNeoXConfig, rngs: nnx.Rngs, layer: int = 0) -> TransformerBlock:
    """The layer: attention and feed-forward with a norm before each, side by side or in turn."""
    kind = ParallelBlock if config.parallel_residual else PreNormBlock
    return kind(config, rngs, layer, attention_bias=config.attention_bias, rotary=config.rotary)


Embed, Head = TokenEmbed, NormedHead
