"""GPT-BigCode (StarCoder, arXiv:2305.06161): GPT-2 with one key head for all queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.models import gpt2
from jaxserve.models.gpt2 import Embed
from jaxserve.models.layers import GROUPED_AXES, NormedHead, PreNormBlock
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

__all__ = ["Embed"]

AXES = gpt2.AXES | {"layer": GROUPED_AXES}
PREFIX = gpt2.PREFIX
NO_PARAMETERS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class BigCodeConfig(ModelConfig):
    """Attributes:
    scale_attention: whether scores are scaled by head_dim^-0.5.
    """

    scale_attention: bool = True

    def attention_scale(self, layer: int) -> float:
        """The factor applied to query-key products in this layer."""
        return super(BigCodeConfig, self).attention_scale(layer) if self.scale_attention else 1.0


def TENSORS(config: ModelConfig) -> dict[str, Any]:
    """How a checkpoint stores the parameters."""

    def linear(name: str, *, parts: bool = False) -> dict[str, Stored]:
        return {part: Stored(f"h.{{i}}.{name}.{suffix}", parts=parts) for part, suffix in _PARTS}

    return {
        "embed": gpt2.TENSORS["embed"],
        "layer": gpt2.TENSORS["layer"]
        | {
            "qkv": linear("attn.c_attn", parts=config.num_kv_heads == 1),
            "out": linear("attn.c_proj"),
            "up": linear("mlp.c_fc"),
            "down": linear("mlp.c_proj"),
        },
        "head": gpt2.TENSORS["head"],
    }


_PARTS = (("kernel", "weight"), ("bias", "bias"))


def parse_config(entries: Mapping[str, Any]) -> BigCodeConfig:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("add_cross_attention", unless=False, because="there is no encoder")
    hidden_size, num_heads = fields.count("n_embd", "hidden_size"), fields.count("n_head", "num_attention_heads")
    vocab_size = fields.count("vocab_size")
    return BigCodeConfig(
        family="gpt_bigcode",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=fields.count("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=1 if fields.flag("multi_query", default=True) else num_heads,
        head_dim=head_size(hidden_size, num_heads),
        ffn_size=fields.count("n_inner", default=4 * hidden_size),
        max_position=fields.count("n_positions", "max_position_embeddings"),
        alibi=False,
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        activation=fields.activation("activation_function", default="gelu_pytorch_tanh"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=fields.tokens("eos_token_id", vocab_size, default=50256),
        bos_token_id=fields.token("bos_token_id", vocab_size, default=50256),
        initializer_range=fields.number("initializer_range", default=0.02),
        scale_attention=fields.flag("scale_attn_weights", default=True),
    )


def hf_config(config: BigCodeConfig) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.max_position,
        "multi_query": config.num_kv_heads < config.num_heads,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
        "initializer_range": config.initializer_range,
        "scale_attn_weights": config.scale_attention,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


Block, Head = PreNormBlock, NormedHead
