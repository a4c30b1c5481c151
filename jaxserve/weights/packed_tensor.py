"""Small integers packed in 32-bit words, as in GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxserve.weights.stored import FLOATS, CheckpointError, QuantizedTensor, Region, StoredTensor

_WORD = 32  # bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A layout of packed integers.

    Attributes:
      parts: last parts of the names of a matrix's words, scales, zero points and groups.
      bits: of an integer.
      group: consecutive inputs that share a scale and a zero point; -1 for all.
      is_transposed: whether words and scales have the inputs before the outputs.
      axis: of the words along which integers are packed. Zero points are packed along the outputs.
      order: the entries in a word, lowest bits first.
      has_zeros: whether each matrix has zero points; otherwise it may have none.
      zero: what is added to stored zero points.
    """

    parts: tuple[str, str, str, str]
    bits: int
    group: int
    is_transposed: bool
    axis: int
    order: tuple[int, ...]
    has_zeros: bool = True
    zero: int = 0

    def unpack(self, words: np.ndarray, axis: int, bounds: list[tuple[int, int]]) -> np.ndarray:
        """Integers as float32, between bounds: integers along `axis`, words along the other."""
        per_word = _WORD // self.bits
        start, stop = bounds[axis]
        cut = [slice(*each) for each in bounds]
        cut[axis] = slice(start // per_word, -(-stop // per_word))
        found = np.moveaxis(words[tuple(cut)], axis, -1).view(np.uint32)[..., None]
        shifts = self.bits * np.argsort(self.order).astype(np.uint32)
        entries = (found >> shifts) & np.uint32((1 << self.bits) - 1)
        entries = entries.reshape(*found.shape[:-2], found.shape[-2] * per_word)
        first = start // per_word * per_word
        return np.moveaxis(entries[..., start - first : stop - first], -1, axis).astype(np.float32)


GPTQ_PARTS = ("qweight", "scales", "qzeros", "g_idx")
COMPRESSED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
IN_ORDER = {bits: tuple(range(_WORD // bits)) for bits in (2, 4, 8)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(QuantizedTensor):
    """A matrix [out, in] of scale x (integer - zero point) (GPTQ, arXiv:2210.17323).

    Attributes:
      values: int32 words; `packing` has their layout.
      scales: float, [groups, out] where the words have the inputs first, otherwise [out, groups].
      zeros: zero points, packed along the outputs; None where they are in the middle of the range.
      groups: int32 [in], the group of each input; None where groups are of consecutive inputs.
    """

    packing: Packing
    zeros: StoredTensor | None
    groups: StoredTensor | None

    def __post_init__(self) -> None:
        outputs, inputs = self.shape if self.values.ndim == 2 else (0, 0)
        count = -(-inputs // self._group) if self.groups is None else self._count
        shape = (count, outputs) if self.packing.is_transposed else (outputs, count)
        packed = [*shape]
        packed[int(self.packing.is_transposed)] = -(-outputs * self.packing.bits // _WORD)
        for tensor, dtypes, wanted in (
            (self, (np.dtype(np.int32),), self.values.shape if inputs else ("out", "in")),
            (self.scales, FLOATS, shape),
            (self.zeros, (np.dtype(np.int32),), tuple(packed)),
            (self.groups, (np.dtype(np.int64), np.dtype(np.int32)), (inputs,)),
        ):
            if tensor is not None and (tensor.values.dtype not in dtypes or tensor.values.shape != wanted):
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name!r} has {tensor.values.dtype}{list(tensor.values.shape)}; a matrix of "
                    f"{self.packing.bits}-bit integers for {self.name!r} needs {dtypes[-1]}{list(wanted)} here"
                )
        if self.groups is not None and not 0 <= self.groups.values.min() <= self.groups.values.max() < count:
            raise CheckpointError(f"{self.groups.file}: {self.groups.name!r} names groups outside 0 to {count - 1}")

    @property
    def shape(self) -> tuple[int, ...]:
        """(outputs, inputs)."""
        size = list(self.values.shape)
        size[self.packing.axis] *= _WORD // self.packing.bits
        return tuple(reversed(size)) if self.packing.is_transposed else tuple(size)

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.values.nbytes + sum(each.nbytes for each in self._others)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensor."""
        return self.file, *(each.file for each in self._others)

    def read(self, region: Region) -> np.ndarray:
        """The dequantized values of a region, float32."""
        rows, columns = (part.indices(size)[:2] for part, size in zip(region, self.shape, strict=True))
        group = np.arange(*columns) // self._group if self.groups is None else self.groups.values[slice(*columns)]
        wide = self._oriented(self.packing.unpack(self.values, self.packing.axis, self._stored_order(rows, columns)))
        wide -= self.zeros_of(rows)[:, group] + self._middle
        wide *= self.scales_of(rows)[:, group]
        return wide[tuple(slice(None, None, part.step) for part in region)]

    def scales_of(self, rows: tuple[int, int]) -> np.ndarray:
        """float32[rows, groups]."""
        every = self._stored_order(rows, (0, self._count))
        return self._oriented(self.scales.values[tuple(slice(*each) for each in every)]).astype(np.float32)

    def zeros_of(self, rows: tuple[int, int]) -> np.ndarray:
        """float32[rows, groups], of integers that are signed: 0 is the middle of the range."""
        if self.zeros is None:
            return np.zeros((rows[1] - rows[0], self._count), np.float32)
        every = self._stored_order(rows, (0, self._count))
        found = self.packing.unpack(self.zeros.values, int(self.packing.is_transposed), every)
        return self._oriented(found) + (self.packing.zero - self._middle)

    def has_groups_of(self, size: int | None) -> bool:
        """Whether a scale belongs to each `size` consecutive inputs."""
        inputs = self.shape[1]
        in_order = self.groups is None or np.array_equal(self.groups.values, np.arange(inputs) // self._group)
        whole = size == min(self._group, inputs) and inputs % self._group == 0
        return self.packing.bits == 4 and in_order and whole

    def of_groups(self) -> tuple[StoredTensor, StoredTensor]:
        """The scales and the signed zero points as tensors [out, groups]."""
        sizes = (self.shape[0], self._count)
        make = partial(_OfGroups, name=self.name, file=self.file, values=self.values, sizes=sizes)
        return make(read_rows=self.scales_of), make(read_rows=self.zeros_of)

    @property
    def _others(self) -> list[StoredTensor]:
        return [each for each in (self.scales, self.zeros, self.groups) if each is not None]

    @property
    def _middle(self) -> int:
        """The integer in the middle of the range."""
        return 1 << (self.packing.bits - 1)

    @property
    def _group(self) -> int:
        """Consecutive inputs that share a scale."""
        return self.packing.group if self.packing.group > 0 else max(self.shape[1], 1)

    @property
    def _count(self) -> int:
        """Number of groups."""
        shape = self.scales.values.shape
        return shape[0 if self.packing.is_transposed else -1] if shape else 0

    def _stored_order(self, rows: tuple[int, int], columns: tuple[int, int]) -> list[tuple[int, int]]:
        return [columns, rows] if self.packing.is_transposed else [rows, columns]

    def _oriented(self, stored: np.ndarray) -> np.ndarray:
        return stored.T if self.packing.is_transposed else stored


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfGroups(StoredTensor):
    """One number for each row and group of a matrix."""

    sizes: tuple[int, ...]
    read_rows: Callable[[tuple[int, int]], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return 0  # they are counted with the integers

    def read(self, region: Region) -> np.ndarray:
        rows, columns = region
        return self.read_rows((rows.start, rows.stop))[:, columns]
