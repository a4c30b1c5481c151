"""How a checkpoint's weights are quantized, as its configuration says: the methods that are read, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.weights.stored import (
    FLOAT8,
    FLOAT8_SCALES,
    FLOATS,
    CheckpointError,
    Mxfp4Tensor,
    ScaledTensor,
    StoredTensor,
    block_of,
)

_SCALES = ("_scale_inv", "_scale")  # after the name of what they multiply, also the first
_BLOCKS = ("_blocks", "_scales")
# Tensors, by the last part of their names, for quantized activations and caches, which are not quantized here.
_UNUSED = frozenset(
    ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)
_MEND = (
    "take the same model in float16 or bfloat16 (--quantize int8 makes 8-bit weights of it while it is read), in FP8 "
    "(fp8, fbgemm_fp8, or compressed-tensors float-quantized) or in MXFP4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A method of quantization that is read.

    Attributes:
      method: as config.json names it; empty if the weights are not quantized.
      block: entries along the last axes of a matrix that share a scale; empty where a scale is of a row or a matrix.
    """

    method: str = ""
    block: tuple[int, ...] = ()


def parse(file: Path, entries: Mapping[str, Any]) -> Quantization:
    """Reads the quantization_config of a config.json.

    Raises:
      CheckpointError: it is of a method that is not read, or malformed.
    """
    name = "quantization_config" if entries.get("quantization_config") else "compression_config"
    found = entries.get(name)
    if not found:
        return Quantization()
    if not isinstance(found, Mapping) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(f"{file}: {name} has no quant_method, the name of a method")
    method = found["quant_method"]
    block: Any = found.get("weight_block_size")
    if method == "compressed-tensors":
        block = _compressed_block(file, found)
    elif method == "modelopt":
        if (kind := found.get("quant_algo")) != "FP8":
            raise _not_read(file, f"{method} {kind}")
    elif method not in ("fp8", "fbgemm_fp8", "mxfp4"):
        raise _not_read(file, method)
    if not block:
        return Quantization(method=method)
    if not isinstance(block, list) or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(f"{file}: {name} has weight blocks of {block!r}; they must be a list of sizes")
    return Quantization(method=method, block=tuple(block))


def _compressed_block(file: Path, found: Mapping[str, Any]) -> Any:
    """The size of blocks in a configuration of the compressed-tensors library."""
    groups = found.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    formats = {found.get("format"), *(group.get("format") for group in (groups or {}).values())} - {None}
    if formats - {"float-quantized", "naive-quantized", "mixed-precision"} or not schemes:
        raise _not_read(file, f"compressed-tensors {', '.join(sorted(map(str, formats)))}".rstrip())
    blocks = []
    for scheme in schemes:
        if not isinstance(scheme, Mapping) or (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            raise _not_read(file, "compressed-tensors other than 8-bit float")
        if size := scheme.get("group_size") if scheme.get("strategy") == "group" else None:
            blocks.append([1, size])
        else:
            size = scheme.get("block_structure")  # older versions write it as 128x128
            blocks.append([int(n) if n.isdecimal() else n for n in size.split("x")] if isinstance(size, str) else size)
    if any(block != blocks[0] for block in blocks):
        raise _not_read(file, "compressed-tensors with blocks of several sizes")
    return blocks[0]


def _not_read(file: Path, method: str) -> CheckpointError:
    return CheckpointError(f"{file}: the weights are quantized by {method}, which is not read; {_MEND}")


def decode(stored: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the names that models know: quantized ones are put together of their parts.

    Args:
      stored: the tensors as they are in the files.

    Raises:
      CheckpointError: parts of a quantized tensor are missing or do not go together.
    """
    tensors: dict[str, StoredTensor] = {}
    used = set()
    for name, tensor in stored.items():
        whole = name.removesuffix(_BLOCKS[0])
        if whole != name and (scales := stored.get(whole + _BLOCKS[1])) is not None:
            tensors[whole] = Mxfp4Tensor(name=whole, file=tensor.file, values=tensor.values, scales=scales)
            used |= {name, scales.name}
        elif tensor.values.dtype in FLOAT8:
            scales = next((stored[name + end] for end in _SCALES if name + end in stored), None)
            if scales is not None:
                tensors[name] = _scaled(tensor, scales, quantization)
                used |= {name, scales.name}
            elif quantization.method:
                raise CheckpointError(
                    f"{tensor.file}: tensor {name!r} is stored as {tensor.values.dtype} without {name + _SCALES[1]!r}, "
                    f"and config.json says that the weights are quantized by {quantization.method}"
                )
    for name, tensor in stored.items():
        unused = quantization.method and name.rpartition(".")[2] in _UNUSED
        if name not in used and not unused:
            tensors[name] = tensor
    return tensors


def _scaled(tensor: StoredTensor, scales: StoredTensor, quantization: Quantization) -> ScaledTensor:
    if scales.dtype not in (*FLOATS, FLOAT8_SCALES):
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} is stored as {scales.dtype}, and scales of weights are float32"
        )
    block = block_of(tensor, scales, quantization.block)
    return ScaledTensor(name=tensor.name, file=tensor.file, values=tensor.values, scales=scales, block=block)
