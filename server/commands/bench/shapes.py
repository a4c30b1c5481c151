"""Models of known shapes with random weights, which need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve import models
from jaxserve.models.schema import ModelConfig
from jaxserve.planning import model_catalog

# The entries of a Hugging Face config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "bloom-560m": {  # with a vocabulary of 32,000 in place of 250,880
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "layer_norm_epsilon": 1e-5,
    },
    "bloom-560m-250k": model_catalog.KNOWN["bloom-560m"],
    "bloom-7b1": model_catalog.KNOWN["bloom-7b1"],
    "gpt2-xl": model_catalog.KNOWN["gpt2-xl"],
    "gpt2": model_catalog.KNOWN["gpt2"],
    "llama-3-8b": model_catalog.KNOWN["llama-3-8b"],
    "llama-3.2-1b": model_catalog.KNOWN["llama-3.2-1b"],
    "qwen3-0.6b": model_catalog.KNOWN["qwen3-0.6b"],
    "qwen3-moe-small": model_catalog.KNOWN["qwen3-30b-a3b"]
    | {  # a fifth of a billion parameters active of 0.9
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 640,
    },
    "tiny-gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 128,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 256,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "tiny": {  # so small that host work dominates
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 16,
        "n_layer": 2,
        "n_head": 2,
        "layer_norm_epsilon": 1e-5,
    },
}
SEED = 0  # of the weights


def config_of(model: Path | str) -> ModelConfig:
    """A checkpoint's configuration (of a path), or a shape's (of its name)."""
    if isinstance(model, Path):
        from jaxserve import weights

        return weights.read_config(model)
    if model not in SHAPES:
        raise ValueError(f"{model!r} is no known shape; there are {', '.join(SHAPES)}")
    return models.parse_config(SHAPES[model])


def random_params(shape: str, dtype: Any) -> tuple[ModelConfig, Any]:
    config = config_of(shape)
    return config, models.build(config).init(SEED, dtype)
