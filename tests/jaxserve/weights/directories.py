"""Checkpoint directories with random weights, and what they may be changed to."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve import models, weights

BLOOM = {"model_type": "bloom", "vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 3, "eos_token_id": 60}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
GPT_NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "rotary_pct": 1.0,
}
QWEN3 = GPT_NEOX | {
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
}
PHI3 = QWEN3 | {"model_type": "phi3", "attention_bias": False}
GEMMA3 = QWEN3 | {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 2}
OPT = GPT_NEOX | {"model_type": "opt", "ffn_dim": 40}
NARROW = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
BARE = {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True}
UNTIED = {"tie_word_embeddings": False}
MODELS = [
    BLOOM,
    BLOOM | UNTIED,
    GPT2,
    GPT2 | UNTIED,
    GPT_NEOX,
    QWEN3,
    PHI3,
    GEMMA3,
    OPT,
    OPT | NARROW | UNTIED,
    OPT | BARE,
]


def random_params(model: models.Model, seed: int = 0) -> models.Params:
    """Every number different from its neighbours, biases too, and exact in float16 and bfloat16."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.integers(-128, 128, leaf.shape) / 64, jnp.float32), model.shapes(jnp.float32)
    )


def write(folder: Path, entries=BLOOM, dtype=None) -> tuple[models.Model, models.Params]:
    config = models.parse_config(entries)
    model = models.build(config)
    params = random_params(model)
    weights.write_hf(folder, config, params, dtype)
    return model, params


def rewrite(folder: Path, change) -> None:
    """Replaces the tensors of a directory by what `change` makes of them."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def shard(folder: Path, parts: int = 3) -> None:
    """Splits the one file of a directory in several, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        chosen = dict(list(tensors.items())[part::parts])
        save_file(chosen, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
