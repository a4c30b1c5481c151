"""The arrays and sizes that the GPU backend's kernels share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.api import AttentionShape

LEAST_DOT = 16  # rows, columns and depth of a product


class GpuPool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or the names of their axes.

    Scales belong to int8 (`int8.quantize`) and are None otherwise.
    """

    keys: Any  # [n_blocks, K, block_size, D]
    values: Any  # likewise
    key_scales: Any = None  # float32[n_blocks, K, block_size]
    value_scales: Any = None  # likewise


class Context(NamedTuple):
    """The pool, block tables, slopes and sinks of a layer."""

    pool: GpuPool
    tables: Any  # int32[C, max_blocks]
    first_block: Any  # int32[1]
    slopes: Any  # float32[N] or None
    sinks: Any  # likewise


class Tiling(NamedTuple):
    """A kernel's division of work: rows (queries times heads of a group) and slots of a tile."""

    rows: int
    slots: int
    warps: int
    stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def width(shape: AttentionShape) -> int:
    """The width of a tile for head_dim D."""
    return max(power_of_two(shape.head_dim), LEAST_DOT)


def is_exact(shape: AttentionShape) -> bool:
    """Whether products are of float32: queries or the pool are."""
    return shape.dtype == np.float32 or shape.pool_dtype == np.float32
