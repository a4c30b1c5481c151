"""Quantized checkpoints: every part of a tensor is widened as it is published, and other methods are refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import weights
from jaxserve.weights import CheckpointError
from jaxserve.weights.checkpoint import StoredTensors
from tests.jaxserve.weights.directories import BLOOM, rewrite, write

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 40}
MOE = LLAMA | EXPERTS | {"model_type": "qwen3_moe"}
GPT_OSS = LLAMA | EXPERTS | {"model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 64, "sliding_window": 3}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [8, 16], "activation_scheme": "dynamic"}


def compressed(strategy: str, **scheme: Any) -> dict[str, Any]:
    """The quantization_config of the compressed-tensors library for weights in float8."""
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True} | scheme
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def store(folder: Path, tensors: dict[str, np.ndarray], quantization: dict[str, Any] | None) -> StoredTensors:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return StoredTensors(folder)


def in_float8(shape: tuple[int, ...], dtype=E4M3) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * 40).astype(dtype)


def repeated(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    """The scale of each entry."""
    for axis, (size, step) in enumerate(zip(shape, block, strict=True)):
        scales = np.repeat(scales, step, axis).take(range(size), axis)
    return scales


def check_regions(tensors: StoredTensors, name: str, expected: np.ndarray) -> None:
    """Whether every part of a tensor is what it is of the whole."""
    tensor = tensors[name]
    assert tensor.shape == expected.shape
    cuts = [sorted({0, 1, size // 3, size // 2 + 1, size - 1, size}) for size in tensor.shape]
    for bounds in itertools.product(*(itertools.combinations_with_replacement(each, 2) for each in cuts)):
        region = tuple(slice(*each) for each in bounds)
        part = tensor.read(region)
        assert part.dtype == tensor.dtype
        np.testing.assert_array_equal(part, expected[region], err_msg=str(bounds))
    region = tuple(slice(1, size, 2) for size in tensor.shape)
    np.testing.assert_array_equal(tensor.read(region), expected[region])


ONE = {"quant_method": "fp8", "activation_scheme": "static"}
CASES = {
    "fp8 blocks": (BLOCKS, "_scale_inv", (3, 2), (8, 16), np.float32, E4M3),
    "fp8 blocks, scales in powers of two": (BLOCKS, "_scale_inv", (3, 2), (8, 16), E8M0, E4M3),
    "fp8 blocks, e5m2": (BLOCKS, "_scale_inv", (3, 2), (8, 16), np.float32, E5M2),
    "fp8, one scale": (ONE, "_scale", (), (19, 23), np.float32, E4M3),
    "fp8, one scale named as those of blocks": (ONE, "_scale_inv", (1,), (19, 23), ml_dtypes.bfloat16, E4M3),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, "_scale", (19, 1), (1, 23), np.float32, E4M3),
    "compressed-tensors by matrix": (compressed("tensor"), "_scale", (1,), (19, 23), ml_dtypes.bfloat16, E4M3),
    "compressed-tensors by row": (compressed("channel"), "_scale", (19, 1), (1, 23), ml_dtypes.bfloat16, E4M3),
    "compressed-tensors by a flat row": (compressed("channel"), "_scale", (19,), (1, 23), np.float32, E4M3),
    "compressed-tensors by block": (
        compressed("block", block_structure=[8, 16]),
        *("_scale", (3, 2), (8, 16), np.float32, E4M3),
    ),
    "compressed-tensors by block, as text": (
        compressed("block", block_structure="8x16"),
        *("_scale", (3, 2), (8, 16), np.float32, E4M3),
    ),
    "compressed-tensors by group": (
        compressed("group", group_size=4),
        *("_scale", (19, 6), (1, 4), np.float32, E4M3),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (), (19, 23), np.float32, E4M3),
    "no configuration": (None, "_scale", (19, 1), (1, 23), np.float32, E4M3),
}


@pytest.mark.parametrize(("configured", "end", "grid", "block", "of_scales", "dtype"), CASES.values(), ids=CASES)
def test_float8_is_scaled(tmp_path, configured, end, grid, block, of_scales, dtype):
    values = in_float8((19, 23), dtype)
    scales = np.exp2(np.random.default_rng(1).integers(-9, 9, grid), dtype=np.float32)
    scales = np.asarray(scales).astype(of_scales)
    tensors = store(tmp_path, {"a.weight": values, "a.weight" + end: scales, "b": np.ones(3, np.float32)}, configured)
    assert set(tensors.names()) == {"a.weight", "b"}
    assert tensors["a.weight"].nbytes == values.nbytes + scales.nbytes
    wide = scales.astype(np.float32).reshape(tuple(-(-n // step) for n, step in zip(values.shape, block, strict=True)))
    check_regions(tensors, "a.weight", values.astype(np.float32) * repeated(wide, values.shape, block))


def test_experts_in_float8_are_scaled(tmp_path):
    values, scales = in_float8((3, 12, 20)), np.arange(1, 13, dtype=np.float32).reshape(3, 2, 2)
    tensors = store(tmp_path, {"experts": values, "experts_scale_inv": scales}, BLOCKS)
    check_regions(tensors, "experts", values.astype(np.float32) * repeated(scales, values.shape, (1, 8, 16)))


def test_a_configuration_under_its_older_name_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BLOOM | {"compression_config": {"quant_method": "sparse"}}))
    with pytest.raises(CheckpointError, match=r"quantized by sparse, which is not supported"):
        weights.read_config(tmp_path)


def test_float8_without_scales_is_read_as_it_is(tmp_path):
    values = in_float8((4, 6))
    tensors = store(tmp_path, {"a": values}, None)
    assert tensors["a"].is_float
    check_regions(tensors, "a", values)


def test_mxfp4_is_widened(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 5, 3, 16), np.uint8)
    scales = rng.integers(120, 134, (2, 5, 3), np.uint8)
    scales[0, 0] = 0, 252, 127
    tensors = store(
        tmp_path,
        {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    assert tensors.names() == ("mlp.experts.down_proj",)
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(2, 5, 3, 32)
    powers = 2.0 ** (scales[..., None].astype(np.float64) - 127)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * powers
    check_regions(tensors, "mlp.experts.down_proj", values.reshape(2, 5, 96).swapaxes(1, 2).astype(np.float32))
    assert tensors["mlp.experts.down_proj"].nbytes == blocks.nbytes + scales.nbytes


def quantize(folder: Path, configured: dict[str, Any]) -> dict[str, np.ndarray]:
    """Rewrites the matrices of a directory's layers in float8 with scales by block; returns what they stand for."""
    rng, stand_for = np.random.default_rng(3), {}

    def change(tensors):
        changed = {}
        for name, values in tensors.items():
            stand_for[name] = values
            changed[name] = values.astype(ml_dtypes.bfloat16)
            if values.ndim == 2 and "layers" in name:
                grid = -(-values.shape[0] // 8), -(-values.shape[1] // 16)
                scales = np.exp2(rng.integers(-4, 4, grid)).astype(np.float32)
                changed[name] = values.astype(E4M3)
                changed[name + "_scale_inv"] = scales
                stand_for[name] = changed[name].astype(np.float32) * repeated(scales, values.shape, (8, 16))
                changed[name.removesuffix("weight") + "input_scale"] = np.float32([3])
        changed["model.layers.0.self_attn.k_scale"] = np.full((), 0.5, np.float32)  # of a cache in float8
        return changed

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": configured}))
    return stand_for


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [(LLAMA, jnp.float32), (LLAMA, jnp.bfloat16), (MOE, jnp.float32)],
    ids=["llama", "llama-bfloat16", "qwen3_moe"],
)
def test_a_model_in_float8_is_read(tmp_path, entries, dtype):
    model, _ = write(tmp_path / "float8", entries)
    write(tmp_path / "wide", entries)
    stand_for = quantize(tmp_path / "float8", BLOCKS)
    assert any(np.abs(values).max() > 4 for values in stand_for.values())
    rewrite(tmp_path / "wide", lambda _: stand_for)
    expected, read = weights.load(tmp_path / "wide", model, dtype), []
    jax.tree.map(
        np.testing.assert_array_equal,
        weights.load(tmp_path / "float8", model, dtype, count=read.append),
        expected,
    )
    tensors = StoredTensors(tmp_path / "float8")
    assert sum(read) == sum(tensors[name].nbytes for name in tensors.names())


def test_a_model_in_mxfp4_is_read(tmp_path):
    model, _ = write(tmp_path / "mxfp4", GPT_OSS)
    write(tmp_path / "wide", GPT_OSS)
    rng, stand_for = np.random.default_rng(3), {}

    def change(tensors):
        changed = {}
        for name, values in tensors.items():
            changed[name] = stand_for[name] = values
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = values.shape
                del changed[name]
                changed[name + "_blocks"] = blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
                changed[name + "_scales"] = scales = rng.integers(120, 134, blocks.shape[:-1], np.uint8)
                nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
                wide = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.ldexp(
                    1, scales[..., None].astype(int) - 127
                )
                stand_for[name] = wide.reshape(experts, rows, columns).swapaxes(1, 2).astype(np.float32)
        return changed

    rewrite(tmp_path / "mxfp4", change)
    entries = json.loads((tmp_path / "mxfp4" / "config.json").read_text())
    entries["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(entries))
    rewrite(tmp_path / "wide", lambda _: {name: np.ascontiguousarray(values) for name, values in stand_for.items()})
    expected = weights.load(tmp_path / "wide", model, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "mxfp4", model, jnp.float32), expected)


def test_a_converted_model_in_float8_is_in_bfloat16(tmp_path):
    model, _ = write(tmp_path / "float8", LLAMA)
    quantize(tmp_path / "float8", BLOCKS)
    weights.convert(tmp_path / "float8", tmp_path / "out")
    assert weights.fingerprint(tmp_path / "out").endswith("-bfloat16")
    same = weights.load(tmp_path / "out", model, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, same, weights.load(tmp_path / "float8", model, jnp.bfloat16))


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        (compressed("channel") | {"format": "marlin-24"}, "compressed-tensors marlin-24"),
        (compressed("channel", num_bits=4), "compressed-tensors other than 8-bit float"),
        (compressed("channel", type="int"), "compressed-tensors other than 8-bit float"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, method, named):
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BLOOM | {"quantization_config": method}))
    with pytest.raises(CheckpointError, match=rf"the weights are quantized by {named}, which is not supported; ") as e:
        weights.read_config(tmp_path)
    assert "\n" not in str(e.value)


def test_a_separate_configuration_of_modelopt_counts(tmp_path):
    write(tmp_path)
    for algorithm in ("NVFP4", "FP8"):
        entries = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(entries))
        if algorithm == "FP8":
            assert weights.read_config(tmp_path).family == "bloom"
        else:
            with pytest.raises(CheckpointError, match=r"quantized by modelopt NVFP4, which is not supported"):
                weights.read_config(tmp_path)


U8 = np.zeros((2, 3, 16), np.uint8)
FAULTS = {
    "no scales": (BLOCKS, {"a": in_float8((4, 6))}, r"'a' is stored as float8_e4m3fn without 'a_scale'"),
    "scales of other blocks": (
        BLOCKS,
        {"a": in_float8((19, 23)), "a_scale_inv": np.ones((3, 3), np.float32)},
        r"'a_scale_inv' has shape \[3, 3\]; the scales of 'a' \[19, 23\] .*, or one per block of \[8, 16\]",
    ),
    "blocks of no size": (
        {"quant_method": "fp8"},
        {"a": in_float8((19, 23)), "a_scale_inv": np.ones((3, 2), np.float32)},
        r"'a_scale_inv' has shape \[3, 2\]; the scales of 'a' \[19, 23\] must be one, or one per row$",
    ),
    "more axes of scales": (
        BLOCKS,
        {"a": in_float8((19, 23)), "a_scale": np.ones((19, 1, 2), np.float32)},
        r"'a_scale' has shape \[19, 1, 2\]",
    ),
    "scales that are no numbers": (
        BLOCKS,
        {"a": in_float8((4, 6)), "a_scale": np.ones(4, np.int32)},
        r"'a_scale' is stored as int32; scales must be float or",
    ),
    "blocks of nothing": (BLOCKS | {"weight_block_size": [0, 8]}, {}, r"weight blocks of \[0, 8\]; they must be"),
    "sizes that are no numbers": (BLOCKS | {"weight_block_size": ["8"]}, {}, r"weight blocks of \['8'\]; they must be"),
    "no method": ({"bits": 4}, {}, r"quantization_config has no quant_method"),
    "no object": (["fp8"], {}, r"quantization_config has no quant_method"),
    "blocks of several sizes": (
        compressed("block")
        | {
            "config_groups": {
                str(n): {"weights": {"type": "float", "num_bits": 8, "block_structure": [n, n]}} for n in (8, 16)
            }
        },
        {},
        r"compressed-tensors with blocks of several sizes, which is not supported",
    ),
    "mxfp4 of other blocks": (
        {"quant_method": "mxfp4"},
        {"a_blocks": U8, "a_scales": U8[:, :2, 0]},
        r"MXFP4 tensor 'a' has blocks uint8\[2, 3, 16\] and scales uint8\[2, 2\]; both must be uint8, with 16 bytes",
    ),
    "mxfp4 of other numbers": (
        {"quant_method": "mxfp4"},
        {"a_blocks": U8, "a_scales": U8[:, :, 0].astype(np.float32)},
        r"MXFP4 tensor 'a' has blocks uint8\[2, 3, 16\] and scales float32\[2, 3\]; both must be uint8",
    ),
}


@pytest.mark.parametrize(("configured", "tensors", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_of_quantized_checkpoints_are_named(tmp_path, configured, tensors, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        store(tmp_path, tensors, configured)
    assert "\n" not in str(caught.value)
