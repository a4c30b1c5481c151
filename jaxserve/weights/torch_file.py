"""Reads a file of torch.save (pytorch_model.bin); tensors are views of the mapped file.

Since torch 1.6 the file is a zip archive of uncompressed members: data.pkl, and data/N for each storage.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

import numpy as np

from jaxserve.weights import torch_pickle
from jaxserve.weights.stored import CheckpointError, StoredTensor
from jaxserve.weights.torch_pickle import RefusedFile, TensorView

_OLD_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # first bytes of files of torch before 1.6
# Records of a zip archive: the signature and the fields that are read.
_END = struct.Struct("<4s8xII2x")  # size and offset of the directory, without comment
_END64_PLACE = struct.Struct("<8xQ4x")  # offset of the _END64 record
_END64 = struct.Struct("<4s36xQQ")  # size and offset of the directory
_MEMBER = struct.Struct("<4s4xHH8xIIHHH8xI")  # flags, method, sizes, lengths of name, extra field and comment, offset
_LOCAL = struct.Struct("<4s22xHH")  # lengths of name and extra field; the member's bytes follow
_MAX_DIRECTORY = 64 * 2**20  # bytes
_WIDE = 0x0001  # type of the extra field with 64-bit numbers
_IN_EXTRA = 0xFFFF_FFFF  # marks a number that is in that field


def read(file: Path, content: mmap.mmap) -> tuple[bytes, list[StoredTensor]]:
    """The pickle and the tensors of a file. Raises CheckpointError."""
    try:
        if content[: len(_OLD_MAGIC)] == _OLD_MAGIC:
            raise RefusedFile(
                "is in the format of torch before 1.6; convert it with torch: "
                f"torch.save(torch.load({file.name!r}, map_location='cpu', weights_only=True), {file.name!r})"
            )
        members = _members(content)
        pickles = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(pickles) != 1:
            raise RefusedFile("is not a file of torch.save: it has no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if (order := _bytes(content, members.get(folder + "byteorder", (0, 0)))) not in (b"", b"little"):
            raise RefusedFile(f"has numbers in byte order {order[:20]!r}; only little is read")
        start, size = members[pickles[0]]
        raw = _bytes(content, (start, min(size, torch_pickle.MAX_BYTES + 1)))
        tensors = []
        for name, view in torch_pickle.read(raw).items():
            values = _values(content, members, f"{folder}data/{view.storage}", name, view)
            tensors.append(StoredTensor(name=name, file=file, values=values))
    except RefusedFile as problem:
        raise CheckpointError(f"{file} {problem}") from None
    except (struct.error, OverflowError):
        raise CheckpointError(f"{file} is truncated, or is not a file of torch.save") from None
    return raw, tensors


def _bytes(content: mmap.mmap, place: tuple[int, int]) -> bytes:
    start, size = place
    return content[start : start + size]


def _values(
    content: mmap.mmap, members: dict[str, tuple[int, int]], member: str, name: str, view: TensorView
) -> np.ndarray:
    """The tensor's values as a view of the file."""
    if member not in members:
        raise RefusedFile(f"has no {member[-80:]!r}, the storage of tensor {name!r}")
    start, size = members[member]
    if view.length * view.dtype.itemsize > size:
        raise RefusedFile(f"has {size} bytes in the storage of tensor {name!r}, which says {view.length} entries")
    last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    if math.prod(view.shape) == 0:
        return np.empty(view.shape, view.dtype)
    if last >= view.length or math.prod(view.shape) * view.dtype.itemsize >= 2**62:
        raise RefusedFile(f"has tensor {name!r} of shape {list(view.shape)}, which goes beyond its storage")
    storage = np.frombuffer(content, view.dtype, view.length, start)
    strides = [step * view.dtype.itemsize for step in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, strides, writeable=False)


def _members(content: mmap.mmap) -> dict[str, tuple[int, int]]:
    """(start, size) of each member of a zip archive, by name (APPNOTE.TXT, 4.3 and 4.5.3)."""
    end = len(content) - _END.size
    if end < 0 or content[:4] != b"PK\x03\x04":
        raise RefusedFile("is not a file of torch.save: it is not a zip archive")
    signature, size, offset = _END.unpack_from(content, end)
    if signature != b"PK\x05\x06":
        raise RefusedFile("is truncated: a zip archive's directory is missing at its end")
    if content[end - _END64_PLACE.size :][:4] == b"PK\x06\x07":
        (place,) = _END64_PLACE.unpack_from(content, end - _END64_PLACE.size)
        signature, size, offset = _END64.unpack_from(content, place)
        if signature != b"PK\x06\x06":
            raise RefusedFile("has a damaged zip directory")
    if size > _MAX_DIRECTORY or offset + size > end:
        raise RefusedFile(f"has a zip directory of {size} bytes at byte {offset}, which is not supported")
    directory, members, at = content[offset : offset + size], {}, 0
    while at < size:
        signature, flags, method, packed, unpacked, *lengths, header = _MEMBER.unpack_from(directory, at)
        name_end = at + _MEMBER.size + lengths[0]
        name = directory[at + _MEMBER.size : name_end].decode("utf-8", "backslashreplace")
        packed, unpacked, header = _resolve_64_bit(
            directory[name_end : name_end + lengths[1]], packed, unpacked, header
        )
        if signature != b"PK\x01\x02":
            raise RefusedFile("has a damaged zip directory")
        if flags & 1 or method or packed != unpacked:
            raise RefusedFile(f"has a compressed or encrypted member {name[-80:]!r}; torch.save writes neither")
        signature, *local = _LOCAL.unpack_from(content, header)
        start = header + _LOCAL.size + sum(local)
        if signature != b"PK\x03\x04" or start + unpacked > len(content):
            raise RefusedFile(f"is truncated, or is damaged: member {name[-80:]!r} is incomplete")
        members[name] = (start, unpacked)
        at += _MEMBER.size + sum(lengths)
    return members


def _resolve_64_bit(extra: bytes, packed: int, unpacked: int, header: int) -> tuple[int, int, int]:
    """Replaces sizes and offset of a member that exceed 32 bits by those of its extra field."""
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
