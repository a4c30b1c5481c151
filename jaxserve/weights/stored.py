"""Tensors in the files of a checkpoint, plain or quantized, read by regions.

Files are memory-mapped. A region of a plain tensor is a view of the file, and a region of a quantized tensor is
dequantized to float32, so reading needs no memory beyond the region.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

Region = tuple[slice, ...]  # one slice(start, stop) or slice(start, stop, step) per axis

FLOATS = tuple(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
FLOAT8 = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
FLOAT8_SCALES = np.dtype(ml_dtypes.float8_e8m0fnu)  # powers of two
_GROUP = 32  # values that share a scale in MXFP4
_E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the tensor at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint that is not quantized, and base class of quantized ones.

    Attributes:
      values: the stored array under the tensor's name, a view of the mapped file.
    """

    name: str
    file: Path
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, dequantized if it is quantized."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype that `read` returns."""
        return self.values.dtype

    @property
    def is_float(self) -> bool:
        """Whether the values can be weights."""
        return self.dtype in (*FLOATS, *FLOAT8)

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.values.nbytes

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensor."""
        return (self.file,)

    def read(self, region: Region) -> np.ndarray:
        """A region of the tensor: a view of the file if the tensor is not quantized."""
        return self.values[region]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A quantized tensor, read as float32; `scales` are stored as another tensor."""

    scales: StoredTensor

    @property
    def dtype(self) -> np.dtype:
        """Dtype that `read` returns."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensor."""
        return self.file, self.scales.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Tensor(QuantizedTensor):
    """A float8 tensor whose blocks are multiplied by scales.

    Attributes:
      scales: [ceil(size / block) of each axis], or any shape with that many entries.
      block: number of entries along each axis that share a scale.
    """

    block: tuple[int, ...]

    def read(self, region: Region) -> np.ndarray:
        """The dequantized values of a region, float32."""
        bounds = [part.indices(size)[:2] for part, size in zip(region, self.shape, strict=True)]
        return self._scaled(bounds)[tuple(slice(None, None, part.step) for part in region)]

    def _scaled(self, bounds: list[tuple[int, int]]) -> np.ndarray:
        wide = _widen(self.values[tuple(slice(*each) for each in bounds)])
        pairs = list(zip(bounds, self.block, strict=True))
        blocks = tuple(slice(start // step, -(-stop // step)) for (start, stop), step in pairs)
        scales = self.scales.values.reshape(self._grid)[blocks].astype(np.float32)
        for axis, ((start, stop), step) in enumerate(pairs[1:], 1):
            if scales.shape[axis] > 1:  # a single scale is broadcast
                scales = np.take(scales, np.arange(start, stop) // step - start // step, axis)
        (start, _), step = pairs[0]
        if step == 1 or len(scales) <= 1:
            wide *= scales
            return wide
        for i, row in enumerate(scales, start // step):  # broadcast over the rows of a block instead of repeated
            wide[max(i * step - start, 0) : (i + 1) * step - start] *= row
        return wide

    @property
    def _grid(self) -> tuple[int, ...]:
        """Number of blocks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))


def block_of(values: StoredTensor, scales: StoredTensor, configured: tuple[int, ...]) -> tuple[int, ...]:
    """Number of entries along each axis that share a scale, from the shape of the scales.

    Args:
      configured: the block size in config.json; empty if there is none.

    Raises:
      CheckpointError: there is neither one scale, nor one per row, nor one per block.
    """
    shape, given = values.shape, scales.shape
    given += (1,) * (len(shape) - len(given))
    configured = (1,) * (len(shape) - len(configured)) + configured if configured else shape
    block = []
    for size, count, step in zip(shape, given, configured, strict=False):
        block.append(max(size, 1) if count == 1 else 1 if count == size else step)
    if len(given) != len(shape) or any(
        count != -(-size // step) for size, count, step in zip(shape, given, block, strict=True)
    ):
        per_block = f", or one per block of {list(configured)}" if configured != shape else ""
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}; the scales of {values.name!r} "
            f"{list(shape)} must be one, or one per row{per_block}"
        )
    return tuple(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Tensor(QuantizedTensor):
    """A tensor in MXFP4, in the layout of gpt-oss.

    A value has four bits, e2m1. A byte holds two values, the first in its low half. 32 consecutive values along the
    last stored axis share a scale of 2^(s - 127) (OCP Microscaling Formats 1.0, sections 5.2 and 5.3).

    Attributes:
      values: uint8 [..., out, in / 32, 16].
      scales: uint8 [..., out, in / 32].
    """

    def __post_init__(self) -> None:
        have, wanted = self.values.shape, (*self.scales.shape, _GROUP // 2)
        if self.values.dtype != np.uint8 or self.scales.dtype != np.uint8 or have != wanted or len(wanted) < 3:
            raise CheckpointError(
                f"{self.file}: MXFP4 tensor {self.name!r} has blocks {self.values.dtype}{list(have)} and scales "
                f"{self.scales.dtype}{list(self.scales.shape)}; both must be uint8, with {_GROUP // 2} bytes a scale"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out], as in checkpoints that are not quantized."""
        *outer, rows, groups = self.scales.shape
        return *outer, groups * _GROUP, rows

    def read(self, region: Region) -> np.ndarray:
        """The dequantized values of a region, float32, as a view with its last two axes swapped."""
        *outer, columns, rows = region
        start, stop, _ = columns.indices(self.shape[-2])
        groups = (*outer, rows, slice(start // _GROUP, -(-stop // _GROUP)))
        pairs = np.take(_PAIRS, self.values[groups], mode="clip")  # [..., out, groups, 16]
        wide = pairs.view(np.float32)
        exponents = self.scales.values[groups].view(FLOAT8_SCALES)
        wide *= exponents.astype(np.float32)[..., None]
        wide = wide.reshape(*wide.shape[:-2], wide.shape[-2] * _GROUP)
        first = start // _GROUP * _GROUP
        return wide[..., start - first : stop - first : columns.step].swapaxes(-1, -2)


def _widen(values: np.ndarray) -> np.ndarray:
    """Converts float8 to float32 by table look-up, in a quarter of the time of a cast."""
    return np.take(_WIDE[values.dtype], values.view(np.uint8), mode="clip")


_BYTES = np.arange(256, dtype=np.uint8)
_WIDE = {dtype: _BYTES.view(dtype).astype(np.float32) for dtype in FLOAT8}
_PAIRS = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=1).view(np.complex64)[:, 0]  # two float32 as one entry
