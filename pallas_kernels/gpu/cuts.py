"""How work is divided: rows and slots of a kernel's tiles, and parts of contexts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.api import AttentionShape

LEAST_DOT = 16  # rows, columns and depth of a product
# Slots of a part of a context: for each pair of an item and a KV head, at least, and at most.
_DECODE_PART, _PROMPT_PART = (2, 128, 1024), (32, 512, 4096)
# Most parts of a context, and bytes of the results of all; more slots than that would be in larger parts.
_MOST_PARTS, _PARTS_MEMORY = 64, 2**26


class Tiling(NamedTuple):
    """Rows (queries times heads of a group) and slots of a tile, and how a program runs.

    A processor runs `resident` programs at once; their registers are limited to what that needs.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    resident: int


class Split(NamedTuple):
    """How contexts are split: tiles of a part, and most parts, which may be larger then."""

    part: int
    most_parts: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def width(shape: AttentionShape) -> int:
    """The width of a tile for head_dim D; an int8 pool has products of half of it."""
    return max(power_of_two(shape.head_dim), LEAST_DOT * (2 if shape.pool_dtype == np.int8 else 1))


def is_exact(shape: AttentionShape) -> bool:
    """Whether products are of float32: queries or the pool are."""
    return shape.dtype == np.float32 or shape.pool_dtype == np.float32


def prompt_tiling(shape: AttentionShape, n_tokens: int) -> Tiling:
    """The tiling for the query heads of some tokens of a chunk that share a KV head."""
    wide = width(shape)
    if is_exact(shape):  # registers hold two parts of each operand: 64 rows would not fit
        most, slots = (32, 32) if wide <= 128 else (16, 16)
    else:
        most, slots = 128 if wide <= 128 else 64, 64  # 128 of 256 would not fit on an A100
    rows = max(min(max(most, power_of_two(shape.group)), power_of_two(n_tokens * shape.group)), LEAST_DOT)
    warps = 8 if rows >= most else 4
    return Tiling(rows, slots, warps, 2, 8 // warps)


def decode_tiling(shape: AttentionShape) -> Tiling:
    """The tiling for the query heads of one token that share a KV head."""
    rows, wide = max(power_of_two(shape.group), LEAST_DOT), width(shape)
    if is_exact(shape):
        return Tiling(rows, 16 if wide > 128 else 32, 8, 2, 1)
    slots = 32 if wide > 128 else 64
    if rows > 64:
        return Tiling(rows, slots, 8, 3, 1)
    resident = 5 if wide <= 64 else 4 if wide <= 128 else 3  # with few registers spilled, or none
    return Tiling(rows, slots, 4, 3, 2 if rows > 32 else resident - (rows > LEAST_DOT))


def decode_split(items: int, shape: AttentionShape, window: int | None = None) -> Split:
    """The split of the contexts of decodes."""
    return _split(_DECODE_PART, items, items, decode_tiling(shape), shape, window)


def prompt_split(n_tokens: int, shape: AttentionShape, window: int | None = None) -> Split:
    """The split of the contexts of prompts, whose results are those of n_tokens."""
    tiling = prompt_tiling(shape, n_tokens)
    if shape.alibi and shape.sinks:  # biases of a tile count from its last query, so each query's sink differs
        return Split(1, 1)
    items = max(n_tokens * shape.group // tiling.rows, 1)
    return _split(_PROMPT_PART, items, n_tokens, tiling, shape, window)


def _split(
    part: tuple[int, int, int], items: int, queries: int, tiling: Tiling, shape: AttentionShape, window: int | None
) -> Split:
    """Small parts for few items, which leave no processor without work; larger ones for many."""
    each, least, most = part
    slots = min(max(power_of_two(each * items * shape.num_kv_heads), least), most)
    held = _PARTS_MEMORY // (4 * queries * shape.num_heads * shape.head_dim)
    return Split(slots // tiling.slots, max(min(-(-_seen(shape, window) // slots), _MOST_PARTS, held), 1))


def _seen(shape: AttentionShape, window: int | None) -> int:
    """The most slots that a query sees."""
    context = shape.max_blocks * shape.block_size
    return context if window is None else min(context, window)
