"""Narrow weights: how they are rounded, read, laid out and multiplied, and what they change."""

import dataclasses
import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.models.products import widened
from jaxserve.models.schema import NarrowFormat
from jaxserve.runner.sharded_parameters import placement
from jaxserve.weights import is_matrix, loading, narrow
from tests.fixtures import parity
from tests.fixtures.tiny import BLOOM, make_engine, opinionated
from tests.fixtures.traffic import run, traffic

HELD = {"int8": jnp.int8, "int4": jnp.int4, "float8": jnp.float8_e4m3fn}
SIZES = {  # by the names of all families
    "vocab_size": 104,
    "hidden_size": 32,
    "n_embd": 32,
    "eos_token_id": 2,
    "n_head": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_positions": 96,
    "max_position_embeddings": 96,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "n_layer": 2,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("numpy", [np, jnp])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_rounded_to_the_nearest_of_255_steps(numpy, dtype) -> None:
    matrix = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    matrix[3] = 0
    matrix[4, 5] = np.nan
    like = narrow.shapes_of(NarrowFormat(dtype="int8"), matrix.shape, dtype, "a")
    values, scales, _ = narrow.quantize(matrix, like, numpy)
    assert (values.dtype, scales.dtype) == (jnp.int8, dtype)
    scales = np.asarray(scales, np.float32)[:, None]
    back = np.asarray(values, np.float32) * scales
    rest = np.arange(50) != 4
    # The largest of a row may lie half a step of bfloat16 beyond 127 steps.
    assert (np.abs(back - matrix)[rest] <= 0.5001 * scales[rest]).all()
    assert not back[3].any()
    assert np.isnan(back[4]).all()


@pytest.mark.parametrize("numpy", [np, jnp])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_groups_are_rounded_to_the_nearest_of_16_steps(numpy, dtype) -> None:
    matrix = np.random.default_rng(0).standard_normal((50, 192)).astype(np.float32)
    matrix[3] = 0
    matrix[4, 70] = np.nan
    matrix[5, 64:128] = np.linspace(-1, 7 / 8, 64)
    like = narrow.shapes_of(NarrowFormat(dtype="int4", group=64), matrix.shape, dtype, "a")
    made = narrow.quantize(matrix, like, numpy)
    assert (made.values.dtype, made.scales.dtype, made.scales.shape, made.zeros) == (jnp.int4, dtype, (50, 3), None)
    scales = np.repeat(np.asarray(made.scales, np.float32), 64, axis=1)
    values = np.asarray(made.values).astype(np.float32)
    back = values * scales
    np.testing.assert_array_equal(widened(jax.tree.map(jnp.asarray, made), jnp.float32), back)
    rest = ~np.isnan(scales)
    assert np.isnan(scales).sum() == 64
    # The largest is -8 steps; one of the other sign may lie up to a step beyond 7.
    off = np.where(values == 7, 1.0, 0.55) * np.abs(scales)
    assert (np.abs(back - matrix)[rest] <= off[rest] + 1e-7).all()
    assert (values.reshape(50, 3, 64).min(axis=2)[[0, 1, 2, 6]] == -8).all()
    assert not back[3].any()
    np.testing.assert_allclose(back[5, 64:128], matrix[5, 64:128], atol=1 / 16 + 1e-6)


@pytest.mark.parametrize("quantize", list(HELD))
@pytest.mark.parametrize("family", models.families())
def test_matrices_are_held_narrow_and_nothing_else(family, quantize) -> None:
    model = models.build(models.parse_config({"model_type": family, **SIZES}))
    held = weights.describe(model, jnp.dtype(jnp.bfloat16), weights.on_one_device, quantize=quantize)
    for path, leaf in jax.tree.leaves_with_path(held, is_leaf=is_matrix):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        whole = len(leaf.shape) == 1 or any(part in name for part in ("positions", "router", "bias"))
        assert is_matrix(leaf) != whole, name
        if is_matrix(leaf):
            eight = quantize == "int8" or "table" in name or "experts" in name
            assert leaf.values.dtype == (jnp.int8 if eight else HELD[quantize])
            groups = (leaf.shape[-1] // 32,) if quantize == "int4" and not eight else ()
            assert leaf.scales.shape == (*leaf.shape[:-1], *groups)
            by_row = "kernel" in name and not groups
            assert leaf.scales.dtype == (jnp.float32 if by_row else jnp.bfloat16)
        else:
            is_wide = len(leaf.shape) == 1 or name.endswith("bias")  # a norm, or a bias, also of experts
            assert leaf.dtype == (jnp.float32 if is_wide else jnp.bfloat16)


FEW = {("bloom", "orbax", "int8"), *((family, "huggingface", "int4") for family in ("gpt2", "gpt_oss", "llama"))}


@pytest.mark.parametrize(
    ("family", "saved", "quantize"),
    [
        pytest.param(*case, marks=() if case in FEW or case[1:] == ("huggingface", "int8") else pytest.mark.long)
        for case in itertools.product(models.families(), ("huggingface", "orbax"), ("int8", "int4"))
    ],
)
def test_what_is_read_is_what_memory_would_be_rounded_to(family, saved, quantize, tmp_path, monkeypatch) -> None:
    """Also where a device holds some columns only, whose scales are those of whole rows, and runs of rows are short."""
    entries = {"model_type": family, **SIZES, "vocab_size": 103, "tie_word_embeddings": family != "bloom"}
    if quantize == "int4":  # each of four devices has whole groups
        entries |= {
            "hidden_size": 128,
            "n_embd": 128,
            "intermediate_size": 256,
            "ffn_dim": 256,
            "head_dim": 32,
            "word_embed_proj_dim": 64,
        }
    path = parity.write_checkpoint(tmp_path / "model", entries, parity.draw_for(entries))
    model, dtype = models.build(weights.read_config(path)), jnp.dtype("bfloat16")
    if saved == "orbax":
        weights.convert(path, tmp_path / "saved")
        path = tmp_path / "saved"
    config = EngineConfig(tensor=4, stages=2, dtype="bfloat16", quantize=quantize, max_context=96)
    (stages,), _ = startup.replica_programs(config, model)
    exact = weights.load(tmp_path / "model", stages[0].model, jnp.dtype("float32"))
    monkeypatch.setattr(loading, "_CHUNK", 1000)
    params = weights.load(path, stages[0].model, dtype, place=placement(stages), quantize=quantize)
    for stage in stages:
        part, expected = model.part(params, stage.layers), model.part(exact, stage.layers)
        for wanted, leaf, value in zip(
            *(jax.tree.leaves(tree, is_leaf=is_matrix) for tree in (stage.params(), part, expected)), strict=True
        ):
            value = np.asarray(value)
            if not is_matrix(wanted):
                assert leaf.dtype == wanted.dtype
                np.testing.assert_array_equal(leaf, value.astype(wanted.dtype))
                continue
            by_hand = narrow.quantize(value, wanted, np)
            assert (np.asarray(leaf.values) != by_hand.values).mean() < 1e-3  # ties
            np.testing.assert_array_equal(leaf.scales, by_hand.scales)
            if stage.is_first:
                assert (leaf.values.sharding, leaf.scales.sharding) == (wanted.values.sharding, wanted.scales.sharding)


@cache
def params():
    return opinionated(0)


def make(**settings) -> Engine:
    return make_engine(params(), **{"quantize": "int8", "buckets": (12,), "slots": 320} | settings)


def test_weight_bytes_count_values_and_scales() -> None:
    full, report = make(quantize=None).report, make().report
    matrices = [leaf for leaf in jax.tree.leaves(params()) if leaf.ndim == 2]
    numbers, rows = sum(leaf.size for leaf in matrices), sum(leaf.shape[0] for leaf in matrices)
    assert report.weight_bytes == full.weight_bytes - 3 * numbers + 4 * rows
    assert (full.quantize, report.quantize) == (None, "int8")
    assert report.parameters == full.parameters


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_no_iteration_widens_a_whole_matrix() -> None:
    wide = {"model_type": "bloom", "vocab_size": 4099, "hidden_size": 384, "n_layer": 2, "n_head": 3}
    config = models.parse_config(wide)
    settings = EngineConfig(max_rows=4, buckets=(4, 12), max_context=96, quantize="int8")
    ((stage,),), _ = startup.replica_programs(settings, models.build(config))
    sizes = {leaf.shape for leaf in jax.tree.leaves(stage.params()) if len(leaf.shape) == 2}
    assert (1536, 384) in sizes
    for bucket in (4, 12):
        program = stage.lower_forward(bucket, 4).compile()
        made = {
            tuple(map(int, dims.split(",")))
            for dims in re.findall(r"(?:f32|bf16|s32)\[(\d+,\d+)\]", program.as_text() or "")
        }
        assert not made & sizes


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_several_devices_answer_as_one_and_gather_no_weights() -> None:
    config = models.parse_config({"model_type": "gpt2", **SIZES})
    tree = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, models.build(config).init(0, jnp.float32))
    settings = EngineConfig(max_rows=4, block_size=4, slots=200, buckets=(12,), max_context=96, quantize="int8")
    one, two = (Engine.from_params(config, tree, dataclasses.replace(settings, tensor=tensor)) for tensor in (1, 2))
    expected, answers = (run(engine, traffic(8, scored=True)) for engine in (one, two))
    assert sum(answers.tokens[name] != tokens for name, tokens in expected.tokens.items()) <= 1
    for name, scores in expected.prompt_logprobs.items():
        np.testing.assert_allclose(answers.prompt_logprobs[name], scores, atol=1e-3)
    gathered = re.findall(r"= \(?(\S+) all-gather", two._loops[0].pipeline.stages[0]._forward[12, False].as_text())
    assert all("s8[" not in shape for shape in gathered)
    up, down = (two._loops[0].pipeline.stages[0].params["layers"][0][name]["kernel"] for name in ("up", "down"))
    assert {part.data.shape for part in up.scales.addressable_shards} == {(up.shape[0] // 2,)}
    assert {part.data.shape for part in down.scales.addressable_shards} == {(down.shape[0],)}
    assert {part.data.shape for part in down.values.addressable_shards} == {(down.shape[0], down.shape[1] // 2)}


def test_weights_in_memory_are_rounded_and_replaced() -> None:
    engine = make()
    before = run(engine, traffic(3)).logprobs
    assert engine.load().compiled_after_ready == 0
    other = opinionated(1)
    engine.update_params(other)
    after = run(engine, traffic(3)).logprobs
    assert after != before
    assert after == run(make_engine(other, quantize="int8", buckets=(12,), slots=320), traffic(3)).logprobs
    rounded = engine._loops[0].pipeline.params  # in eight bits already: taken as it is
    assert after == run(Engine.from_params(BLOOM, rounded, engine.config), traffic(3)).logprobs
    with pytest.raises(ValueError, match=r"table'\] has no value; the model has \(97, 24\)"):
        make_engine(rounded)


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(ValueError, match="quantize is 'int3'; it must be int8, int4, float8 or None"):
        EngineConfig(quantize="int3")  # type: ignore[arg-type]


def test_groups_that_do_not_divide_are_named() -> None:
    sizes = SIZES | {"n_embd": 96, "n_head": 4, "head_dim": 24}
    model = models.build(models.parse_config({"model_type": "gpt2", **sizes}))
    message = r"layers.0.out.kernel: each device would have 48 of 96 inputs, which are not whole groups of 32"
    with pytest.raises(ValueError, match=message):
        startup.replica_programs(EngineConfig(tensor=2, quantize="int4", max_context=96), model)[0][0][0].params()
    model = models.build(models.parse_config({"model_type": "gpt2", **sizes, "n_embd": 24, "n_head": 4}))
    with pytest.raises(
        ValueError, match=r"kernel has 24 inputs, which are not whole groups of 32 \(int4\); --quantize"
    ):
        weights.describe(model, jnp.dtype(jnp.float32), weights.on_one_device, quantize="int4")


@pytest.mark.parametrize("quantize", ["int4", "float8"])
def test_an_engine_answers_by_what_its_narrow_weights_stand_for(quantize) -> None:
    config = models.parse_config({"model_type": "bloom", **SIZES, "vocab_size": 97})
    tree = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, models.build(config).init(0, jnp.float32))
    settings = EngineConfig(max_rows=4, block_size=4, slots=320, buckets=(12,), max_context=96)
    engine = Engine.from_params(config, tree, dataclasses.replace(settings, quantize=quantize))
    held = engine._loops[0].pipeline.params
    wide = jax.tree.map(lambda leaf: widened(leaf, jnp.float32) if is_matrix(leaf) else leaf, held, is_leaf=is_matrix)
    assert {leaf.values.dtype for leaf in jax.tree.leaves(held, is_leaf=is_matrix) if is_matrix(leaf)} == {
        jnp.dtype(jnp.int8),
        jnp.dtype(HELD[quantize]),
    }
    found, expected = (run(each, traffic(6)) for each in (engine, Engine.from_params(config, wide, settings)))
    for name, logprobs in expected.logprobs.items():
        assert found.tokens[name][0] == expected.tokens[name][0]
        np.testing.assert_allclose(found.logprobs[name][0], logprobs[0], atol=0.02)
