"""What the decoder families after Llama share.

RMSNorm, grouped query attention with rotary positions, and a gated feed-forward; a family adds what it does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flax import nnx

from jaxserve.models import rotary
from jaxserve.models.layers import GROUPED_AXES, PreNormBlock, RMSNorm
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig, Stored, head_size

AXES = {
    "embed": {"tokens": {"table": ("vocab", "embed")}},
    "layer": GROUPED_AXES,
    "head": {"norm": {"scale": ("embed",)}, "tokens": {"table": ("vocab", "embed")}},
}

TENSORS = {
    "embed": {"tokens": {"table": Stored("embed_tokens.weight")}},
    "layer": {
        "attention_norm": {"scale": Stored("layers.{i}.input_layernorm.weight")},
        "qkv": {
            "kernel": Stored("layers.{i}.self_attn.{qkv}_proj.weight"),
            "bias": Stored("layers.{i}.self_attn.{qkv}_proj.bias"),
        },
        "q_norm": {"scale": Stored("layers.{i}.self_attn.q_norm.weight")},
        "k_norm": {"scale": Stored("layers.{i}.self_attn.k_norm.weight")},
        "out": {
            "kernel": Stored("layers.{i}.self_attn.o_proj.weight"),
            "bias": Stored("layers.{i}.self_attn.o_proj.bias"),
        },
        "ffn_norm": {"scale": Stored("layers.{i}.post_attention_layernorm.weight")},
        "gate": {
            "kernel": Stored("layers.{i}.mlp.gate_proj.weight"),
            "bias": Stored("layers.{i}.mlp.gate_proj.bias"),
        },
        "up": {"kernel": Stored("layers.{i}.mlp.up_proj.weight"), "bias": Stored("layers.{i}.mlp.up_proj.bias")},
        "down": {"kernel": Stored("layers.{i}.mlp.down_proj.weight"), "bias": Stored("layers.{i}.mlp.down_proj.bias")},
    },
    "head": {"norm": {"scale": Stored("norm.weight")}, "tokens": {"table": Stored("lm_head.weight")}},
}
PREFIX = "model."
NO_PARAMETERS = ("layers.{i}.self_attn.rotary_emb.inv_freq",)  # saved by older versions of the library
FULL, SLIDING = "full_attention", "sliding_attention"  # what `layer_types` of a config.json calls the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Attributes:
    rotary: how positions rotate queries and keys.
    attention_bias / out_bias / ffn_bias: whether q, k and v, the attention's output, the feed-forward have biases.
    head_norm: whether each head's queries and keys are normed.
    """

    rotary: Rotary
    attention_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_norm: bool = False

    def layer_rotary(self, layer: int) -> Rotary:
        """How positions rotate queries and keys in this layer."""
        return self.rotary

    def layer_kind(self, layer: int) -> Hashable:
        """What a layer computes, apart from its weights: equal for layers that are alike."""
        return super(DecoderConfig, self).layer_kind(layer), self.layer_rotary(layer)


def sizes(
    fields: Fields,
    family: str,
    *,
    eos: int | None = 2,
    bos: int | None = 1,
    tied: bool = False,
    eps: float = 1e-6,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """What `DecoderConfig` takes of the entries that these families name alike; positions are not stretched.

    Args:
      eos / bos: token ids that hold where config.json does not say.
      tied / eps: whether the head is the token table, and the norms' rms_norm_eps, where it does not say.
      head_dim: the size of a head where it does not say; None if the heads share the hidden size.
    """
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {num_kv_heads}; it must divide num_attention_heads, which is {num_heads}"
        )
    vocab_size = fields.count("vocab_size")
    return {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.count("head_dim", default=head_dim or 0) or head_size(hidden_size, num_heads),
        "ffn_size": fields.count("intermediate_size"),
        "max_position": fields.count("max_position_embeddings"),
        "alibi": False,
        "norm_eps": fields.number("rms_norm_eps", default=eps),
        "activation": fields.activation("hidden_act", "hidden_activation", default="silu"),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=tied),
        "eos_token_ids": fields.tokens("eos_token_id", vocab_size, default=eos),
        "bos_token_id": fields.token("bos_token_id", vocab_size, default=bos),
        "initializer_range": fields.number("initializer_range", default=0.02),
    }


def rotated(fields: Fields, values: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """`sizes` with the rotation (see `rotary.parse`), and with the positions that it stretches to."""
    turned = rotary.parse(fields.entries, values["head_dim"], max_position=values["max_position"], **defaults)
    return values | {"rotary": turned, "max_position": turned.longest(values["max_position"])}


def mixture(fields: Fields, name: str, *, default: int, per_token: int = 2) -> dict[str, Any]:
    """The number of experts, which config.json calls `name`, and how many of them serve a token."""
    count, chosen = fields.count(name, default=default), fields.count("num_experts_per_tok", default=per_token)
    if chosen > count:
        raise ValueError(f"num_experts_per_tok is {chosen}; it must be at most {name}, which is {count}")
    return {"num_experts": count, "experts_per_token": chosen}


def windows(
    fields: Fields, num_layers: int, size: int | None, *, sliding: Callable[[int], bool] = lambda layer: True
) -> tuple[int | None, ...]:
    """The window of each layer; empty if no layer has one.

    Args:
      size: tokens of a window, or None.
      sliding: whether a layer has a window where `layer_types` does not say.
    """
    names = fields.entries.get("layer_types")
    if names is None:
        names = [SLIDING if size and sliding(layer) else FULL for layer in range(num_layers)]
    if not isinstance(names, list) or len(names) != num_layers:
        raise ValueError(f"layer_types is {names!r}; it must be a list with a name for each of {num_layers} layers")
    unknown = [name for name in names if name not in (FULL, SLIDING)]
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}, which is not supported; {FULL} and {SLIDING} are")
    if SLIDING in names and not size:
        raise ValueError(f"layer_types has {SLIDING!r}, but no sliding_window is in use")
    return tuple(size if name == SLIDING else None for name in names) if SLIDING in names else ()


def window_entries(config: DecoderConfig) -> dict[str, Any]:
    """The entries of a config.json that `windows` reads."""
    each = [config.window(layer) for layer in range(config.num_layers)]
    return {
        "sliding_window": next(filter(None, each), None),
        "layer_types": [SLIDING if window else FULL for window in each],
    }


def hf_config(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The entries of a config.json that these families name alike."""
    stretched = config.rotary.kind in ("linear", "dynamic")
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.rotary.original if stretched else config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "initializer_range": config.initializer_range,
        "rope_parameters": config.rotary.entries(),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
    }


class DecoderBlock(PreNormBlock):
    """x [T, H] -> [T, H]: the layer of Llama (arXiv:2302.13971), with the switches of `DecoderConfig`.

    Args:
      norm: makes the norms of hidden states and of heads.
      experts: makes what stands for the feed-forward, as in `TransformerBlock`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        layer: int = 0,
        *,
        norm: Callable[..., nnx.Module] = RMSNorm,
        experts: Callable[[ModelConfig, nnx.Rngs], nnx.Module] | None = None,
    ) -> None:
        super().__init__(
            config,
            rngs,
            layer,
            norm=norm,
            attention_bias=config.attention_bias,
            out_bias=config.out_bias,
            ffn_bias=config.ffn_bias,
            gated=True,
            experts=experts,
            head_norm=partial(norm, size=config.head_dim) if config.head_norm else None,
            rotary=config.layer_rotary(layer),
        )
