"""The model families, one module each; `build` makes the model of a configuration.

A family is a module of this folder, named as `model_type` in a checkpoint's config.json. It exports `parse_config` and
`hf_config`, the NNX modules `Embed`, `Block` and `Head`, the table `AXES` of its parameters' logical axis names, the
table `TENSORS` of how a checkpoint stores them, `PREFIX`, which their names but the head's have there, and
`NO_PARAMETERS`, names of what else a checkpoint may hold; a name that ends in a dot stands for all of that part. A
table lists every parameter that any configuration has; `TENSORS` may be a function of the configuration. Modules
without `parse_config` are what families share.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxserve.models.model import Model, Params
from jaxserve.models.schema import Fields, ModelConfig

__all__ = ["Model", "Params", "build", "families", "family", "parse_config"]

# Models of images and text whose text model is served, and what the library takes for absent entries of text_config.
_TEXT_DEFAULTS = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    }
}
_MOST_LAYERS = 1024


def families() -> tuple[str, ...]:
    """Names of the families: the modules of this folder that parse a configuration."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if hasattr(_module(name), "parse_config")))


def family(name: str) -> ModuleType:
    """The module of a family. Raises ValueError naming the known ones."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        module = _module(name)
        if hasattr(module, "parse_config"):
            return module
    raise ValueError(f"model family {name!r} is unknown; the known ones are {', '.join(families())}")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def parse_config(entries: Mapping[str, Any]) -> ModelConfig:
    """Parses a config.json; of a model of images and text, the part of its text model.

    Raises:
      ValueError: an entry is invalid; the message names it.
    """
    if not isinstance(entries.get("model_type"), str):
        raise ValueError(f"model_type is missing; it names the model's family, one of {', '.join(families())}")
    defaults = _TEXT_DEFAULTS.get(entries["model_type"])
    if defaults is not None:
        tokens = {name: entries[name] for name in ("eos_token_id", "bos_token_id") if name in entries}
        entries = {**defaults, **Fields(entries).within("text_config").entries, **tokens}
    config = family(entries["model_type"]).parse_config(entries)
    if config.num_layers > _MOST_LAYERS:  # each is traced, so a wrong number would take hours in silence
        raise ValueError(f"the config has {config.num_layers} layers; at most {_MOST_LAYERS} are served")
    return config


def build(config: ModelConfig, counts: Mapping[str, int] | None = None) -> Model:
    """The model of a configuration, without parameters.

    Args:
      counts: by logical axis, how many heads, tokens and feed-forward units to hold where that is more than the
        configuration has (`ShardingSpec.padded`): their parameters are copies or zeros (`schema.head_sources`), and
        they change no answer.
    """
    module = family(config.family)
    if counts is None:
        return Model(module, config, config)
    padded_config = dataclasses.replace(
        config,
        num_heads=counts["heads"],
        num_kv_heads=counts.get("kv_heads", counts["heads"]),
        vocab_size=counts["vocab"],
        ffn_size=counts["ffn"],
    )
    return Model(module, config, padded_config)
