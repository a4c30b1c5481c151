"""Checkpoints of integers in 32-bit words: every part of a matrix is widened as it is published."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.models.products import widened
from jaxserve.runner.sharded_parameters import placement
from jaxserve.weights import CheckpointError, is_matrix
from tests.jaxserve.weights.directories import GPT2, rewrite, write
from tests.jaxserve.weights.test_quantized_checkpoints import LLAMA, MOE, check_regions, store

OUT, IN, GROUP = 24, 48, 20  # the last group has 8 inputs


def packed(integers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers as fields of int32 words along an axis, the entries of a word in this order from its lowest bits on."""
    rows, per_word = np.moveaxis(integers, axis, -1), 32 // bits
    words = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // per_word)), np.uint32)
    for field, entry in enumerate(order or range(per_word)):
        found = rows[..., entry::per_word].astype(np.uint32)
        words[..., : found.shape[-1]] |= found << np.uint32(bits * field)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def drawn(shape: tuple[int, int], bits: int, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(integers [out, in], zero points [out, groups], scales [out, groups])."""
    rng, most = np.random.default_rng(seed), 1 << bits
    integers = rng.integers(0, most, shape)
    zeros = rng.integers(1, most + 1, (shape[0], count))
    return integers, zeros, np.exp2(rng.integers(-5, 2, (shape[0], count))).astype(np.float16)


def gptq(integers, zeros, scales, bits: int, group, *, less: int = 1) -> dict[str, np.ndarray]:
    """As GPTQ's tools write a matrix; the first version of the format stores zero points less one."""
    return {
        "qweight": packed(integers.T, bits, 0),
        "qzeros": packed(zeros.T - less, bits, 1),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": group.astype(np.int32),
    }


def awq(integers, zeros, scales, bits: int, group) -> dict[str, np.ndarray]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(integers.T, bits, 1, order),
        "qzeros": packed(zeros.T, bits, 1, order),
        "scales": np.ascontiguousarray(scales.T),
    }


def compressed(integers, zeros, scales, bits: int, group) -> dict[str, np.ndarray]:
    return {
        "weight_packed": packed(integers, bits, 1),
        "weight_zero_point": packed(zeros, bits, 0),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.asarray(integers.shape, np.int64),
    }


def compressed_config(bits: int, **scheme: Any) -> dict[str, Any]:
    given = {"type": "int", "num_bits": bits, "strategy": "group", "group_size": GROUP, "symmetric": True} | scheme
    groups = {"group_0": {"targets": ["Linear"], "weights": given}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("group_size", [GROUP, -1])
@pytest.mark.parametrize(
    ("write_parts", "bits", "config"),
    [
        pytest.param(gptq, 2, GPTQ | {"bits": 2}, id="gptq-2"),
        pytest.param(gptq, 4, GPTQ | {"bits": 4}, id="gptq-4"),
        pytest.param(gptq, 8, GPTQ | {"bits": 8}, id="gptq-8"),
        pytest.param(awq, 4, AWQ, id="awq"),
        pytest.param(compressed, 4, compressed_config(4, symmetric=False), id="compressed-tensors-4"),
        pytest.param(compressed, 8, compressed_config(8, symmetric=False), id="compressed-tensors-8"),
    ],
)
def test_integers_are_widened(tmp_path, write_parts, bits, config, group_size):
    group = np.arange(IN) // (group_size if group_size > 0 else IN)
    integers, zeros, scales = drawn((OUT, IN), bits, group.max() + 1)
    if write_parts is not gptq:
        zeros -= 1  # they go from 0 on
    if write_parts is compressed:
        of = {"strategy": "channel", "group_size": None} if group_size < 0 else {}
        config = compressed_config(bits, symmetric=False, **of)
    else:
        config = config | {"group_size": group_size}
    parts = write_parts(integers, zeros, scales, bits, group)
    tensors = store(tmp_path, {f"a.{name}": part for name, part in parts.items()} | {"b": scales}, config)
    assert set(tensors.names()) == {"a.weight", "b"}
    assert tensors["a.weight"].nbytes == sum(part.nbytes for name, part in parts.items() if name != "weight_shape")
    expected = (integers - zeros[:, group]) * scales.astype(np.float32)[:, group]
    check_regions(tensors, "a.weight", expected.astype(np.float32))


def test_groups_by_order_of_activations(tmp_path):
    group = np.random.default_rng(7).permutation(np.arange(IN) // GROUP)
    integers, zeros, scales = drawn((OUT, IN), 4, 3)
    parts = gptq(integers, zeros, scales, 4, group)
    tensors = store(tmp_path, {f"a.{name}": part for name, part in parts.items()}, GPTQ | {"bits": 4, "desc_act": True})
    expected = (integers - zeros[:, group]) * scales.astype(np.float32)[:, group]
    check_regions(tensors, "a.weight", expected.astype(np.float32))


def test_the_second_form_of_gptq_stores_zero_points_as_they_are(tmp_path):
    group = np.arange(IN) // GROUP
    integers, zeros, scales = drawn((OUT, IN), 4, 3)
    parts = gptq(integers, zeros - 1, scales, 4, group, less=0)
    config = GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}
    tensors = store(tmp_path, {f"a.{name}": part for name, part in parts.items()}, config)
    expected = (integers - zeros[:, group] + 1) * scales.astype(np.float32)[:, group]
    check_regions(tensors, "a.weight", expected.astype(np.float32))


def test_symmetric_integers_have_no_zero_points(tmp_path):
    group = np.arange(IN) // GROUP
    integers, zeros, scales = drawn((OUT, IN), 4, 3)
    parts = compressed(integers, zeros, scales, 4, group)
    del parts["weight_zero_point"]
    tensors = store(tmp_path, {f"a.{name}": part for name, part in parts.items()}, compressed_config(4))
    expected = (integers - 8) * scales.astype(np.float32)[:, group]
    check_regions(tensors, "a.weight", expected.astype(np.float32))


def quantize(folder: Path, write_parts, config: dict[str, Any], group_size: int = 8) -> dict[str, np.ndarray]:
    """Rewrites the matrices of a directory's layers as 4-bit integers; returns what they stand for."""
    stand_for = {}

    def change(tensors):
        changed = {}
        for name, values in tensors.items():
            if values.ndim != 2 or "layers" not in name or "norm" in name or name.endswith("mlp.gate.weight"):
                changed[name] = stand_for[name] = values
                continue
            group = np.arange(values.shape[1]) // group_size
            integers, zeros, scales = drawn(values.shape, 4, group.max() + 1, seed=len(stand_for))
            for part, stored in write_parts(integers, np.minimum(zeros, 15), scales / 16, 4, group).items():
                changed[f"{name.removesuffix('weight')}{part}"] = stored
            wide = (integers - np.minimum(zeros, 15)[:, group]) * (scales / 16).astype(np.float32)[:, group]
            stand_for[name] = wide.astype(np.float32)
        return changed

    rewrite(folder, change)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"quantization_config": config}))
    return stand_for


@pytest.mark.parametrize(
    ("entries", "write_parts", "config"),
    [
        pytest.param(LLAMA, gptq, GPTQ | {"bits": 4, "group_size": 8}, id="llama-gptq"),
        pytest.param(LLAMA, awq, AWQ | {"group_size": 8}, id="llama-awq"),
        pytest.param(LLAMA, compressed, compressed_config(4, symmetric=False, group_size=8), id="llama-compressed"),
        pytest.param(MOE, awq, AWQ | {"group_size": 8}, id="qwen3_moe-awq"),
    ],
)
def test_a_model_in_integers_is_read(tmp_path, entries, write_parts, config):
    model, _ = write(tmp_path / "packed", entries)
    write(tmp_path / "wide", entries)
    stand_for = quantize(tmp_path / "packed", write_parts, config)
    rewrite(tmp_path / "wide", lambda _: stand_for)
    expected = weights.load(tmp_path / "wide", model, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "packed", model, jnp.float32), expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPTQ | {"bits": 3}, "gptq with 3 bits"),
        (GPTQ | {"bits": [4]}, r"gptq with \[4\] bits"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "gptq in the form marlin"),
        (GPTQ | {"bits": 4, "dynamic": {"-:.*": {}}}, r"gptq with settings of single modules \(dynamic\)"),
        (AWQ | {"version": "gemv"}, "awq gemv with 4 bits"),
        (AWQ | {"bits": 3}, "awq gemm with 3 bits"),
        (compressed_config(4, type="float"), "compressed-tensors pack-quantized other than 2, 4 or 8 bits"),
        (compressed_config(4, strategy="tensor"), "compressed-tensors pack-quantized other than 2, 4 or 8 bits"),
        (compressed_config(4) | {"config_groups": {}}, "compressed-tensors pack-quantized with none or several"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path, config, named):
    write(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=rf"the weights are quantized by {named}.*, which is not supported; "):
        weights.read_config(tmp_path)


def test_matrices_of_gpt2_are_refused(tmp_path):
    write(tmp_path, GPT2)
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"quantization_config": GPTQ | {"bits": 4}}))
    with pytest.raises(CheckpointError, match="quantized by gptq of gpt2, which is not supported"):
        weights.read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, r"there is a tensor 'a.qweight', but no 'a.scales'"),
        ({"qzeros": None}, r"there is a tensor 'a.qweight', but no 'a.qzeros'"),
        (
            {"scales": np.ones((2, OUT), np.float16), "g_idx": None},
            r"'a.scales' has float16\[2, 24\]; .* 4-bit integers for 'a.weight' needs bfloat16\[3, 24\] here",
        ),
        ({"qzeros": np.ones((3, 2), np.int32)}, r"'a.qzeros' has int32\[3, 2\]; .* needs int32\[3, 3\] here"),
        ({"qweight": np.ones((6, OUT), np.float32)}, r"'a.weight' has float32\[6, 24\]; .* needs int32"),
        ({"g_idx": np.full(IN, 3, np.int32)}, r"'a.g_idx' names groups outside 0 to 2"),
        ({"g_idx": np.full(IN, -1, np.int32)}, r"'a.g_idx' names groups outside 0 to 2"),
        ({"g_idx": np.zeros(3, np.int32)}, r"'a.g_idx' has int32\[3\]; .* needs int32\[48\] here"),
    ],
)
def test_faults_of_parts_are_named(tmp_path, change, message):
    integers, zeros, scales = drawn((OUT, IN), 4, 3)
    parts = gptq(integers, zeros, scales, 4, np.arange(IN) // GROUP) | change
    with pytest.raises(CheckpointError, match=message):
        store(tmp_path, {f"a.{name}": part for name, part in parts.items() if part is not None}, GPTQ | {"bits": 4})


def test_a_group_size_must_be_a_number(tmp_path):
    with pytest.raises(CheckpointError, match="group_size is '128'; it must be a number of inputs, or -1 for all"):
        store(tmp_path, {"b": np.ones(3, np.float32)}, GPTQ | {"bits": 4, "group_size": "128"})


KEPT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("write_parts", "config"),
    [
        pytest.param(gptq, GPTQ | {"bits": 4, "group_size": 16}, id="gptq"),
        pytest.param(awq, AWQ | {"group_size": 16}, id="awq"),
        pytest.param(compressed, compressed_config(4, symmetric=False, group_size=16), id="compressed"),
    ],
)
def test_integers_are_kept(tmp_path, write_parts, config, tensor):
    """Each matrix has the stored integers, scales and zero points, so it is to the bit what it would be widened."""
    entries = LLAMA | KEPT_SIZES
    write(tmp_path, entries)
    quantize(tmp_path, write_parts, config, group_size=16)
    model = models.build(weights.read_config(tmp_path))
    (stages,), _ = startup.replica_programs(EngineConfig(tensor=tensor, quantize="int4", max_context=16), model)
    found = weights.load(tmp_path, stages[0].model, jnp.float32, place=placement(stages), quantize="int4")
    wide = weights.load(tmp_path, stages[0].model, jnp.float32)
    kept = 0
    for leaf, expected in zip(*(jax.tree.leaves(tree, is_leaf=is_matrix) for tree in (found, wide)), strict=True):
        if is_matrix(leaf) and leaf.group is not None:
            kept += 1
            assert (leaf.values.dtype, leaf.group, leaf.zeros.dtype) == (jnp.int4, 16, jnp.int8)
            np.testing.assert_array_equal(widened(leaf, jnp.float32), expected)
    assert kept == 5 * model.config.num_layers


@pytest.mark.parametrize("config", [GPTQ | {"bits": 4, "group_size": 16}, AWQ | {"group_size": 16}])
def test_matrices_in_another_form_are_quantized_anew(tmp_path, config):
    """A group by order of activations, and a matrix that is not packed."""
    write(tmp_path, LLAMA | KEPT_SIZES)
    write_parts = shuffled if config["quant_method"] == "gptq" else wide_after_all
    quantize(tmp_path, write_parts, config, group_size=16)
    model = models.build(weights.read_config(tmp_path))
    found = weights.load(tmp_path, model, jnp.float32, quantize="int4")
    wide = weights.load(tmp_path, model, jnp.float32)
    for leaf, expected in zip(*(jax.tree.leaves(tree, is_leaf=is_matrix) for tree in (found, wide)), strict=True):
        if is_matrix(leaf) and leaf.group is not None:
            assert not leaf.zeros.any()
            off = np.abs(np.asarray(widened(leaf, jnp.float32)) - expected)
            assert 0 < off.max() <= 1.01 * np.abs(leaf.scales).max()


def shuffled(integers, zeros, scales, bits: int, group) -> dict[str, np.ndarray]:
    return gptq(integers, zeros, scales, bits, np.random.default_rng(0).permutation(group))


def wide_after_all(integers, zeros, scales, bits: int, group) -> dict[str, np.ndarray]:
    return {"weight": ((integers - zeros[:, group]) * scales[:, group]).astype(np.float32)}
