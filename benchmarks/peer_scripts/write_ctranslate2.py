"""Writes a Hugging Face BLOOM or GPT-2 checkpoint without a tokenizer as CTranslate2 reads it. Stands alone.

    python write_ctranslate2.py CHECKPOINT OUT float32|bfloat16

Weights are written in float32: the library converts them to the compute dtype as it loads them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from peer_common import part_qkv, read_config, read_tensors

# Hugging Face's name within a layer -> the specification's
BLOOM_LAYER = {
    "input_layernorm": "self_attention.layer_norm",
    "self_attention.query_key_value": "self_attention.linear.0",
    "self_attention.dense": "self_attention.linear.1",
    "post_attention_layernorm": "ffn.layer_norm",
    "mlp.dense_h_to_4h": "ffn.linear_0",
    "mlp.dense_4h_to_h": "ffn.linear_1",
}
GPT2_LAYER = {
    "ln_1": "self_attention.layer_norm",
    "attn.c_attn": "self_attention.linear.0",
    "attn.c_proj": "self_attention.linear.1",
    "ln_2": "ffn.layer_norm",
    "mlp.c_fc": "ffn.linear_0",
    "mlp.c_proj": "ffn.linear_1",
}
BLOOM_TOP = {"word_embeddings": "embeddings", "word_embeddings_layernorm": "layernorm_embedding", "ln_f": "layer_norm"}
GPT2_TOP = {"wte": "embeddings", "wpe": "position_encodings", "ln_f": "layer_norm"}


def main(checkpoint: str, out: str, dtype: str) -> None:
    from ctranslate2 import specs  # pyright: ignore[reportMissingImports]

    config = read_config(Path(checkpoint))
    bloom = config["model_type"] == "bloom"
    heads = config["n_head"]
    spec = specs.TransformerDecoderModelSpec.from_config(
        config["n_layer"],
        heads,
        pre_norm=True,
        activation=specs.Activation.GELUTanh,
        layernorm_embedding=bloom,
        alibi=bloom,
        alibi_use_positive_positions=bloom,
    )
    spec.decoder.scale_embeddings = False
    for name, tensor in read_tensors(Path(checkpoint)):
        path = rename(name, BLOOM_TOP if bloom else GPT2_TOP, BLOOM_LAYER if bloom else GPT2_LAYER)
        if path is None:
            continue
        value = tensor
        if not bloom and value.ndim == 2 and path.startswith("layer."):
            value = np.ascontiguousarray(value.T)  # GPT-2 stores these matrices [in, out]
        if bloom and ".linear.0." in path:
            value = part_qkv(value, heads)
        assign(spec.decoder, path, value)
    spec.decoder.projection.weight = spec.decoder.embeddings.weight  # both families tie them
    spec.register_vocabulary([f"<{index}>" for index in range(config["vocab_size"])])
    for name in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, name, "<0>")
    spec.validate()
    spec.optimize(quantization="float32")
    Path(out).mkdir(parents=True, exist_ok=True)
    spec.save(out)


def rename(name: str, top: dict[str, str], layer: dict[str, str]) -> str | None:
    """The path of a tensor in the specification; None for what has none (the tied head, masks)."""
    stem, _, suffix = name.removeprefix("transformer.").rpartition(".")
    if stem in top:
        path = top[stem]
    else:
        head, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if head != "h" or part not in layer:
            return None
        path = f"layer.{number}.{layer[part]}"
    if path.endswith(("layer_norm", "layernorm_embedding")):
        suffix = {"weight": "gamma", "bias": "beta"}[suffix]
    elif path == "position_encodings":
        suffix = "encodings"
    return f"{path}.{suffix}"


def assign(spec: Any, path: str, value: np.ndarray) -> None:
    """Sets what a dotted path names; numbers in it index lists."""
    *parents, last = path.split(".")
    for part in parents:
        spec = spec[int(part)] if part.isdecimal() else getattr(spec, part)
    setattr(spec, last, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
