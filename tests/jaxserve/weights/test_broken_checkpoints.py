"""What is said of checkpoint directories that are broken."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, weights
from jaxserve.weights import CheckpointError
from tests.jaxserve.weights.directories import BLOOM, OPT, rewrite, shard, write

BROKEN = []


def broken(breakage):
    """Lists a way to break the directory of a checkpoint.

    It returns what to read and what is then said.
    """
    BROKEN.append(breakage)
    return breakage


@broken
def missing_directory(folder):
    return folder / "nothing", r"nothing does not exist"


@broken
def file_for_directory(folder):
    return folder / "config.json", r"config.json is not a directory"


@broken
def no_config(folder):
    (folder / "config.json").unlink()
    return folder, r"config.json does not exist"


@broken
def config_no_json(folder):
    (folder / "config.json").write_text("{")
    return folder, r"config.json is not JSON: "


@broken
def config_a_list(folder):
    (folder / "config.json").write_text("[]")
    return folder, r"config.json does not hold a JSON object"


@broken
def unknown_family(folder):
    (folder / "config.json").write_text(json.dumps(BLOOM | {"model_type": "mamba"}))
    return folder, rf"config.json: model family 'mamba' is unknown; the known ones are {', '.join(models.families())}"


@broken
def tokenizer_too_large(folder):
    entries = {"model": {"vocab": {"a": 0, "b": 60}}, "added_tokens": [{"id": 61, "content": "<pad>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    return folder, r"tokenizer.json has token ids up to 61, but the model's vocabulary ends at 60"


@broken
def vocabulary_too_large(folder):
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 60}))
    (folder / "added_tokens.json").write_text('{"<pad>": 61}')
    return folder, r"vocab.json has token ids up to 61, but the model's vocabulary ends at 60"


@broken
def vocabulary_that_is_none(folder):
    (folder / "tokenizer.model").write_bytes(b"")
    return folder, r"tokenizer.model: is not a sentencepiece model"


@broken
def tokenizer_of_another_kind(folder):
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [1]}')
    return folder, r"tokenizer.json: .*it has no vocabulary of tokens and their ids"


@broken
def weights_a_directory(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return folder, r"holds neither model.safetensors nor pytorch_model.bin"


@broken
def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return folder, r"holds neither model.safetensors nor pytorch_model.bin, nor the index of several such files$"


@broken
def weights_of_another_format(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.00.pth")
    return folder, r"nor the index of several such files; consolidated.00.pth is not supported"


@broken
def cut_in_the_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return folder, r"model.safetensors is not a safetensors file, or is truncated"


@broken
def cut_in_a_tensor(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return folder, r"model.safetensors is truncated: tensor 'transformer\.\S+' ends 10 bytes beyond the end"


@broken
def empty_file(folder):
    (folder / "model.safetensors").write_bytes(b"")
    return folder, r"model.safetensors is empty"


@broken
def header_no_json(folder):
    (folder / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 40)
    return folder, r"model.safetensors is not a safetensors file: its header is not JSON"


@broken
def header_malformed(folder):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    return folder, r"the header's entry for 'a' is malformed: F32\[3\] is not 4 bytes"


@broken
def tensor_missing(folder):
    rewrite(folder, lambda tensors: {n: v for n, v in tensors.items() if n != "transformer.h.1.mlp.dense_4h_to_h.bias"})
    return folder, r"model.safetensors: tensor 'transformer.h.1.mlp.dense_4h_to_h.bias' is missing"


@broken
def table_missing(folder):
    rewrite(folder, lambda tensors: {n: v for n, v in tensors.items() if "word_embeddings.weight" not in n})
    return folder, r"model.safetensors: tensor '\S*' is missing"


@broken
def tensor_too_much(folder):
    rewrite(folder, lambda tensors: tensors | {"transformer.h.2.ln.bias": np.zeros(3, np.float32)})
    return folder, r"tensor 'transformer.h.2.ln.bias' does not belong to the bloom model of 2 layers"


@broken
def wrong_shape(folder):
    name = "transformer.h.0.self_attention.dense.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:12]})
    return folder, r"tensor 'transformer.h.0.self_attention.dense.weight' has shape \[12, 24\] where .* \[24, 24\]"


@broken
def wrong_dtype(folder):
    name = "transformer.h.0.self_attention.dense.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].astype(np.int8)})
    return folder, r"tensor 'transformer.h.0.self_attention.dense.weight' is stored as int8; weights must be float32"


@broken
def another_vocabulary(folder):
    name = "transformer.word_embeddings.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:50]})
    return folder, r"tensor 'transformer.word_embeddings.weight' has 50 rows, but vocab_size is 61 in config.json"


@broken
def head_not_tied(folder):
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.word_embeddings.weight"] + 1})
    return folder, r"tensor 'lm_head.weight' differs from 'transformer.word_embeddings.weight'"


@broken
def shard_missing(folder):
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder, r"index.json puts 'transformer\.\S+' in model-00002-of-00003.safetensors, which does not exist"


@broken
def index_names_another_file(folder):
    shard(folder)
    file = folder / "model.safetensors.index.json"
    entries = json.loads(file.read_text())
    right = entries["weight_map"]["transformer.ln_f.bias"]
    wrong = next(other for other in entries["weight_map"].values() if other != right)
    entries["weight_map"]["transformer.ln_f.bias"] = wrong
    file.write_text(json.dumps(entries))
    return folder, rf"says that 'transformer.ln_f.bias' is in {wrong}, which has no such tensor"


@broken
def index_leads_outside(folder):
    shard(folder)
    file = folder / "model.safetensors.index.json"
    file.write_text('{"weight_map": {"transformer.ln_f.bias": "../model.safetensors"}}')
    return folder, r"index.json puts 'transformer.ln_f.bias' in '../model.safetensors', which is not the name of a file"


@broken
def index_empty(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder, r"index.json has no weight_map"


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda breakage: breakage.__name__)
def test_a_broken_checkpoint_is_refused_in_one_sentence(tmp_path, breakage):
    write(tmp_path)
    folder, message = breakage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        weights.load(folder, models.build(weights.read_config(folder)), jnp.float32)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.self_attn.k_proj.weight", None, r"tensor '\S+1.self_attn.k_proj.weight' is missing$"),
        (
            "layers.0.self_attn.v_proj.weight",
            lambda v: v[:12],
            r"v_proj.weight' has shape \[12, 24\] where .* \[24, 24\]",
        ),
        ("layers.0.self_attn.q_proj.bias", lambda v: v[:8], r"q_proj.bias' has shape \[8\] where .* \[24\]"),
        (
            "project_in.weight",
            lambda _: np.zeros((24, 16), np.float32),
            r"project_in.weight' does not belong to the opt",
        ),
    ],
)
def test_error_names_the_wrong_tensor_of_three(tmp_path, name, change, message):
    model, _ = write(tmp_path, OPT)
    name = "model.decoder." + name

    def alter(tensors):
        values = tensors.pop(name, None)
        return tensors if change is None else tensors | {name: change(values)}

    rewrite(tmp_path, alter)
    with pytest.raises(CheckpointError, match=message):
        weights.load(tmp_path, model, jnp.float32)
