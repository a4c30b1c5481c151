"""The Pallas kernels of the GPU backend.

A program of a grid is one call of a kernel; refs are whole arrays.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.api import AttentionShape

_WRITTEN_AT_ONCE = 4096  # numbers of a tile that a program writes
LEAST_DOT = 16  # rows, columns and depth of a product
_LOWEST = -1e30  # replaces minus infinity where a difference of two of them must not be NaN
_LOG2_E = math.log2(math.e)


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


class PartialSums(NamedTuple):
    """Softmax over parts of contexts, [items, parts, ...].

    Sums of weighted values, the scores' maximum (to base 2) and the sum of the weights.
    """

    acc: Any  # float32[items, parts, N, D]
    maximum: Any  # float32[items, parts, N]
    total: Any  # likewise


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
    """Whether operands of products are float32 (`exact_products`)."""
    return shape.dtype == np.float32 or shape.pool_dtype == np.float32


def exact_products(interpret: bool) -> Any:
    """The precision of products of float32 operands.

    Tensor cores add up three products of TF32 numbers, which have 11 bits: an operand is the sum of two of them. The
    interpreter runs on a CPU, which multiplies float32.
    """
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


# Writing.


def write_kernel(
    stored: GpuPool, slots: Any, first_block: Any, _: GpuPool, pool: GpuPool, out: Any, *, shape: AttentionShape
):
    """Write one token's keys and values; for padding, write zeros into its output."""
    token = pl.program_id(0)
    block, slot = slots[token, 0], slots[token, 1]
    dims = jnp.arange(width(shape))
    most = max(_WRITTEN_AT_ONCE // len(dims), 1)

    def runs(heads: int) -> list[jax.Array]:
        size = min(power_of_two(heads), most)
        return [first + jnp.arange(size) for first in range(0, heads, size)]

    @pl.when(block >= 0)
    def _write() -> None:
        place = block + first_block[0]
        for heads in runs(shape.num_kv_heads):
            grid, inside = _grid(heads, dims, shape.num_kv_heads, shape.head_dim)
            for new, held in ((stored.keys, pool.keys), (stored.values, pool.values)):
                value = plgpu.load(new.at[token, *grid], mask=inside)
                plgpu.store(held.at[place, grid[0], slot, grid[1]], value, mask=inside)
            if pool.key_scales is not None:
                for new, held in ((stored.key_scales, pool.key_scales), (stored.value_scales, pool.value_scales)):
                    some = heads < shape.num_kv_heads
                    plgpu.store(held.at[place, heads, slot], plgpu.load(new.at[token, heads], mask=some), mask=some)

    @pl.when(block < 0)
    def _clear() -> None:
        for heads in runs(shape.num_heads):
            grid, inside = _grid(heads, dims, shape.num_heads, shape.head_dim)
            plgpu.store(out.at[token, *grid], jnp.zeros(inside.shape, out.dtype), mask=inside)


def _grid(
    rows: jax.Array, columns: jax.Array, n_rows: jax.Array | int, n_columns: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Indices of rows times columns, and which of them are among the first n_rows and n_columns."""
    some = n_columns < len(columns)
    rows, columns = jnp.broadcast_arrays(rows[:, None], columns[None, :])
    inside = rows < n_rows
    return (rows, columns), inside & (columns < n_columns) if some else inside


# Attending.


class _Part(NamedTuple):
    """The part of one program: queries start to start + n_queries, over some context tiles."""

    start: jax.Array
    n_queries: jax.Array
    last: jax.Array  # position of the last query
    chunk: jax.Array
    first_tile: jax.Array
    end_tile: jax.Array
    end: jax.Array  # position behind the last slot of these tiles that a query sees
    n_tiles: jax.Array  # of all parts together
    first_seen: jax.Array | None  # with a window, the first position that any of the queries sees


def _part(
    items: Any,
    item: jax.Array,
    which: jax.Array | int,
    n_parts: jax.Array | int,
    slots: int,
    window: int | None,
) -> _Part:
    start, count, last, chunk = (items[item, i] for i in range(4))
    end = tiles = lax.div(last, slots) + 1
    first_seen = None
    if window is not None:
        first_seen = jnp.maximum(last - count - window + 2, 0)
        tiles = end - lax.div(first_seen, slots)
    each = lax.div(tiles + (n_parts - 1), n_parts)
    first = which * each
    if window is not None:
        first += end - tiles
    end = jnp.where(count > 0, jnp.minimum(first + each, end), 0)
    return _Part(start, count, last, chunk, first, end, jnp.minimum(last + 1, end * slots), tiles, first_seen)


class _Tile(NamedTuple):
    """Keys and values of some slots of a context, with what masks and biases need.

    Where it is masked, slots that no query sees are zeros: they may hold NaN, and 0 * NaN is NaN.
    """

    position: jax.Array  # int32[slots]
    seen: jax.Array | None  # bool[slots]: by any query; None where all are seen by all
    keys: jax.Array  # [slots, D]
    values: jax.Array  # likewise
    key_scales: jax.Array | None  # float32[slots]
    value_scales: jax.Array | None  # likewise


def _blocks(i: jax.Array, part: _Part, context: Context, slots: int, shape: AttentionShape) -> jax.Array:
    """Blocks of tile i's slots, int32[slots]; a scalar where a tile lies in one block."""
    if shape.block_size % slots == 0:
        column = lax.div(jnp.minimum(i * slots, part.last), shape.block_size)
        return context.tables[part.chunk, column] + context.first_block[0]
    position = i * slots + jnp.arange(slots)
    seen = position < part.end
    if part.first_seen is not None:
        seen &= position >= part.first_seen
    column = jnp.where(seen, lax.div(position, shape.block_size), 0)
    return plgpu.load(context.tables.at[part.chunk, column]) + context.first_block[0]


def _tile(
    i: jax.Array,
    block: jax.Array,
    part: _Part,
    head: jax.Array,
    context: Context,
    slots: int,
    shape: AttentionShape,
    *,
    masked: bool = True,
) -> _Tile:
    """Tile i, which lies in `block` (`_blocks`)."""
    pool = context.pool
    position = i * slots + jnp.arange(slots)
    if block.ndim:
        slot = lax.rem(position, shape.block_size)
    else:
        slot = lax.rem(i * slots, shape.block_size) + jnp.arange(slots)
        block = jnp.broadcast_to(block, slot.shape)
    dims = jnp.broadcast_to(jnp.arange(width(shape))[None, :], (slots, width(shape)))
    inside = dims < shape.head_dim if shape.head_dim < width(shape) else None
    seen = None
    if masked:
        seen = position < part.end
        if part.first_seen is not None:
            seen &= position >= part.first_seen
        each = jnp.broadcast_to(seen[:, None], dims.shape)
        inside = each if inside is None else inside & each
    blocks, places = (jnp.broadcast_to(x[:, None], dims.shape) for x in (block, slot))

    def load(ref: Any, mask: jax.Array | None) -> jax.Array:
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0)

    keys, values = (load(x.at[blocks, head, places, dims], inside) for x in (pool.keys, pool.values))
    key_scales, value_scales = (
        None if x is None else load(x.at[block, head, slot], seen) for x in (pool.key_scales, pool.value_scales)
    )
    return _Tile(position, seen, keys, values, key_scales, value_scales)


def _factor(scale: float, shape: AttentionShape) -> float:
    """The factor of products of queries and keys, before `_capped`."""
    return scale * _LOG2_E if shape.soft_cap is None else scale / shape.soft_cap


def _capped(scores: jax.Array, shape: AttentionShape) -> jax.Array:
    """Scores to base 2, before the bias."""
    return scores if shape.soft_cap is None else jnp.tanh(scores) * (shape.soft_cap * _LOG2_E)


def _with_sink(maximum: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(factor of the sums so far, term of the sink) when the sink is added to a softmax.

    The sums are relative to `maximum`; the results are relative to the maximum with the sink.
    """
    raised = jnp.maximum(maximum, sink * _LOG2_E)
    return jnp.exp2(maximum - raised), jnp.exp2(sink * _LOG2_E - raised)


def _empty(rows: int, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum and accumulator of an empty softmax."""
    return (
        jnp.full((rows,), _LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )


def tile_kernel(
    q: Any,
    context: Context,
    items: Any,
    _: Any,
    out: Any,
    parts: PartialSums | None,
    *,
    tiling: Tiling,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    interpret: bool,
):
    """Attention of some queries of one chunk with all heads that share a KV head."""
    item, head, which = (pl.program_id(i) for i in range(3))
    part = _part(items, item, which, pl.num_programs(2), tiling.slots, window)
    dtype, precision = (jnp.float32, exact_products(interpret)) if is_exact(shape) else (jnp.bfloat16, None)
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(part.first_tile < part.end_tile)
    def _attend() -> None:
        row = jnp.arange(tiling.rows)
        of_chunk = lax.div(row, shape.group)
        position = part.last + 1 - part.n_queries + of_chunk
        n_rows = part.n_queries * shape.group
        heads = head * shape.group + lax.rem(row, shape.group)
        (_, dims), inside = _grid(row, jnp.arange(width(shape)), n_rows, shape.head_dim)
        tokens, all_heads = (jnp.broadcast_to(x[:, None], dims.shape) for x in (part.start + of_chunk, heads))
        query = plgpu.load(q.at[tokens, all_heads, dims], mask=inside, other=0).astype(dtype)
        factor = _factor(scale, shape) if shape.soft_cap is None else 1.0  # of scores, in the exponent of a weight
        slope = None
        if context.slopes is not None:
            slope = (context.slopes[head] if shape.group == 1 else plgpu.load(context.slopes.at[heads])) * _LOG2_E

        def step(i: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [rows], [rows], [rows, D]
            block = _blocks(i, part, context, tiling.slots, shape)
            tile = _tile(i, block, part, head, context, tiling.slots, shape, masked=masked)
            scores = dot(query, tile.keys.astype(dtype), (((1,), (1,)), ((), ())))
            if tile.key_scales is not None:
                scores *= tile.key_scales[None, :]
            if shape.soft_cap is not None:
                scores = _capped(scores * _factor(scale, shape), shape)
            if slope is not None:
                away = (tile.position - part.last).astype(jnp.float32)
                steep = (slope if shape.group == 1 else slope[:, None]) / factor
                scores += steep * away[None, :]
            visible = None
            if masked:
                visible = tile.position[None, :] <= position[:, None]
                if window is not None:
                    visible &= tile.position[None, :] > position[:, None] - window
                scores = jnp.where(visible, scores, _LOWEST)
            raised = jnp.maximum(maximum, jnp.max(scores, axis=1))
            shrink = jnp.exp2((maximum - raised) * factor)
            weights = jnp.exp2(scores * factor - (raised * factor)[:, None])
            if visible is not None:
                weights = jnp.where(visible, weights, 0)
            total = total * shrink + jnp.sum(weights, axis=1)
            if tile.value_scales is not None:
                weights *= tile.value_scales[None, :]
            new = dot(weights.astype(dtype), tile.values.astype(dtype), (((1,), (0,)), ((), ())))
            return raised, total, acc * shrink[:, None] + new

        # Tiles of which every query sees every slot need no mask: those from `inner` to `outer`.
        inner, carry = part.first_tile, _empty(tiling.rows, width(shape))
        outer = jnp.clip(lax.div(part.last + 2 - part.n_queries, tiling.slots), part.first_tile, part.end_tile)
        if window is not None:
            inner = jnp.clip(lax.div(jnp.maximum(part.last - window, -1) + tiling.slots, tiling.slots), inner, outer)
            carry = lax.fori_loop(part.first_tile, inner, partial(step, masked=True), carry)
        carry = lax.fori_loop(inner, outer, partial(step, masked=False), carry)
        maximum, total, acc = lax.fori_loop(outer, part.end_tile, partial(step, masked=True), carry)
        maximum *= factor
        if parts is None:
            if context.sinks is not None:
                sink = plgpu.load(context.sinks.at[heads])
                if slope is not None:  # the bias of all rows counts from the last query
                    sink += slope / _LOG2_E * (position - part.last).astype(jnp.float32)
                share, more = _with_sink(maximum, sink)
                total, acc = total * share + more, acc * share[:, None]
            acc = acc / jnp.where(total > 0, total, 1)[:, None]
            plgpu.store(out.at[tokens, all_heads, dims], acc.astype(out.dtype), mask=inside)
        else:
            heads = head * shape.group + row  # of one query: the interpreter needs distinct indices, masked or not
            all_heads = jnp.broadcast_to(heads[:, None], dims.shape)
            plgpu.store(parts.acc.at[item, which, all_heads, dims], acc, mask=inside)
            plgpu.store(parts.maximum.at[item, which, heads], maximum, mask=row < n_rows)
            plgpu.store(parts.total.at[item, which, heads], total, mask=row < n_rows)


def combine_kernel(
    parts: PartialSums,
    sinks: Any,
    items: Any,
    _: Any,
    out: Any,
    __: None,
    *,
    tiling: Tiling,
    shape: AttentionShape,
    window: int | None,
):
    """Combine the parts of one query of one head, and the sink if there is one."""
    item, head = pl.program_id(0), pl.program_id(1)
    n_parts = parts.total.shape[1]
    part = _part(items, item, 0, n_parts, tiling.slots, window)

    @pl.when(part.n_queries > 0)
    def _combine() -> None:
        which = jnp.arange(n_parts)
        each = part.end_tile if window is None else part.end_tile - part.first_tile
        used = which * each < part.n_tiles  # the first part has as many tiles as any other
        maximum = plgpu.load(parts.maximum.at[item, which, head], mask=used, other=_LOWEST)
        total = plgpu.load(parts.total.at[item, which, head], mask=used, other=0)
        highest = jnp.max(maximum, axis=0)
        share = jnp.exp2(maximum - highest)
        dims = jnp.arange(width(shape))
        grid, inside = _grid(which, dims, n_parts, shape.head_dim)
        acc = plgpu.load(parts.acc.at[item, grid[0], head, grid[1]], mask=inside & used[:, None], other=0)
        acc, total = jnp.sum(acc * share[:, None], axis=0), jnp.sum(total * share, axis=0)
        if sinks is not None:
            share, more = _with_sink(highest, sinks[head])
            acc, total = acc * share, total * share + more
        acc = acc / total
        plgpu.store(out.at[part.start, head, dims], acc.astype(out.dtype), mask=dims < shape.head_dim)
