"""Checkpoint directories with random weights, and what they may be changed to."""

import json
import struct
import zipfile
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


_STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def pickled(value) -> bytes:
    """Opcodes of a text, a whole number or a tuple."""
    if isinstance(value, tuple):
        return b"(" + b"".join(map(pickled, value)) + b"t"
    if isinstance(value, int):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def pickled_tensor(storage: str, length: int, offset: int, shape, strides, kind: str = "FloatStorage") -> bytes:
    """Opcodes of a tensor, as torch.save writes them."""
    parts = (pickled("storage"), f"ctorch\n{kind}\n".encode(), pickled((storage, "cpu", length))[1:])
    view = pickled(offset) + pickled(tuple(shape)) + pickled(tuple(strides))
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + b"".join(parts) + b"Q" + view + b"\x89" + ORDERED_DICT + b"tR"


def torch_file(file: Path, pickle: bytes, storages: dict[str, bytes], **settings) -> None:
    """Writes what torch.save writes of a pickle and its storages."""
    with zipfile.ZipFile(file, "w", **settings) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", b"little")
        for name, values in storages.items():
            archive.writestr(f"archive/data/{name}", values)


def to_torch(file: Path) -> None:
    """Replaces a safetensors file by one of torch.save with the same tensors, each a transposed view."""
    tensors, pickle, storages = load_file(file), b"\x80\x02" + ORDERED_DICT + b"(", {}
    for i, (name, values) in enumerate(tensors.items()):
        storages[str(i)] = values.T.tobytes()
        strides = [size // values.itemsize for size in np.empty(values.shape[::-1], values.dtype).T.strides]
        kind = _STORAGES[values.dtype.name]
        pickle += pickled(name) + pickled_tensor(str(i), values.size, 0, values.shape, strides, kind)
    file.unlink()
    target = file.with_name(file.name.replace("model", "pytorch_model")).with_suffix(".bin")
    torch_file(target, pickle + b"u.", storages)
