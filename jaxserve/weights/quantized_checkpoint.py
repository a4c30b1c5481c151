"""Parses a checkpoint's quantization, and combines quantized tensors with their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.models.schema import NarrowFormat
from jaxserve.weights.packed_tensor import AWQ_ORDER, COMPRESSED_PARTS, GPTQ_PARTS, IN_ORDER, PackedTensor, Packing
from jaxserve.weights.stored import (
    FLOAT8,
    FLOAT8_SCALES,
    FLOATS,
    CheckpointError,
    Float8Tensor,
    Mxfp4Tensor,
    StoredTensor,
    block_of,
)

_SCALES = ("_scale_inv", "_scale")  # suffixes to the name of a tensor; it is multiplied by either
_BLOCKS = ("_blocks", "_scales")
# Last parts of the names of scales for activations and caches. They are ignored: only weights are quantized here.
_UNUSED = frozenset(
    ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)
_ALTERNATIVES = (
    "use a checkpoint of the model in float16 or bfloat16 (--quantize int8 quantizes it to 8 bits while loading), in "
    "FP8 (fp8, fbgemm_fp8, or compressed-tensors float-quantized), in MXFP4, or in integers of 2, 4 or 8 bits (gptq, "
    "awq gemm, or compressed-tensors pack-quantized)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A supported quantization method.

    Attributes:
      method: its name in config.json; empty if the weights are not quantized.
      block: entries along the last axes of a matrix that share a scale; empty for one scale per row or matrix.
      packing: of integers in words; None if the weights are no such integers.
    """

    method: str = ""
    block: tuple[int, ...] = ()
    packing: Packing | None = None

    @property
    def kept(self) -> NarrowFormat | None:
        """The format that `--quantize` of the same name keeps."""
        if self.packing is None or self.packing.bits != 4:
            return None
        return NarrowFormat(dtype="int4", group=self.packing.group, zeros=self.packing.has_zeros)


def parse(file: Path, entries: Mapping[str, Any]) -> Quantization:
    """Parses the quantization_config of a config.json.

    Raises:
      CheckpointError: it is malformed, or its method is not supported.
    """
    name = "quantization_config" if entries.get("quantization_config") else "compression_config"
    found = entries.get(name)
    if not found:
        return Quantization()
    if not isinstance(found, Mapping) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(f"{file}: {name} has no quant_method, the name of a method")
    method = found["quant_method"]
    block: Any = found.get("weight_block_size")
    if method in _PACKINGS or (method == "compressed-tensors" and found.get("format") == "pack-quantized"):
        if entries.get("model_type") == "gpt2":  # whose matrices have their inputs first
            raise _unsupported(file, f"{method} of gpt2")
        return Quantization(method=method, packing=_PACKINGS.get(method, _compressed_packing)(file, found))
    if method == "compressed-tensors":
        block = _compressed_block(file, found)
    elif method == "modelopt":
        if (kind := found.get("quant_algo")) != "FP8":
            raise _unsupported(file, f"{method} {kind}")
    elif method not in ("fp8", "fbgemm_fp8", "mxfp4"):
        raise _unsupported(file, method)
    if not block:
        return Quantization(method=method)
    if not isinstance(block, list) or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(f"{file}: {name} has weight blocks of {block!r}; they must be a list of sizes")
    return Quantization(method=method, block=tuple(block))


def _gptq_packing(file: Path, found: Mapping[str, Any]) -> Packing:
    bits, group, form = found.get("bits"), found.get("group_size"), found.get("checkpoint_format", "gptq")
    if bits not in tuple(IN_ORDER):
        raise _unsupported(file, f"gptq with {bits} bits")
    if found.get("dynamic"):
        raise _unsupported(file, "gptq with settings of single modules (dynamic)")
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(file, f"gptq in the form {form}")
    zero = 1 if form == "gptq" else 0  # the first format stores zero points less one
    packed: Any = {"parts": GPTQ_PARTS, "is_transposed": True, "axis": 0, "order": IN_ORDER[bits], "zero": zero}
    return Packing(bits=bits, group=_group_size(file, group), **packed)


def _awq_packing(file: Path, found: Mapping[str, Any]) -> Packing:
    bits, version = found.get("bits", found.get("w_bit")), str(found.get("version", "gemm")).lower()
    if (bits, version) != (4, "gemm"):
        raise _unsupported(file, f"awq {version} with {bits} bits")
    group = _group_size(file, found.get("group_size", found.get("q_group_size")))
    packed: Any = {"parts": GPTQ_PARTS, "is_transposed": True, "axis": 1, "order": AWQ_ORDER}
    return Packing(bits=bits, group=group, has_zeros=found.get("zero_point") is not False, **packed)


def _compressed_packing(file: Path, found: Mapping[str, Any]) -> Packing:
    groups = found.get("config_groups")
    schemes = [each.get("weights") for each in groups.values()] if isinstance(groups, Mapping) else []
    packings = []
    for scheme in schemes:
        bits = scheme.get("num_bits") if isinstance(scheme, Mapping) and scheme.get("type") == "int" else None
        if bits not in tuple(IN_ORDER) or scheme.get("strategy") not in ("group", "channel"):
            raise _unsupported(file, "compressed-tensors pack-quantized other than 2, 4 or 8 bits by group or channel")
        group = _group_size(file, scheme.get("group_size")) if scheme["strategy"] == "group" else -1
        layout: Any = {"parts": COMPRESSED_PARTS, "is_transposed": False, "axis": 1, "order": IN_ORDER[bits]}
        layout["has_zeros"] = scheme.get("symmetric") is False
        packings.append(Packing(bits=bits, group=group, **layout))
    if not packings or any(each != packings[0] for each in packings):
        raise _unsupported(file, "compressed-tensors pack-quantized with none or several schemes")
    return packings[0]


def _group_size(file: Path, found: Any) -> int:
    if type(found) is not int or (found < 1 and found != -1):
        raise CheckpointError(f"{file}: group_size is {found!r}; it must be a number of inputs, or -1 for all")
    return found


_PACKINGS = {"gptq": _gptq_packing, "awq": _awq_packing}


def _compressed_block(file: Path, found: Mapping[str, Any]) -> Any:
    """The block size in a configuration of the compressed-tensors library."""
    groups = found.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    formats = {found.get("format"), *(group.get("format") for group in (groups or {}).values())} - {None}
    if formats - {"float-quantized", "naive-quantized", "mixed-precision"} or not schemes:
        raise _unsupported(file, f"compressed-tensors {', '.join(sorted(map(str, formats)))}".rstrip())
    blocks = []
    for scheme in schemes:
        if not isinstance(scheme, Mapping) or (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            raise _unsupported(file, "compressed-tensors other than 8-bit float")
        if size := scheme.get("group_size") if scheme.get("strategy") == "group" else None:
            blocks.append([1, size])
        else:
            size = scheme.get("block_structure")  # older versions write it as 128x128
            blocks.append([int(n) if n.isdecimal() else n for n in size.split("x")] if isinstance(size, str) else size)
    if any(block != blocks[0] for block in blocks):
        raise _unsupported(file, "compressed-tensors with blocks of several sizes")
    return blocks[0]


def _unsupported(file: Path, method: str) -> CheckpointError:
    return CheckpointError(f"{file}: the weights are quantized by {method}, which is not supported; {_ALTERNATIVES}")


def decode(stored: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """Combines quantized tensors with their scales; returns all tensors by name.

    Args:
      stored: the tensors in the files, by name.

    Raises:
      CheckpointError: parts of a quantized tensor are missing or do not match.
    """
    tensors: dict[str, StoredTensor] = {}
    used = set()
    if quantization.packing is not None:
        tensors, used = _unpacked(stored, quantization.packing)
    for name, tensor in stored.items():
        whole = name.removesuffix(_BLOCKS[0])
        if whole != name and (scales := stored.get(whole + _BLOCKS[1])) is not None:
            tensors[whole] = Mxfp4Tensor(name=whole, file=tensor.file, values=tensor.values, scales=scales)
            used |= {name, scales.name}
        elif tensor.values.dtype in FLOAT8:
            scales = next((stored[name + end] for end in _SCALES if name + end in stored), None)
            if scales is not None:
                tensors[name] = _with_scales(tensor, scales, quantization)
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


def _unpacked(stored: Mapping[str, StoredTensor], packing: Packing) -> tuple[dict[str, StoredTensor], set[str]]:
    """The packed matrices by the names of weights, and the names of their parts."""
    tensors: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if last != packing.parts[0]:
            continue
        scales, zeros, groups = (stored.get(f"{module}.{part}") for part in packing.parts[1:])
        if scales is None or (zeros is None and packing.has_zeros):
            missing = packing.parts[1 if scales is None else 2]
            raise CheckpointError(f"{tensor.file}: there is a tensor {name!r}, but no {module + '.' + missing!r}")
        weight = f"{module}.weight"
        tensors[weight] = PackedTensor(
            name=weight,
            file=tensor.file,
            values=tensor.values,
            scales=scales,
            zeros=zeros,
            groups=groups,
            packing=packing,
        )
        used |= {f"{module}.{part}" for part in (*packing.parts, "weight_shape")}
    return tensors, used


def _with_scales(tensor: StoredTensor, scales: StoredTensor, quantization: Quantization) -> Float8Tensor:
    if scales.dtype not in (*FLOATS, FLOAT8_SCALES):
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} is stored as {scales.dtype}; scales must be float or float8_e8m0fnu"
        )
    block = block_of(tensor, scales, quantization.block)
    return Float8Tensor(name=tensor.name, file=tensor.file, values=tensor.values, scales=scales, block=block)
