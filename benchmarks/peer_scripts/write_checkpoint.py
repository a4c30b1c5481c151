"""Writes a Hugging Face checkpoint without a tokenizer in the format of another engine.

    python write_checkpoint.py llama.cpp|ctranslate2 CHECKPOINT OUT float32|bfloat16|q8_0|q4_0

The script runs in the engine's own environment, which has no jaxserve.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Hugging Face's name of a tensor -> GGUF's and CTranslate2's; the first tables are of the tensors of a layer.
BLOOM_LAYER = {
    "input_layernorm": ("attn_norm", "self_attention.layer_norm"),
    "self_attention.query_key_value": ("attn_qkv", "self_attention.linear.0"),
    "self_attention.dense": ("attn_output", "self_attention.linear.1"),
    "post_attention_layernorm": ("ffn_norm", "ffn.layer_norm"),
    "mlp.dense_h_to_4h": ("ffn_up", "ffn.linear_0"),
    "mlp.dense_4h_to_h": ("ffn_down", "ffn.linear_1"),
}
GPT2_LAYER = {
    "ln_1": ("attn_norm", "self_attention.layer_norm"),
    "attn.c_attn": ("attn_qkv", "self_attention.linear.0"),
    "attn.c_proj": ("attn_output", "self_attention.linear.1"),
    "ln_2": ("ffn_norm", "ffn.layer_norm"),
    "mlp.c_fc": ("ffn_up", "ffn.linear_0"),
    "mlp.c_proj": ("ffn_down", "ffn.linear_1"),
}
BLOOM_TOP = {
    "word_embeddings": ("token_embd", "embeddings"),
    "word_embeddings_layernorm": ("token_embd_norm", "layernorm_embedding"),
    "ln_f": ("output_norm", "layer_norm"),
}
GPT2_TOP = {
    "wte": ("token_embd", "embeddings"),
    "wpe": ("position_embd", "position_encodings"),
    "ln_f": ("output_norm", "layer_norm"),
}


class Names(NamedTuple):
    """The names of a tensor in both formats."""

    gguf: str
    ctranslate2: str


def rename(name: str, *, bloom: bool) -> Names | None:
    """The names of a tensor; None for those that are not written (the tied head, masks)."""
    stem, _, suffix = name.removeprefix("transformer.").rpartition(".")
    top, layer = (BLOOM_TOP, BLOOM_LAYER) if bloom else (GPT2_TOP, GPT2_LAYER)
    number, _, part = stem.removeprefix("h.").partition(".")
    if stem in top:
        gguf, path = top[stem]
    elif stem.startswith("h.") and part in layer:
        gguf, path = f"blk.{number}.{layer[part][0]}", f"layer.{number}.{layer[part][1]}"
    else:
        return None
    ending = suffix
    if path.endswith(("layer_norm", "layernorm_embedding")):
        ending = {"weight": "gamma", "bias": "beta"}[suffix]
    elif path == "position_encodings":
        ending = "encodings"
    return Names(f"{gguf}.{suffix}", f"{path}.{ending}")


def tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[Names, np.ndarray]]:
    """The tensors of a checkpoint in float32, matrices [out, in], all q before all k before all v."""
    from safetensors import safe_open

    bloom = config["model_type"] == "bloom"
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                names = rename(name, bloom=bloom)
                if names is None:
                    continue
                value = opened.get_tensor(name).astype(np.float32)
                if not bloom and value.ndim == 2 and names.gguf.startswith("blk."):
                    value = np.ascontiguousarray(value.T)  # GPT-2 stores these matrices [in, out]
                if bloom and ".attn_qkv." in names.gguf:
                    value = split_qkv(value, config["n_head"])
                yield names, value


def split_qkv(value: np.ndarray, heads: int) -> np.ndarray:
    """Reorders BLOOM's fused [N, 3, D, ...] to all q, then all k, then all v."""
    return value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


def write_gguf(checkpoint: Path, config: dict[str, Any], out: str, dtype: str) -> None:
    """Writes matrices in `dtype`, and in float32 what llama.cpp requires in it: vectors, positions, the router."""
    import gguf  # pyright: ignore[reportMissingImports]
    import write_decoder

    family = config["model_type"]
    check_family(family, ("bloom", "gpt2", *write_decoder.ARCHITECTURES))
    writer = gguf.GGUFWriter(out, write_decoder.ARCHITECTURES.get(family, family))
    if family in write_decoder.ARCHITECTURES:
        write_decoder.metadata(writer, config)
        named = write_decoder.tensors(checkpoint, config)
    else:
        bloom, heads = family == "bloom", config["n_head"]
        hidden = config["hidden_size" if bloom else "n_embd"]
        writer.add_context_length(config.get("n_positions", 2048))
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(config.get("n_inner") or 4 * hidden)
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(heads)
        if bloom:
            writer.add_head_count_kv(heads)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        named = ((names.gguf, value) for names, value in tensors(checkpoint, config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    files = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}
    writer.add_file_type(files[dtype])
    for name, value in named:
        narrow = value.ndim >= 2 and "position_embd" not in name and "ffn_gate_inp" not in name
        if narrow and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_quantized_gguf(checkpoint: Path, config: dict[str, Any], out: str, form: str) -> None:
    """Writes what llama.cpp's own tool makes of float32: q8_0, or q4_0 with a token table in 6 bits."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    wide = f"{out}.wide"
    write_gguf(checkpoint, config, wide, "float32")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[form]
    code = llama_cpp.llama_model_quantize(wide.encode(), out.encode(), ctypes.byref(params))
    Path(wide).unlink()
    if code != 0:
        raise SystemExit(f"llama_model_quantize failed with code {code}")


def write_ctranslate2(checkpoint: Path, config: dict[str, Any], out: str) -> None:
    """Writes float32, which CTranslate2 converts to the compute dtype as it loads it."""
    from ctranslate2 import specs  # pyright: ignore[reportMissingImports]

    check_family(config["model_type"], ("bloom", "gpt2"))
    bloom = config["model_type"] == "bloom"
    spec = specs.TransformerDecoderModelSpec.from_config(
        config["n_layer"],
        config["n_head"],
        pre_norm=True,
        activation=specs.Activation.GELUTanh,
        layernorm_embedding=bloom,
        alibi=bloom,
        alibi_use_positive_positions=bloom,
    )
    spec.decoder.scale_embeddings = False
    for (_, path), value in tensors(checkpoint, config):
        *parents, last = path.split(".")
        node: Any = spec.decoder
        for part in parents:
            node = node[int(part)] if part.isdecimal() else getattr(node, part)
        setattr(node, last, value)
    spec.decoder.projection.weight = spec.decoder.embeddings.weight  # both families tie them
    spec.register_vocabulary([f"<{index}>" for index in range(config["vocab_size"])])
    for name in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, name, "<0>")
    spec.validate()
    spec.optimize(quantization="float32")
    Path(out).mkdir(parents=True, exist_ok=True)
    spec.save(out)


def check_family(family: str, known: tuple[str, ...]) -> None:
    """Ends the script if it cannot convert models of a family."""
    if family not in known:
        raise SystemExit(f"{family} models are not converted; {', '.join(known)} are")


def main(engine: str, checkpoint: str, out: str, dtype: str) -> None:
    """Converts one checkpoint."""
    config = json.loads(Path(checkpoint, "config.json").read_text())
    if engine == "llama.cpp":
        write = write_quantized_gguf if dtype.startswith("q") else write_gguf
        write(Path(checkpoint), config, out, dtype)
    else:
        write_ctranslate2(Path(checkpoint), config, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
