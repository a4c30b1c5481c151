"""Checkpoint directories: what is read from them, where it goes, and what it costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.runner import kv_cache
from tests.jaxserve.weights.directories import (
    BLOOM,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    MODELS,
    NARROW,
    OPT,
    UNTIED,
    random_params,
    rewrite,
    shard,
    write,
)


def assert_equal(ours: models.Params, expected: models.Params, dtype=jnp.float32) -> None:
    """Matrices in the dtype, vectors in float32."""
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == (dtype if leaf.ndim > 1 else jnp.float32)
        np.testing.assert_array_equal(
            np.asarray(leaf), np.asarray(other).astype(leaf.dtype), err_msg=jax.tree_util.keystr(path)
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


def test_the_text_model_of_one_with_images_is_read(tmp_path):
    model, params = write(tmp_path, GEMMA3 | {"vocab_size": 61})
    text = json.loads((tmp_path / "config.json").read_text())
    ends = text.pop("eos_token_id")
    images = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, "eos_token_id": ends}
    (tmp_path / "config.json").write_text(json.dumps(images))
    vision = {"vision_tower.vision_model.layers.0.bias": np.float32([1]), "multi_modal_projector.w": np.float32([1])}
    rewrite(tmp_path, lambda tensors: {f"language_model.{name}": each for name, each in tensors.items()} | vision)
    assert weights.read_config(tmp_path) == model.config
    assert_equal(weights.load(tmp_path, model, jnp.float32), params)
    rewrite(tmp_path, lambda tensors: tensors | {"audio_tower.w": np.float32([1])})
    with pytest.raises(weights.CheckpointError, match=r"'audio_tower\.w' does not belong"):
        weights.load(tmp_path, model, jnp.float32)


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


def test_fingerprint_identifies_a_checkpoint(tmp_path):
    for name in ("one", "same"):
        write(tmp_path / name)
    write(tmp_path / "half", dtype=np.float16)
    model, _ = write(tmp_path / "other")
    weights.write_hf(tmp_path / "other", model.config, random_params(model, seed=1))
    prints = {name: weights.fingerprint(tmp_path / name) for name in ("one", "same", "half", "other")}
    assert prints["one"] == prints["same"]
    assert len(set(prints.values())) == 3


_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxserve import models, weights
from sharding import mesh, specs
model = models.build(weights.read_config(sys.argv[1]))
whole = weights.load(sys.argv[1], model, jnp.float32)
for size, dtype in ((2, jnp.float32), (8, jnp.bfloat16)):
    place = weights.on_mesh(model, mesh.make_mesh({"tensor": size}), specs.default(model.config.family), "cpu")
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
place = weights.on_mesh(model, mesh.make_mesh({"tensor": 4}), specs.default(model.config.family), "cpu")
np.testing.assert_allclose(run(weights.load(sys.argv[1], model, jnp.float32, place=place)), run(whole), atol=1e-3)
print("equal")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "entries", [GPT2 | UNTIED, BLOOM, GPT_NEOX, OPT | NARROW], ids=lambda entries: entries["model_type"]
)
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


@pytest.mark.long
@pytest.mark.parametrize(("entries", "dtype"), [(GPT2, "bfloat16"), (BLOOM, "float32")])
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
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_weights_that_do_not_fit_are_refused_before_one_is_read(tmp_path, monkeypatch):
    write(tmp_path, BLOOM)
    monkeypatch.setattr(kv_cache, "free_weight_bytes", lambda _device, _devices: 1000)
    monkeypatch.setattr(weights, "load", lambda *_args, **_kwargs: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"the weights take .* of each cpu device, which can hold 0\.0 MiB"):
        Engine.from_checkpoint(tmp_path, EngineConfig(slots=128))
