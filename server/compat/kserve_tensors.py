"""Open Inference tensors as Python values and back: JSON, raw bytes, gRPC contents."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest, shown
from server.limits import MAX_VALUES
from server.proto.inference import open_inference_grpc_pb2 as pb

# Datatype: (code of `struct`, field of InferTensorContents). A BYTES value is a string.
_KINDS = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP16": ("e", ""),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    "BYTES": ("", "bytes_contents"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor; its values are in row-major order.

    Raises:
      InvalidRequest: naming the tensor: the datatype is unknown, or shape, datatype and values do not agree.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]

    def __post_init__(self) -> None:
        check(self.name, self.datatype, self.shape)
        if len(self.values) != math.prod(self.shape):
            raise InvalidRequest(self.name, f"has {len(self.values)} values; its shape has {math.prod(self.shape)}")
        kinds = {"BOOL": (bool,), "BYTES": (str,)}.get(self.datatype, (int,))
        if self.datatype.startswith("FP"):
            kinds = (int, float)
        for value in self.values:
            if type(value) not in kinds:
                raise InvalidRequest(self.name, f"holds {shown(value)}, which is not {self.datatype}")


def check(name: str, datatype: str, shape: Sequence[int]) -> None:
    """Raises InvalidRequest for an unknown datatype or a shape that is negative or too large."""
    if datatype not in _KINDS:
        raise InvalidRequest(name, f"has datatype {shown(datatype)}; it must be one of {', '.join(_KINDS)}")
    if len(shape) > 8 or any(size < 0 for size in shape) or math.prod(shape) > MAX_VALUES:
        raise InvalidRequest(name, f"has shape {list(shape)[:8]}; at most 8 sizes and {MAX_VALUES} values are taken")


def from_json(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
    """A tensor whose values are a list, or lists in lists. Raises InvalidRequest."""
    return Tensor(name=name, datatype=datatype, shape=tuple(shape), values=_flat(name, data, depth=8))


def _flat(name: str, data: Any, depth: int) -> list[Any]:
    if not isinstance(data, list) or not depth:
        raise InvalidRequest(name, "must have data: a list of values")
    if data and isinstance(data[0], list):
        return [value for each in data for value in _flat(name, each, depth - 1)]
    return data


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """A tensor of little-endian bytes. Raises InvalidRequest."""
    check(name, datatype, shape)
    code, count = _KINDS[datatype][0], math.prod(shape)
    if not code:
        return Tensor(name=name, datatype=datatype, shape=tuple(shape), values=_strings(name, raw))
    form = f"<{count}{code}"
    if struct.calcsize(form) != len(raw):
        raise InvalidRequest(name, f"has {len(raw)} bytes; shape and datatype need {struct.calcsize(form)}")
    return Tensor(name=name, datatype=datatype, shape=tuple(shape), values=struct.unpack(form, raw))


def _strings(name: str, raw: bytes) -> list[str]:
    found, at = [], 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        text = raw[at + 4 : at + 4 + length]
        if at + 4 > len(raw) or len(text) != length:
            raise InvalidRequest(name, "ends within a string; each has four bytes with its length in front")
        found.append(_text(name, text))
        at += 4 + length
    return found


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(name, "holds bytes that are not UTF-8") from None


def from_contents(name: str, datatype: str, shape: Sequence[int], contents: pb.InferTensorContents) -> Tensor:
    """A tensor with gRPC's contents. Raises InvalidRequest."""
    check(name, datatype, shape)
    given = getattr(contents, _KINDS[datatype][1], ())
    if len(given) != math.prod(shape):  # before they are copied
        raise InvalidRequest(name, f"has {len(given)} values; its shape has {math.prod(shape)}")
    values: list[Any] = list(given)
    if datatype == "BYTES":
        values = [_text(name, value) for value in values]
    return Tensor(name=name, datatype=datatype, shape=tuple(shape), values=values)


def to_bytes(tensor: Tensor) -> bytes:
    code = _KINDS[tensor.datatype][0]
    if code:
        return struct.pack(f"<{len(tensor.values)}{code}", *tensor.values)
    texts = [value.encode(errors="replace") for value in tensor.values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def to_contents(tensor: Tensor) -> pb.InferTensorContents:
    values = [v.encode(errors="replace") for v in tensor.values] if tensor.datatype == "BYTES" else tensor.values
    return pb.InferTensorContents(**{_KINDS[tensor.datatype][1]: values})


def plain_parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """gRPC's parameters as Python values."""
    chosen = {name: each.WhichOneof("parameter_choice") for name, each in given.items()}
    return {name: getattr(given[name], kind) for name, kind in chosen.items() if kind is not None}
