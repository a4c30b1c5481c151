"""Checkpoints rewritten with Orbax: the same model in another form, whole or not at all."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxserve import models, weights
from jaxserve.weights import CheckpointError, naming, orbax
from sharding import mesh, specs
from tests.jaxserve.weights import directories
from tests.jaxserve.weights.directories import GEMMA3, GPT2, GPT_NEOX, PHI3, QWEN3

OPT = directories.OPT | {"word_embed_proj_dim": 16}
BARE = OPT | {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 24}


@pytest.fixture
def source(tmp_path) -> Path:
    config = models.parse_config(GPT2)
    params = models.build(config).init(0, jnp.float32)
    weights.write_hf(tmp_path / "source", config, params)
    (tmp_path / "source" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "source" / "README.md").write_text("not of a checkpoint")
    return tmp_path / "source"


def same(ours: models.Params, other: models.Params) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), ours, other))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_converted_checkpoint_loads_like_its_source(source, tmp_path, dtype):
    weights.convert(source, tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert [path.name for path in sorted(out.iterdir())] == [
        "chat_template.jinja",
        "config.json",
        "jaxserve.json",
        "tokenizer.json",
        "weights",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    config = weights.read_config(out)
    assert config == weights.read_config(source)
    model = models.build(config)
    place = weights.on_mesh(model, mesh.make_mesh({"tensor": 1}), specs.default("gpt2"), "cpu")
    ours = weights.load(out, model, dtype, place=place)
    assert same(ours, weights.load(source, model, dtype))
    assert all(leaf.sharding.mesh.axis_names == ("tensor",) for leaf in jax.tree.leaves(ours))


FAMILIES = {"gpt_neox": GPT_NEOX, "qwen3": QWEN3, "phi3": PHI3, "gemma3_text": GEMMA3, "opt": OPT, "opt-bare": BARE}


@pytest.mark.parametrize("entries", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.long
def test_other_families_are_converted_too(tmp_path, entries):
    model = models.build(models.parse_config(entries))
    weights.write_hf(tmp_path / "source", model.config, model.init(0, jnp.float32))
    weights.convert(tmp_path / "source", tmp_path / "out")
    assert weights.read_config(tmp_path / "out") == model.config
    ours = weights.load(tmp_path / "out", model, jnp.float32)
    assert same(ours, weights.load(tmp_path / "source", model, jnp.float32))


def test_values_are_saved_in_the_dtype_asked_for(source, tmp_path):
    weights.convert(source, tmp_path / "out", jnp.bfloat16)
    model = models.build(weights.read_config(source))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights.load(source, model, jnp.bfloat16))
    assert same(weights.load(tmp_path / "out", model, jnp.float32), rounded)
    assert weights.fingerprint(tmp_path / "out") != weights.fingerprint(source)


def of_float32(model: models.Model) -> models.Params:
    """Random parameters as of bfloat16 weights, whose biases and norms bfloat16 would round."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.random(leaf.shape), leaf.dtype), model.shapes(jnp.bfloat16))


def test_wide_vectors_beside_narrow_matrices_are_kept(source, tmp_path):
    model = models.build(weights.read_config(source))
    params = of_float32(model)
    weights.write_hf(tmp_path / "mixed", model.config, params)
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    weights.convert(tmp_path / "mixed", tmp_path / "out")
    assert weights.fingerprint(tmp_path / "out").endswith("-bfloat16")  # matrices are not widened for the vectors
    for folder in ("mixed", "out"):
        assert same(weights.load(tmp_path / folder, model, jnp.bfloat16), params)


def test_vectors_that_were_saved_narrow_are_loaded_wide(source, tmp_path):
    model = models.build(weights.read_config(source))
    wide = of_float32(model)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    names = [parameter.name for parameter in naming.parameters(model, jnp.bfloat16)]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_bytes((source / "config.json").read_bytes())
    orbax.save(tmp_path / "old", dict(zip(names, jax.tree.leaves(narrow), strict=True)), "old")
    loaded = weights.load(tmp_path / "old", model, jnp.bfloat16)
    assert same(loaded, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), narrow, wide))
    assert loaded["head"]["norm"]["bias"].dtype == jnp.float32


def test_an_empty_directory_may_be_the_target(source, tmp_path):
    (tmp_path / "out").mkdir()
    weights.convert(source, tmp_path / "out")
    assert orbax.is_saved(tmp_path / "out")


def test_a_target_that_holds_something_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    with pytest.raises(CheckpointError, match=r"out exists and is not an empty directory"):
        weights.convert(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_converted_checkpoint_is_not_converted_again(source, tmp_path):
    weights.convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"out is already converted"):
        weights.convert(tmp_path / "out", tmp_path / "again")


def test_nothing_is_left_of_a_conversion_that_fails(source, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(orbax, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        weights.convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_cannot_be_read_leaves_no_target(source, tmp_path):
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        weights.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_told_in_one_sentence(source, tmp_path):
    weights.convert(source, tmp_path / "out")
    model = models.build(weights.read_config(source))
    marker = tmp_path / "out" / "jaxserve.json"
    whole = marker.read_text()
    for change, message in (
        (lambda: marker.write_text("{"), "jaxserve.json is not JSON"),
        (
            lambda: marker.write_text('{"version": 0}'),
            "jaxserve.json has version 0, but version 1 is needed; convert the",
        ),
        (lambda: (tmp_path / "out" / "weights" / "_METADATA").unlink(), "weights cannot be restored: "),
    ):
        change()
        with pytest.raises(CheckpointError, match=message) as caught:
            weights.load(tmp_path / "out", model, jnp.float32)
        assert "\n" not in str(caught.value)
        marker.write_text(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, r"parameter 'layers\.2\.\S+' is missing"),
        ({"n_layer": 1}, r"parameter 'layers\.1\.\S+' does not belong to the model in config\.json"),
        (
            {"n_inner": 7},
            r"parameter 'layers\.0\.down\.kernel' has shape \[24, 96\] where config\.json asks for \[24, 7\]",
        ),
    ],
)
def test_another_model_in_the_config_is_told_by_parameter(source, tmp_path, change, message):
    weights.convert(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(GPT2 | change))
    model = models.build(weights.read_config(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=message):
        weights.load(tmp_path / "out", model, jnp.float32)


def test_arrays_restored_in_several_groups_are_all_there(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_IN_FLIGHT", 1000)
    arrays = {f"a{i}": jnp.full((i + 1, 50), i, jnp.float32) for i in range(8)}
    orbax.save(tmp_path, arrays, "print")
    place = SingleDeviceSharding(jax.devices()[0])
    targets = {name: jax.ShapeDtypeStruct(array.shape, np.float32, sharding=place) for name, array in arrays.items()}
    restored = orbax.restore(tmp_path, targets)
    assert restored.keys() == arrays.keys()
    assert same(restored, arrays)
