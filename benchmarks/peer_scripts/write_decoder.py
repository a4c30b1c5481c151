"""Writes a Hugging Face Llama, Qwen3 or Qwen3-MoE checkpoint without a tokenizer as GGUF.

`write_checkpoint.py` calls it in llama.cpp's environment, which has no jaxserve. Names of tensors and of entries are
those of llama.cpp's own converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def metadata(writer: Any, config: dict[str, Any]) -> None:
    """Writes the entries that describe the model."""
    writer.add_context_length(min(config["max_position_embeddings"], 8192))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's name and the float32 value of each tensor; the experts of a layer are one tensor [E, out, in]."""
    from safetensors import safe_open

    if config["rope_parameters"].get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)
    experts: dict[str, list[np.ndarray]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            names = sorted(opened.keys(), key=lambda name: [int(p) if p.isdecimal() else p for p in name.split(".")])
            for name in names:
                value = opened.get_tensor(name).astype(np.float32)
                stem, _, suffix = name.rpartition(".")
                if stem in TOP:
                    yield f"{TOP[stem]}.{suffix}", value
                    continue
                number, _, part = stem.removeprefix("model.layers.").partition(".")
                if part.startswith("mlp.experts."):
                    stacked = f"blk.{number}.{EXPERT[part.rpartition('.')[2]]}.{suffix}"
                    experts.setdefault(stacked, []).append(value)
                    if len(experts[stacked]) == config["num_experts"]:
                        yield stacked, np.stack(experts.pop(stacked))
                    continue
                if config["model_type"] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                    value = pairs_side_by_side(value, config["head_dim"])
                yield f"blk.{number}.{LAYER[part]}.{suffix}", value
    assert not experts, f"{sorted(experts)} are incomplete"


def pairs_side_by_side(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's Llama rotates them: 2i and 2i + 1 rather than i and i + head_dim / 2."""
    return value.reshape(-1, 2, head_dim // 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """float32[head_dim / 2]: what Llama 3's scaling divides each frequency by."""
    rope = config["rope_parameters"]
    low, high, trained = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config["head_dim"])
        smooth = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
