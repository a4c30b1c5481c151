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


def _decoder(
    family: str, hidden: int, layers: int, heads: tuple[int, int], ffn: int, vocab: int, positions: int, **more: Any
) -> dict[str, Any]:
    """A decoder named as Llama's entries are; `heads` counts heads of queries and of keys."""
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0}
    more = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return _decoder(
        "gpt_oss", 2880, layers, (64, 8), 2880, 201_088, 131_072, rope_theta=150_000, rope_scaling=rope, **more
    )


_LLAMA_3 = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
_LLAMA_3_2 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3_2 |= {"original_max_position_embeddings": 8192}
_QWEN_3 = {"head_dim": 128, "rope_theta": 1_000_000.0}

# From the config.json of each (huggingface.co: bigscience, openai-community, EleutherAI, meta-llama, mistralai, Qwen,
# microsoft, google, tiiuae, openai, mosaicml, bigcode).
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
    "gpt-j-6b": {
        "model_type": "gptj",
        "vocab_size": 50_400,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "n_positions": 2048,
    },
    "llama-3-8b": _decoder("llama", 4096, 32, (32, 8), 14_336, 128_256, 8192, **_LLAMA_3),
    "llama-3-70b": _decoder("llama", 8192, 80, (64, 8), 28_672, 128_256, 8192, **_LLAMA_3),
    "llama-3.1-70b": _decoder(
        "llama",
        *(8192, 80, (64, 8), 28_672, 128_256, 131_072),
        **_LLAMA_3 | {"rope_scaling": _LLAMA_3_2 | {"factor": 8.0}},
    ),
    "llama-3.2-1b": _decoder(
        "llama",
        *(2048, 16, (32, 8), 8192, 128_256, 131_072),
        **_LLAMA_3 | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": _LLAMA_3_2},
    ),
    "mistral-7b": _decoder(
        "mistral", 4096, 32, (32, 8), 14_336, 32_000, 32_768, sliding_window=4096, rms_norm_eps=1e-5
    ),
    "mixtral-8x7b": _decoder(
        "mixtral",
        *(4096, 32, (32, 8), 14_336, 32_000, 32_768),
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1_000_000.0,
    ),
    "qwen3-0.6b": _decoder("qwen3", 1024, 28, (16, 8), 3072, 151_936, 40_960, tie_word_embeddings=True, **_QWEN_3),
    "qwen3-32b": _decoder("qwen3", 5120, 64, (64, 8), 25_600, 151_936, 40_960, **_QWEN_3),
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe",
        *(2048, 48, (32, 4), 6144, 151_936, 40_960),
        **_QWEN_3 | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        norm_topk_prob=True,
    ),
    "gemma-2-9b": _decoder("gemma2", 3584, 42, (16, 8), 14_336, 256_000, 8192, head_dim=256, sliding_window=4096),
    "gemma-3-27b": _decoder(
        "gemma3_text",
        *(5376, 62, (32, 16), 21_504, 262_208, 131_072),
        head_dim=128,
        sliding_window=1024,
        query_pre_attn_scalar=168,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi-3-mini-4k": _decoder("phi3", 3072, 32, (32, 32), 8192, 32_064, 4096, sliding_window=2047),
    "falcon-7b": {
        "model_type": "falcon",
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "vocab_size": 65_024,
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mpt-7b": {
        "model_type": "mpt",
        "vocab_size": 50_432,
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "max_seq_len": 2048,
        "attn_config": {"alibi": True},
    },
    "starcoder": {
        "model_type": "gpt_bigcode",
        "vocab_size": 49_152,
        "n_embd": 6144,
        "n_layer": 40,
        "n_head": 48,
        "n_inner": 24_576,
        "n_positions": 8192,
        "multi_query": True,
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
