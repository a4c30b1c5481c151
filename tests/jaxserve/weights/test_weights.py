"""Checkpoint directories: what is read from them, where it goes, what it costs, and what is said of broken ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.execution import kv_cache
from jaxserve.weights import CheckpointError

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
OPT = GPT_NEOX | {"model_type": "opt", "ffn_dim": 40}
NARROW = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
BARE = {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True}
UNTIED = {"tie_word_embeddings": False}
MODELS = [BLOOM, BLOOM | UNTIED, GPT2, GPT2 | UNTIED, GPT_NEOX, OPT, OPT | NARROW | UNTIED, OPT | BARE]


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


def assert_equal(ours: models.Params, expected: models.Params, dtype=jnp.float32) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(leaf), np.asarray(other).astype(dtype), err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("entries", MODELS, ids=lambda e: e["model_type"])
def test_what_is_written_is_read(tmp_path, entries):
    model, params = write(tmp_path, entries)
    assert weights.read_config(tmp_path) == model.config
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_stored_dtype_is_cast_to_the_one_asked_for(tmp_path, stored, dtype):
    model, params = write(tmp_path, GPT2, stored)
    assert load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].dtype == stored
    assert_equal(weights.load(tmp_path, model, dtype), params, dtype)


@pytest.mark.parametrize("prefix", ["", "{}", "module.{}"])
@pytest.mark.parametrize("entries", [BLOOM, GPT2 | UNTIED, GPT_NEOX, OPT | UNTIED], ids=lambda e: e["model_type"])
def test_any_prefix_is_understood(tmp_path, prefix, entries):
    model, params = write(tmp_path, entries)
    usual = models.family(entries["model_type"]).PREFIX
    prefix, outer = prefix.format(usual), prefix.removesuffix("{}")

    def rename(tensors):
        return {
            prefix + name.removeprefix(usual) if name.startswith(usual) else outer + name: values
            for name, values in tensors.items()
        }

    rewrite(tmp_path, rename)
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)


@pytest.mark.parametrize("entries", [BLOOM, OPT], ids=lambda e: e["model_type"])
def test_a_sharded_checkpoint_is_read(tmp_path, entries):
    model, params = write(tmp_path, entries)
    shard(tmp_path)
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)


MASK = np.tri(16, dtype=bool)[None, None]
MEANINGLESS = [
    (GPT2, "transformer.h.{i}.attn.", {"bias": MASK, "masked_bias": np.float32([-1e4])}),
    (GPT_NEOX, "gpt_neox.layers.{i}.attention.", {"bias": MASK, "rotary_emb.inv_freq": np.float32([1, 0.1])}),
    (OPT, "model.decoder.", {"version": np.float32([3])}),
]


@pytest.mark.parametrize(("entries", "prefix", "more"), MEANINGLESS, ids=["gpt2", "gpt_neox", "opt"])
def test_masks_and_the_like_mean_nothing(tmp_path, entries, prefix, more):
    model, params = write(tmp_path, entries)
    added = {prefix.format(i=i) + name: values for i in range(2) for name, values in more.items()}
    rewrite(tmp_path, lambda tensors: tensors | added)
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)


@pytest.mark.parametrize(
    "entries", [GPT2, GPT_NEOX | {"tie_word_embeddings": True}, OPT], ids=lambda e: e["model_type"]
)
def test_a_second_copy_of_a_tied_head_means_nothing(tmp_path, entries):
    model, params = write(tmp_path, entries)
    tensors = models.family(entries["model_type"]).TENSORS
    head, table = (tensors[piece]["tokens"]["table"].name for piece in ("head", "embed"))
    prefix = models.family(entries["model_type"]).PREFIX
    rewrite(tmp_path, lambda tensors: tensors | {head: tensors[prefix + table].copy()})
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)


def test_progress_ends_at_its_total(tmp_path):
    model, _ = write(tmp_path)
    seen = []
    weights.load(tmp_path, model, jnp.float32, progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == seen[-1][2]


def test_generation_config_has_the_last_word_on_ends(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert weights.read_config(tmp_path).eos_token_ids == (3, 4)


def test_a_fingerprint_tells_checkpoints_apart_and_knows_one_again(tmp_path):
    for name in ("one", "same"):
        write(tmp_path / name)
    write(tmp_path / "half", dtype=np.float16)
    model, _ = write(tmp_path / "other")
    weights.write_hf(tmp_path / "other", model.config, random_params(model, seed=1))
    prints = {name: weights.fingerprint(tmp_path / name) for name in ("one", "same", "half", "other")}
    assert prints["one"] == prints["same"]
    assert len(set(prints.values())) == 3


BROKEN = []


def broken(breakage):
    """Lists a way to break the directory of a checkpoint. It returns what to read and what is then said."""
    BROKEN.append(breakage)
    return breakage


@broken
def missing_directory(folder):
    return folder / "nothing", r"nothing does not exist"


@broken
def file_for_directory(folder):
    return folder / "config.json", r"config.json is no directory"


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
    return folder, r"config.json holds no JSON object"


@broken
def unknown_family(folder):
    (folder / "config.json").write_text(json.dumps(BLOOM | {"model_type": "llama"}))
    return folder, rf"config.json: model family 'llama' is unknown; the known ones are {', '.join(models.families())}"


@broken
def tokenizer_too_large(folder):
    entries = {"model": {"vocab": {"a": 0, "b": 60}}, "added_tokens": [{"id": 61, "content": "<pad>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    return folder, r"tokenizer.json has token ids up to 61, but the model's vocabulary ends at 60"


@broken
def tokenizer_of_another_kind(folder):
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [1]}')
    return folder, r"tokenizer.json has no vocabulary of tokens and their ids"


@broken
def weights_a_directory(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return folder, r"holds neither model.safetensors nor"


@broken
def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return folder, r"holds neither model.safetensors nor model.safetensors.index.json"


@broken
def pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder, r"holds its weights as pytorch_model.bin, which can run code when it is read; convert them"


@broken
def cut_in_the_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return folder, r"model.safetensors is no safetensors file, or was cut short"


@broken
def cut_in_a_tensor(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return folder, r"model.safetensors was cut short: tensor 'transformer\.\S+' ends 10 bytes beyond the end"


@broken
def empty_file(folder):
    (folder / "model.safetensors").write_bytes(b"")
    return folder, r"model.safetensors is no safetensors file, or was cut short"


@broken
def header_no_json(folder):
    (folder / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 40)
    return folder, r"model.safetensors is no safetensors file: its header is no JSON"


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
    return folder, r"tensor 'transformer.h.2.ln.bias' belongs to nothing in the bloom model of 2 layers"


@broken
def wrong_shape(folder):
    name = "transformer.h.0.self_attention.dense.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:12]})
    return folder, r"tensor 'transformer.h.0.self_attention.dense.weight' has shape \[12, 24\] where .* \[24, 24\]"


@broken
def wrong_dtype(folder):
    name = "transformer.h.0.self_attention.dense.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].astype(np.int8)})
    return folder, r"tensor 'transformer.h.0.self_attention.dense.weight' is stored as int8; weights are read from"


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
    return folder, r"index.json puts 'transformer.ln_f.bias' in '../model.safetensors', which is no name of a file"


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
            r"project_in.weight' belongs to nothing in the opt",
        ),
    ],
)
def test_what_is_wrong_with_one_of_three_tensors_is_told_by_its_name(tmp_path, name, change, message):
    model, _ = write(tmp_path, OPT)
    name = "model.decoder." + name

    def alter(tensors):
        values = tensors.pop(name, None)
        return tensors if change is None else tensors | {name: change(values)}

    rewrite(tmp_path, alter)
    with pytest.raises(CheckpointError, match=message):
        weights.load(tmp_path, model, jnp.float32)


_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxserve import models, weights
from sharding import mesh, specs
model = models.build(weights.read_config(sys.argv[1]))
whole = weights.load(sys.argv[1], model, jnp.float32)
for size, dtype in ((2, jnp.float32), (8, jnp.bfloat16)):
    place = weights.on_mesh(model, mesh.make_mesh(size), specs.default(model.config.family))
    split = weights.load(sys.argv[1], model, dtype, place=place)
    for one, many in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(np.asarray(one.astype(dtype)), np.asarray(many))
    kernels = split["layers"][0]
    assert kernels["up"]["kernel"].addressable_shards[0].data.shape[0] * size == kernels["up"]["kernel"].shape[0]
    assert kernels["down"]["kernel"].addressable_shards[0].data.shape[1] * size == kernels["down"]["kernel"].shape[1]
@jax.jit
def run(params):
    x = model.embed(params, jnp.arange(4), jnp.arange(4))
    x, _ = model.layer(params, 0, x, jnp.arange(4), lambda q, k, v, cache: (q + k * v, cache), None)
    return model.logits(params, model.norm(params, x))
place = weights.on_mesh(model, mesh.make_mesh(4), specs.default(model.config.family))
np.testing.assert_allclose(run(weights.load(sys.argv[1], model, jnp.float32, place=place)), run(whole), atol=1e-3)
print("equal")
"""


@pytest.mark.parametrize("entries", [BLOOM, GPT2 | UNTIED, GPT_NEOX, OPT | NARROW], ids=lambda e: e["model_type"])
def test_weights_split_over_eight_devices_equal_the_whole(tmp_path, entries):
    heads = {"n_head": 8, "num_attention_heads": 8}
    write(tmp_path, entries | heads | {"vocab_size": 64, "hidden_size": 48, "n_embd": 48})
    assert in_process(_SHARDED, str(tmp_path), devices=8).split() == ["equal"]


_MEMORY = """
import resource, sys
import jax, jax.numpy as jnp
from jaxserve import models, weights
model = models.build(weights.read_config(sys.argv[1]))
jax.devices()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
params = weights.load(sys.argv[1], model, jnp.dtype(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.parametrize(("entries", "dtype"), [(BLOOM, "float32"), (GPT2, "bfloat16")])
def test_loading_takes_little_memory_beside_the_weights(tmp_path, entries, dtype):
    sizes = {"vocab_size": 40_000, "hidden_size": 768, "n_embd": 768, "n_head": 12, "n_layer": 4, "n_positions": 64}
    config = models.parse_config(entries | sizes)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float16), models.build(config).shapes(jnp.float16))
    weights.write_hf(tmp_path, config, params)
    taken, held = map(int, in_process(_MEMORY, str(tmp_path), dtype).split())
    assert held > 110e6
    assert taken < held + 60e6  # one tensor more would be 61e6 (bfloat16) or 123e6 bytes


def in_process(program: str, *arguments: str, devices: int = 1) -> str:
    """Runs a program in a fresh interpreter, with so many virtual CPU devices, and returns what it prints."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_weights_that_do_not_fit_are_refused_before_one_is_read(tmp_path, monkeypatch):
    write(tmp_path, BLOOM)
    monkeypatch.setattr(kv_cache, "weight_room", lambda _device, _devices: 1000)
    monkeypatch.setattr(weights, "load", lambda *_args, **_kwargs: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"the weights take .* of each cpu device, which has room for 0\.0 MiB"):
        Engine.from_checkpoint(tmp_path, EngineConfig(slots=128))
