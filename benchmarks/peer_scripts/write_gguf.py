"""Writes a Hugging Face BLOOM or GPT-2 checkpoint without a tokenizer as GGUF, for llama.cpp. Stands alone.

    python write_gguf.py CHECKPOINT OUT.gguf float32|bfloat16

Matrices are written in the dtype asked for; vectors stay float32, as the library wants them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from peer_common import part_qkv, read_config, read_tensors

# Hugging Face's name within a layer -> GGUF's
BLOOM_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
BLOOM_TOP = {
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "ln_f": "output_norm",
}
GPT2_TOP = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}


def main(checkpoint: str, out: str, dtype: str) -> None:
    import gguf  # pyright: ignore[reportMissingImports]

    config = read_config(Path(checkpoint))
    bloom = config["model_type"] == "bloom"
    heads = config["n_head"]
    hidden = config["hidden_size" if bloom else "n_embd"]
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_context_length(config.get("n_positions", 2048))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config.get("n_inner") or 4 * hidden)
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(heads)
    if bloom:
        writer.add_head_count_kv(heads)
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    files = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}
    writer.add_file_type(files[dtype])
    for name, tensor in read_tensors(Path(checkpoint)):
        new = rename(name, BLOOM_TOP if bloom else GPT2_TOP, BLOOM_LAYER if bloom else GPT2_LAYER)
        if new is None:
            continue
        value = tensor
        if not bloom and value.ndim == 2 and new.startswith("blk."):
            value = np.ascontiguousarray(value.T)  # GPT-2 stores these matrices [in, out]
        if bloom and ".attn_qkv." in new:
            value = part_qkv(value, heads)
        narrow = value.ndim == 2 and new != "position_embd.weight"  # which is added, not multiplied
        if narrow and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(new, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rename(name: str, top: dict[str, str], layer: dict[str, str]) -> str | None:
    """GGUF's name of a tensor; None for what is not written (the tied head, masks)."""
    name = name.removeprefix("transformer.")
    stem, _, suffix = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{suffix}"
    if stem.startswith("h."):
        _, number, part = stem.split(".", 2)
        if part in layer:
            return f"blk.{number}.{layer[part]}.{suffix}"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
