"""Checkpoints on meshes of several axes: read to where they are used, and generated from."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.runner.sharded_parameters import placement
from server.commands import cli
from tests.fixtures import parity
from tests.jaxserve.runner.test_meshes import SIZES

SQUARE = 'mesh = {x = 2, y = 4}\naxes = {vocab = ["x", "y"], ffn = ["y", "x"], heads = "x"}\npad.vocab = true\n'
FSDP = """
    mesh = {stage = 2, fsdp = 2, tensor = 2}
    axes.embed = "fsdp"
    gather.weights = "fsdp"
    pad = {heads = true, vocab = true, ffn = true}
"""
SQUARE += 'parameters."layers.1-1.*" = {ffn = "none", kv_heads = "none"}\n'
EXPERTS = (
    'mesh = {expert = 2, tensor = 4}\naxes = {expert = "expert", vocab = ["tensor", "expert"]}\npad.vocab = true\n'
)

PADDED = "[pad]\nheads = true\nvocab = true\nffn = true\n"


def read(entries: dict[str, Any], saved: str, rules: str, folder: Path, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """(model, its whole parameters, the stages of an engine with these rules, the parameters as they are placed)."""
    path = parity.write_checkpoint(folder / "model", entries, parity.draw_for(entries))
    model, dtype = models.build(weights.read_config(path)), jnp.dtype("float32")
    whole = weights.load(path, model, dtype)
    if saved == "orbax":
        weights.convert(path, folder / "saved")
        path = folder / "saved"
    (folder / "rules.toml").write_text(rules)
    config = EngineConfig(dtype="float32", sharding=str(folder / "rules.toml"), **settings)
    (stages,), _ = startup.replica_programs(config, model)
    return model, whole, stages, weights.load(path, stages[0].model, dtype, place=placement(stages))


@pytest.mark.parametrize("saved", ["hugging face", "orbax"])
@pytest.mark.parametrize(
    ("family", "changes", "rules"),
    [
        ("llama", {}, SQUARE),
        ("gpt2", {"n_head": 7, "n_embd": 28, "vocab_size": 103, "n_inner": 31}, FSDP),
        ("mixtral", {"vocab_size": 103}, EXPERTS),
    ],
    ids=["two axes for one", "embed over fsdp, padded", "experts"],
)
def test_every_device_reads_its_part(
    family: str, changes: dict[str, Any], rules: str, saved: str, tmp_path: Path
) -> None:
    entries = {"n_layer": 2, "num_hidden_layers": 2, "model_type": family, **SIZES, **changes}
    model, whole, stages, params = read(entries, saved, rules, tmp_path)
    held = weights.unpadded(stages[0].model, params)
    jax.tree.map(np.testing.assert_array_equal, held, whole)
    for stage in stages:
        expected, found = stage.params()["layers"], model.part(params, stage.layers)["layers"]
        jax.tree.map(lambda wanted, leaf: _same_sharding(wanted, leaf), expected, found)


def _same_sharding(wanted: jax.ShapeDtypeStruct, leaf: jax.Array) -> None:
    assert leaf.sharding == wanted.sharding
    assert leaf.shape == wanted.shape


@pytest.mark.parametrize("saved", ["hugging face", "orbax"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("bloom", {"tie_word_embeddings": False, "n_head": 7, "hidden_size": 28, "vocab_size": 103}),
        ("gpt2", {"n_head": 7, "n_embd": 28, "vocab_size": 103, "n_inner": 31}),
    ],
)
def test_padded_parts_are_read_to_where_they_are_used(
    family: str, changes: dict[str, Any], saved: str, tmp_path: Path
) -> None:
    entries = {"model_type": family, "n_layer": 3, **SIZES, **changes}
    model, whole, stages, params = read(entries, saved, PADDED, tmp_path, tensor=2, stages=2)
    for stage in stages:
        part = model.part(params, stage.layers)
        expected = jax.tree.leaves(model.part(whole, stage.layers))
        for wanted, leaf, value in zip(jax.tree.leaves(stage.params()), jax.tree.leaves(part), expected, strict=True):
            missing = [(0, size - have) for size, have in zip(wanted.shape, value.shape, strict=True)]
            np.testing.assert_array_equal(leaf, np.pad(value, missing))
            is_table = model.config.tie_embeddings and wanted.shape[0] == stage.model.padded_config.vocab_size
            assert leaf.sharding == wanted.sharding or (is_table and stage.is_last)


@pytest.mark.long
def test_generate_answers_alike_from_either_form(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.toml").write_text(FSDP)
    assert cli.main(["convert", str(DEMO_MODEL), str(tmp_path / "saved")]) == 0
    answers = []
    for flags in ([], ["--sharding", "rules"], ["--sharding", "rules", "--model", "saved"]):
        asked = [str(tmp_path / "rules.toml") if each == "rules" else each for each in flags]
        asked = [str(tmp_path / "saved") if each == "saved" else each for each in asked]
        (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "It was a", "max_tokens": 8, "temperature": 0}) + "\n")
        sizes = ["--buckets", "8", "--max-rows", "2", "--slots", "256", "--max-context", "64"]
        assert cli.main(["generate", "--input", str(tmp_path / "in.jsonl"), *sizes, *asked]) == 0
        answers.append(json.loads(capfd.readouterr().out)["token_ids"])
    assert answers[0] == answers[1] == answers[2]
