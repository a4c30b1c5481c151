"""How work is divided: rows and slots of a kernel's tiles, and parts of contexts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.api import AttentionShape

LEAST_DOT = 16  # rows, columns and depth of a product
# Enough programs to keep every processor reading: about eight on each of an H200's 132.
_PROGRAMS = 1024
# Fewest slots of a part of a context while there are more programs than that, and most slots.
_LEAST_PART, _MOST_PART = 128, 4096
# Prompts: about two programs on each processor, with parts that are worth being combined.
_PROMPT_PROGRAMS, _LEAST_PROMPT_PART = 256, 512


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


def prompt_tiling(shape: AttentionShape, n_tokens: int) -> Tiling:
    """The tiling for the query heads of some tokens of a chunk that share a KV head."""
    wide = width(shape)
    if is_exact(shape):  # registers hold two parts of each operand: 64 rows would not fit
        most, slots, warps, stages = (32, 32, 8, 2) if wide <= 128 else (16, 16, 8, 2)
    else:
        most, slots, warps, stages = 128 if wide <= 128 else 64, 64, 8, 2  # 128 of 256 would not fit on an A100
    rows = max(min(max(most, power_of_two(shape.group)), power_of_two(n_tokens * shape.group)), LEAST_DOT)
    return Tiling(rows, slots, warps if rows >= most else 4, stages)


def decode_tiling(shape: AttentionShape) -> Tiling:
    """The tiling for the query heads of one token that share a KV head."""
    rows, wide = max(power_of_two(shape.group), LEAST_DOT), width(shape) > 128
    if is_exact(shape):
        return Tiling(rows, 16 if wide else 32, 8, 2)
    return Tiling(rows, 32 if wide else 64, 4 if rows <= 64 else 8, 3)


def n_parts(items: int, shape: AttentionShape, window: int | None = None) -> int:
    """The number of parts that contexts of decodes, as far as they are visible, are split into."""
    context = _seen(shape, window)
    wanted = min(_PROGRAMS // (items * shape.num_kv_heads), context // _LEAST_PART)
    return power_of_two(max(wanted, -(-context // _MOST_PART), 1))


def n_prompt_parts(n_tokens: int, shape: AttentionShape, window: int | None = None) -> int:
    """The number of parts that contexts of prompts are split into."""
    if shape.alibi and shape.sinks:  # biases of a tile count from its last query, so each query's sink differs
        return 1
    tiles = max(n_tokens * shape.group // prompt_tiling(shape, n_tokens).rows, 1)
    wanted = min(_PROMPT_PROGRAMS // (tiles * shape.num_kv_heads), _seen(shape, window) // _LEAST_PROMPT_PART)
    return power_of_two(max(wanted, 1))


def _seen(shape: AttentionShape, window: int | None) -> int:
    """The most slots that a query sees."""
    context = shape.max_blocks * shape.block_size
    return context if window is None else min(context, window)
