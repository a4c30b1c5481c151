"""Text models of Gemma 3 (arXiv:2503.19786): Gemma 2 with QK-norm and two rotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.models import gemma2, rotary
from jaxserve.models.decoder import FULL, PREFIX, SLIDING
from jaxserve.models.gemma2 import AXES, TENSORS, Block, Embed, GemmaConfig, Head
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import Fields

__all__ = ["AXES", "NO_PARAMETERS", "PREFIX", "TENSORS", "Block", "Embed", "Head", "hf_config", "parse_config"]

NO_PARAMETERS = (*gemma2.NO_PARAMETERS, "vision_tower.", "multi_modal_projector.")  # of the models that see images


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Attributes:
    local_rotary: how positions rotate queries and keys in layers with a window.
    """

    local_rotary: Rotary

    def layer_rotary(self, layer: int) -> Rotary:
        """How positions rotate queries and keys in this layer."""
        return self.rotary if self.window(layer) is None else self.local_rotary


def parse_config(entries: Mapping[str, Any]) -> Gemma3Config:
    """From the entries of a config.json. Raises ValueError."""
    fields = Fields(entries)
    fields.refuse("attn_logit_softcapping", because="scores have no cap in this family")
    every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    values = gemma2.sizes(fields, "gemma3_text", sliding=lambda layer: (layer + 1) % every != 0)
    # What max_position_embeddings says is stretched already.
    turned = partial(
        rotary.parse, head_dim=values["head_dim"], max_position=values["max_position"], kinds=("default", "linear")
    )
    local = {"rope_parameters": fields.within("rope_parameters").entries.get(SLIDING)}
    return Gemma3Config(
        **values,
        rotary=turned(entries, theta=1e6, kind_of_layer=FULL),
        local_rotary=turned(local, theta=fields.number("rope_local_base_freq", default=10000.0)),
        head_norm=True,
        logit_soft_cap=fields.number_or_none("final_logit_softcapping", default=None),
    )


def hf_config(config: Gemma3Config) -> dict[str, Any]:
    """The entries of a config.json, from which parse_config makes an equal config."""
    return gemma2.hf_config(config, "Gemma3ForCausalLM") | {
        "max_position_embeddings": config.max_position,
        "rope_parameters": {FULL: config.rotary.entries(), SLIDING: config.local_rotary.entries()},
    }
