"""A file of torch.save (pytorch_model.bin): its pickle, and its tensors as views of the mapped file.

Since torch 1.6 it is a zip archive whose members are not compressed: data.pkl, and data/N for each storage.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

import numpy as np

from jaxserve.weights import torch_pickle
from jaxserve.weights.stored import CheckpointError, StoredTensor
from jaxserve.weights.torch_pickle import Refused, TensorView

_OLD = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # how files of torch before 1.6 begin
# Records of a zip archive: signature, and what is read of each.
_END = struct.Struct("<4s8xII2x")  # size and offset of the directory; no comment follows
_END64_PLACE = struct.Struct("<8xQ4x")  # offset of the next
_END64 = struct.Struct("<4s36xQQ")  # size and offset of the directory
_MEMBER = struct.Struct("<4s4xHH8xIIHHH8xI")  # flags, method, two sizes, lengths of name and two more, offset
_LOCAL = struct.Struct("<4s22xHH")  # lengths of name and extra field; the member's bytes follow
_MAX_DIRECTORY = 64 * 2**20  # bytes
_WIDE = 0x0001  # kind of extra field with numbers of 64 bits
_IN_EXTRA = 0xFFFF_FFFF  # a number that is there


def read(file: Path, content: mmap.mmap) -> tuple[bytes, list[StoredTensor]]:
    """The pickle and the tensors of a file. Raises CheckpointError."""
    try:
        if content[: len(_OLD)] == _OLD:
            raise Refused(
                "is in the format of torch before 1.6; convert it where torch is installed: "
                f"torch.save(torch.load({file.name!r}, map_location='cpu', weights_only=True), {file.name!r})"
            )
        members = _members(content)
        pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise Refused("is no file of torch.save: it has no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if (order := _bytes(content, members.get(folder + "byteorder", (0, 0)))) not in (b"", b"little"):
            raise Refused(f"has numbers in byte order {order[:20]!r}; only little is read")
        start, size = members[pickles[0]]
        raw = _bytes(content, (start, min(size, torch_pickle.MAX_BYTES + 1)))
        tensors = []
        for name, view in torch_pickle.read(raw).items():
            values = _values(content, members, f"{folder}data/{view.storage}", name, view)
            tensors.append(StoredTensor(name=name, file=file, values=values))
    except Refused as problem:
        raise CheckpointError(f"{file} {problem}") from None
    except (struct.error, OverflowError):
        raise CheckpointError(f"{file} was cut short, or is no file of torch.save") from None
    return raw, tensors


def _bytes(content: mmap.mmap, place: tuple[int, int]) -> bytes:
    start, size = place
    return content[start : start + size]


def _values(
    content: mmap.mmap, members: dict[str, tuple[int, int]], member: str, name: str, view: TensorView
) -> np.ndarray:
    """The tensor's values as a view of the file."""
    if member not in members:
        raise Refused(f"has no {member[-80:]!r}, the storage of tensor {name!r}")
    start, size = members[member]
    if view.length * view.dtype.itemsize > size:
        raise Refused(f"has {size} bytes in the storage of tensor {name!r}, which says {view.length} entries")
    last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    if math.prod(view.shape) == 0:
        return np.empty(view.shape, view.dtype)
    if last >= view.length or math.prod(view.shape) * view.dtype.itemsize >= 2**62:
        raise Refused(f"has tensor {name!r} of shape {list(view.shape)}, which goes beyond its storage")
    storage = np.frombuffer(content, view.dtype, view.length, start)
    strides = [step * view.dtype.itemsize for step in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, strides, writeable=False)


def _members(content: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Where each member of an uncompressed zip archive starts, and its size, by name (APPNOTE.TXT, 4.3 and 4.5.3)."""
    end = len(content) - _END.size
    if end < 0 or content[:4] != b"PK\x03\x04":
        raise Refused("is no file of torch.save: it is no zip archive")
    signature, size, offset = _END.unpack_from(content, end)
    if signature != b"PK\x05\x06":
        raise Refused("was cut short: a zip archive's directory is missing at its end")
    if content[end - _END64_PLACE.size :][:4] == b"PK\x06\x07":
        (place,) = _END64_PLACE.unpack_from(content, end - _END64_PLACE.size)
        signature, size, offset = _END64.unpack_from(content, place)
        if signature != b"PK\x06\x06":
            raise Refused("has a damaged zip directory")
    if size > _MAX_DIRECTORY or offset + size > end:
        raise Refused(f"has a zip directory of {size} bytes at byte {offset}, which is not read")
    directory, members, at = content[offset : offset + size], {}, 0
    while at < size:
        signature, flags, method, packed, unpacked, *lengths, header = _MEMBER.unpack_from(directory, at)
        name_end = at + _MEMBER.size + lengths[0]
        name = directory[at + _MEMBER.size : name_end].decode("utf-8", "backslashreplace")
        packed, unpacked, header = _wide(directory[name_end : name_end + lengths[1]], packed, unpacked, header)
        if signature != b"PK\x01\x02":
            raise Refused("has a damaged zip directory")
        if flags & 1 or method or packed != unpacked:
            raise Refused(f"has a compressed or encrypted member {name[-80:]!r}; torch.save writes neither")
        signature, *local = _LOCAL.unpack_from(content, header)
        start = header + _LOCAL.size + sum(local)
        if signature != b"PK\x03\x04" or start + unpacked > len(content):
            raise Refused(f"was cut short, or is damaged: member {name[-80:]!r} is not whole")
        members[name] = (start, unpacked)
        at += _MEMBER.size + sum(lengths)
    return members


def _wide(extra: bytes, packed: int, unpacked: int, header: int) -> tuple[int, int, int]:
    """A member's sizes and place; of those that take more than 32 bits, as its extra field has them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _WIDE:
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            unpacked, packed, header = (
                next(numbers, number) if number == _IN_EXTRA else number for number in (unpacked, packed, header)
            )
            break
        at += 4 + length
    return packed, unpacked, header
