"""Finds a model's sizes by name, config.json or checkpoint directory."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from jaxserve import models
from jaxserve.models.schema import ModelConfig
from jaxserve.weights.checkpoint import read_config, read_json


def _bloom(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "bloom", "vocab_size": 250_880, "hidden_size": hidden, "n_layer": layers, "n_head": heads}


def _gpt2(hidden: int, layers: int, heads: int, *, positions: int = 1024, vocab: int = 50_257) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions, "vocab_size": vocab}
    return {"model_type": "gpt2", "activation_function": "gelu_new", **sizes}


def _gpt3(hidden: int, layers: int) -> dict[str, Any]:
    """A model of Orca (OSDI'22, table 1): GPT-3's architecture with heads of 128.

    The vocabulary is not published; 51,200 is what Megatron-LM pads GPT-2's to.
    """
    return _gpt2(hidden, layers, hidden // 128, positions=2048, vocab=51_200)


# From the config.json of each (huggingface.co: bigscience, openai-community, EleutherAI).
KNOWN: dict[str, dict[str, Any]] = {
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-1b1": _bloom(1536, 24, 16),
    "bloom-1b7": _bloom(2048, 24, 16),
    "bloom-3b": _bloom(2560, 30, 32),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "vocab_size": 50_432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24_576,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_fast",
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    },
    "gpt3-13b": _gpt3(5120, 40),
    "gpt3-101b": _gpt3(10240, 80),
    "gpt3-175b": _gpt3(12288, 96),
    "gpt3-341b": _gpt3(15360, 120),
}


def find(text: str) -> tuple[str, ModelConfig]:
    """Find a model's name and configuration.

    `text` is a name in KNOWN, a config.json, or a checkpoint directory.

    Raises:
      ValueError: there is no such model (the message has the nearest name), or its family is not served.
    """
    path = Path(text)
    if text in KNOWN:
        return text, models.parse_config(KNOWN[text])
    if path.is_dir():
        return path.resolve().name, read_config(path)
    if path.is_file():
        return path.resolve().parent.name, models.parse_config(read_json(path))
    close = difflib.get_close_matches(text, KNOWN, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(KNOWN)}"
    raise ValueError(f"model {text!r} is neither a known name nor a config.json nor a checkpoint directory; {hint}")
