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
from jaxserve.models.hf_names import ConfigNames, linear, norm, table
from jaxserve.models.layers import EMBED_AXES, GROUPED_AXES, HEAD_AXES, PreNormBlock, RMSNorm
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields, ModelConfig

NAMES = ConfigNames(num_kv_heads=("num_key_value_heads",), head_dim=("head_dim",), norm_eps=("rms_norm_eps",))
AXES = {"embed": EMBED_AXES, "layer": GROUPED_AXES, "head": HEAD_AXES}
TENSORS = {
    "embed": {"tokens": table("embed_tokens")},
    "layer": {
        "attention_norm": norm("layers.{i}.input_layernorm", bias=False),
        "qkv": linear("layers.{i}.self_attn.{qkv}_proj"),
        "q_norm": norm("layers.{i}.self_attn.q_norm", bias=False),
        "k_norm": norm("layers.{i}.self_attn.k_norm", bias=False),
        "out": linear("layers.{i}.self_attn.o_proj"),
        "ffn_norm": norm("layers.{i}.post_attention_layernorm", bias=False),
        "gate": linear("layers.{i}.mlp.gate_proj"),
        "up": linear("layers.{i}.mlp.up_proj"),
        "down": linear("layers.{i}.mlp.down_proj"),
    },
    "head": {"norm": norm("norm", bias=False), "tokens": table("lm_head")},
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
    norm_eps: float = 1e-6,
    activation: str = "silu",
    **defaults: Any,
) -> dict[str, Any]:
    """`DecoderConfig` fields that all these families spell alike, but the rotation's.

    Defaults are Llama's; a family passes its own, as `ConfigNames.read` takes them.
    """
    return NAMES.read(fields, family, eos=eos, bos=bos, tied=tied, norm_eps=norm_eps, activation=activation, **defaults)


def mixture(fields: Fields, *names: str, default: int, per_token: int = 2) -> dict[str, Any]:
    """The number of experts, under one of these names, and how many of them serve a token."""
    count, chosen = fields.count(*names, default=default), fields.count("num_experts_per_tok", default=per_token)
    if chosen > count:
        raise ValueError(f"num_experts_per_tok is {chosen}; it must be at most {names[0]}, which is {count}")
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
    return NAMES.entries(config, architecture) | rotary.rotated_entries(config.rotary, config)


class DecoderBlock(PreNormBlock):
    """x [T, H] -> [T, H]: Llama's layer (arXiv:2302.13971) with `DecoderConfig`'s switches.

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
