"""Reads a safetensors file: its header, and its tensors as views of the mapped file."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.weights.stored import CheckpointError, StoredTensor

_DTYPES: dict[str, np.dtype] = {
    code: np.dtype(kind)
    for code, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library


def read(file: Path, content: mmap.mmap) -> tuple[bytes, list[StoredTensor]]:
    """The header and the tensors of a file. Raises CheckpointError."""
    length = int.from_bytes(content[:8], "little") if len(content) >= 8 else -1
    if not 0 < length <= min(len(content) - 8, _MAX_HEADER):
        raise CheckpointError(f"{file} is not a safetensors file, or is truncated: its header is incomplete")
    raw = content[8 : 8 + length]
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not a safetensors file: its header is not a JSON object")
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            tensors.append(StoredTensor(name=name, file=file, values=_view(file, content, name, entry, 8 + length)))
    return raw, tensors


def _view(file: Path, content: mmap.mmap, name: str, entry: Any, data_start: int) -> np.ndarray:
    try:
        code, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: the header's entry for {name!r} is malformed") from None
    if code not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} is stored as {code!r}, which is unknown")
    dtype, size = _DTYPES[code], math.prod(shape)
    if min(start, *shape, 0) < 0 or stop - start != size * dtype.itemsize:
        raise CheckpointError(
            f"{file}: the header's entry for {name!r} is malformed: {code}{list(shape)} is not {stop - start} bytes"
        )
    if (missing := data_start + stop - len(content)) > 0:
        raise CheckpointError(f"{file} is truncated: tensor {name!r} ends {missing} bytes beyond the end of the file")
    return np.frombuffer(content, dtype, size, data_start + start).reshape(shape)
