"""Ragged attention for GPUs, in Pallas as Triton lowers it: one file for A100 (sm_80), H100 and H200 (sm_90).

A layer is a few kernels on grids of fixed size, whose programs leave at once where there is no work for them: new keys
and values go to their slots; then every query that is computed alone (decodes) is a program for each head and part of
its context, which reads the pool once and straight into registers; longer chunks go in tiles of queries over tensor
cores (FlashAttention-2, Dao, 2023). Parts of a context are put together at the end (Flash-Decoding, Dao et al., 2023);
how many there are depends on nothing but static sizes, and where they meet on nothing but the row's own length.
Softmax is online (Milakov and Gimelshein, 2018) and to the base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from pallas_kernels import int8
from pallas_kernels.api import AttentionBatch, AttentionShape

# Numbers of a key tile that a program of a decode holds in registers, with as many values and sums.
_LANE_NUMBERS = 4096
# Programs that keep every processor reading: some eight on each of an H200's 132.
_PROGRAMS = 1024
# Slots of a part of a context at least, while there are more programs than that, and at most.
_LEAST_PART, _MOST_PART = 128, 4096
_LEAST_DOT = 16  # rows, columns and depth of a product
_LOWEST = -1e30  # stands for minus infinity where a difference of two of them must not be NaN
_BFLOAT16, _INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)
_DTYPES = (np.dtype(np.float32), _BFLOAT16)


class Pool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or the names of their axes. Scales belong to int8
    (`int8.quantize`) and are None otherwise."""

    keys: Any  # [n_blocks, K, block_size, D]
    values: Any  # likewise
    key_scales: Any = None  # float32[n_blocks, K, block_size]
    value_scales: Any = None  # likewise


class Meta(NamedTuple):
    """Attributes:
    slots: int32[T, 2] block and slot in it that each token is written to; block -1 for padding.
    decodes / prompts: int32[n, 4] queries that one program computes together: first flat token, how many (0 for
      none), position of the last, chunk.
    tables: int32[C, max_blocks].
    """

    slots: jax.Array
    decodes: jax.Array
    prompts: jax.Array | None
    tables: jax.Array


class Parts(NamedTuple):
    """Softmax over parts of contexts, [items, parts, ...]: sums of weighted values, the scores' maximum (to the base
    2) and the weights' sum."""

    acc: Any  # float32[items, parts, N, D]
    maximum: Any  # float32[items, parts, N]
    total: Any  # likewise


class Tiling(NamedTuple):
    """How a product kernel divides its work: rows (queries times heads of a group) and slots of a tile."""

    rows: int
    slots: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBackend:
    """Attributes:
    interpret: run the kernels in Pallas's interpreter, which works on a CPU.
    """

    interpret: bool = False
    name = "gpu"
    platforms = frozenset({"gpu"})

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in _DTYPES:
            return f"queries of {shape.dtype}; it serves float32 and bfloat16"
        if shape.pool_dtype not in (*_DTYPES, _INT8):
            return f"pool of {shape.pool_dtype}; it serves float32, bfloat16 and int8"
        if shape.head_dim > 256:
            return f"head_dim {shape.head_dim}; it serves up to 256"
        if shape.group > 64:
            return f"{shape.group} query heads to a key head; it serves up to 64"
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 32

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> Pool:
        block = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        if shape.pool_dtype == _INT8:
            # Offsets have 32 bits, with a sign, in arrays of up to 2**32 bytes.
            numbers = n_blocks * math.prod(block)
            if 2**31 < numbers <= 2**32:
                n_blocks = 2**32 // math.prod(block) + 1
        held = jax.ShapeDtypeStruct((n_blocks, *block), shape.pool_dtype)
        scales = jax.ShapeDtypeStruct((n_blocks, *block[:2]), np.float32) if shape.pool_dtype == _INT8 else None
        return Pool(held, held, scales, scales)

    def pool_axes(self, shape: AttentionShape) -> Pool:
        axes = (None, "heads", None, None)
        scales = axes[:3] if shape.pool_dtype == _INT8 else None
        return Pool(axes, axes, scales, scales)

    def prepare(self, batch: AttentionBatch, shape: AttentionShape) -> Meta:
        with jax.named_scope("attention_prepare"):
            n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
            in_use = jnp.arange(n_tokens) < batch.query_offsets[-1]
            column = jnp.minimum(batch.positions // shape.block_size, shape.max_blocks - 1)
            block = jnp.where(in_use, batch.block_tables[batch.token_chunk, column], -1)
            slots = jnp.stack([block, batch.positions % shape.block_size], axis=1)
            if n_tokens <= n_chunks:  # no more tiles than tokens to be saved: each token goes alone
                decodes = _items(jnp.arange(n_tokens), in_use, batch.positions, batch.token_chunk)
                return Meta(slots, decodes, None, batch.block_tables)
            single = jnp.diff(batch.query_offsets) == 1
            decodes = _items(batch.query_offsets[:-1], single, batch.kv_lens - 1, jnp.arange(n_chunks))
            return Meta(slots, decodes, _prompt_items(batch, shape), batch.block_tables)

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: Pool,
        meta: Meta,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"], Pool]:
        first = jnp.asarray(first_block, jnp.int32).reshape(1)
        if slopes is not None:
            slopes = jnp.asarray(slopes, jnp.float32)
        return _attend(q, k, v, pool, meta, first, slopes, shape, scale, self.interpret)


BACKEND = GpuBackend()


# What is to be done, as lists: once an iteration.


def _items(start: jax.Array, count: jax.Array, last: jax.Array, chunk: jax.Array) -> Int32[jax.Array, "n 4"]:
    return jnp.stack([x.astype(jnp.int32) for x in (start, count, last, chunk)], axis=1)


def _prompt_items(batch: AttentionBatch, shape: AttentionShape) -> Int32[jax.Array, "n 4"]:
    """Tiles of all chunks longer than one; later ones first, since their contexts are longer."""
    n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
    size = _prompt_tiling(shape, n_tokens).rows // shape.group
    lengths = jnp.diff(batch.query_offsets)
    ends = jnp.cumsum(jnp.where(lengths > 1, -(-lengths // size), 0), dtype=jnp.int32)
    total, most = ends[-1], n_tokens // size + min(n_chunks, n_tokens // 2)
    place = total - 1 - jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum(ends <= place[:, None], axis=1, dtype=jnp.int32), n_chunks - 1)
    after = (ends[chunk] - 1 - place) * size  # tokens of the chunk behind this tile, if the last tile were full
    full = (-(-lengths // size) * size)[chunk]
    start = batch.query_offsets[chunk] + full - size - after
    end = jnp.minimum(start + size, batch.query_offsets[chunk + 1])
    last = batch.kv_lens[chunk] - 1 - (batch.query_offsets[chunk + 1] - end)
    return _items(start, jnp.where(place >= 0, end - start, 0), last, chunk)


# Static choices.


def _power(n: int) -> int:
    """The power of two from n on."""
    return 1 << (n - 1).bit_length()


def _width(shape: AttentionShape) -> int:
    """D as tiles have it."""
    return max(_power(shape.head_dim), _LEAST_DOT)


def _is_exact(shape: AttentionShape) -> bool:
    """Whether products must be of float32: tensor cores would round its operands."""
    return shape.dtype == np.float32 or shape.pool_dtype == np.float32


def _prompt_tiling(shape: AttentionShape, n_tokens: int) -> Tiling:
    wide = _width(shape) > 128
    if _is_exact(shape):
        most, slots, warps, stages = 32 if wide else 64, 32, 4, 1
    else:
        most, slots, warps, stages = 128, 32 if wide else 64, 8, 2
    rows = min(max(most, _power(shape.group)), _power(n_tokens * shape.group))
    return Tiling(max(rows, _LEAST_DOT), slots, warps if rows > 32 else 4, stages)


def _decode_tiling(shape: AttentionShape) -> Tiling:
    """Of the queries of one token that share a key head."""
    if shape.group == 1:
        return Tiling(1, max(_LANE_NUMBERS // _width(shape), 1), 4, 1)
    rows = max(_power(shape.group), _LEAST_DOT)
    return Tiling(rows, 32 if _is_exact(shape) or _width(shape) > 128 else 64, 4, 1 if _is_exact(shape) else 3)


def _n_parts(items: int, shape: AttentionShape) -> int:
    """Into how many parts the contexts of decodes are split."""
    context = shape.max_blocks * shape.block_size
    wanted = min(_PROGRAMS // (items * shape.num_kv_heads), context // _LEAST_PART)
    return _power(max(wanted, -(-context // _MOST_PART), 1))


# A layer.


@partial(jax.jit, static_argnames=("shape", "scale", "interpret"))  # traced once for all layers of a program
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    meta: Meta,
    first_block: jax.Array,
    slopes: jax.Array | None,
    shape: AttentionShape,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, Pool]:
    call = partial(_call, interpret=interpret)
    with jax.named_scope("attention_write"):
        new_out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        inputs = (_stored(k, v, shape), meta.slots, first_block)
        pool, out = call(partial(_write_kernel, shape=shape), (len(q),), 4, 1, inputs, pool, new_out)
    with jax.named_scope("attention_attend"):
        inputs = (q, pool, meta.tables, first_block, slopes)
        statics = {"shape": shape, "scale": scale * math.log2(math.e)}

        decodes, parts = len(meta.decodes), _n_parts(len(meta.decodes), shape)
        tiling = _decode_tiling(shape)
        kernel = partial(_lanes_kernel if shape.group == 1 else _tile_kernel, tiling=tiling, **statics)
        grid = (decodes, shape.num_kv_heads, parts)
        if parts == 1:
            out, _ = call(kernel, grid, *tiling[2:], (*inputs, meta.decodes), out)
        else:
            sums = (decodes, parts, shape.num_heads)
            acc, scalar = (jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((*sums, shape.head_dim), sums))
            _, made = call(kernel, grid, *tiling[2:], (*inputs, meta.decodes), None, Parts(acc, scalar, scalar))
            kernel = partial(_combine_kernel, tiling=tiling, shape=shape)
            out, _ = call(kernel, (decodes, shape.num_heads), 4, 1, (made, meta.decodes), out)

        if meta.prompts is not None:
            tiling = _prompt_tiling(shape, len(q))
            kernel = partial(_tile_kernel, tiling=tiling, **statics)
            grid = (len(meta.prompts), shape.num_kv_heads, 1)
            out, _ = call(kernel, grid, *tiling[2:], (*inputs, meta.prompts), out)
        return out, pool


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    inputs: tuple[Any, ...],
    changed: Any = None,
    new: Any = None,
    *,
    interpret: bool,
) -> tuple[Any, Any]:
    """Runs kernel(*inputs, its own view of changed, changed, new) and returns (changed, new).

    Args:
      changed: arrays that are updated in place.
      new: shapes of arrays that start out holding anything.
    """
    before = len(jax.tree.leaves(inputs))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), changed)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(shapes, new),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(changed)))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*inputs, changed)


# Writing.


def _stored(k: jax.Array, v: jax.Array, shape: AttentionShape) -> Pool:
    """Keys and values as the pool holds them: [T, K, D], and scales [T, K]."""
    if shape.pool_dtype == _INT8:
        (keys, key_scales), (values, value_scales) = int8.quantize(k), int8.quantize(v)
        return Pool(keys, values, key_scales, value_scales)
    return Pool(k.astype(shape.pool_dtype), v.astype(shape.pool_dtype))


def _write_kernel(stored: Pool, slots: Any, first_block: Any, _: Pool, pool: Pool, out: Any, *, shape: AttentionShape):
    """One token: its keys and values, or zeros in the place of its output if it is padding."""
    token = pl.program_id(0)
    block, slot = slots[token, 0], slots[token, 1]
    dims = jnp.arange(_width(shape))
    most = max(_LANE_NUMBERS // len(dims), 1)

    def runs(heads: int) -> list[jax.Array]:
        size = min(_power(heads), most)
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
    rows, columns = jnp.broadcast_arrays(rows[:, None], columns[None, :])
    return (rows, columns), (rows < n_rows) & (columns < n_columns)


# Attending.


class _Part(NamedTuple):
    """What one program computes: queries start to start + count of a chunk, over some tiles of its context."""

    start: jax.Array
    count: jax.Array
    last: jax.Array  # position of the last query
    chunk: jax.Array
    first_tile: jax.Array
    end_tile: jax.Array


def _part(items: Any, item: jax.Array, which: jax.Array, n_parts: int, slots: int) -> _Part:
    start, count, last, chunk = (items[item, i] for i in range(4))
    tiles = lax.div(last, slots) + 1
    each = lax.div(tiles + (n_parts - 1), n_parts)
    first = which * each
    return _Part(start, count, last, chunk, first, jnp.where(count > 0, jnp.minimum(first + each, tiles), 0))


def _tile(
    i: jax.Array,
    part: _Part,
    head: jax.Array,
    pool: Pool,
    tables: Any,
    first_block: Any,
    slots: int,
    shape: AttentionShape,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Tile i of a context: (positions [slots], keys [slots, D], values, their scales [slots] or None). What lies
    behind the last query is zeros: a slot nobody wrote may hold NaN, and 0 * NaN is NaN."""
    position = i * slots + jnp.arange(slots)
    held = position <= part.last
    column = jnp.where(held, lax.div(position, shape.block_size), 0)
    block = plgpu.load(tables.at[part.chunk, column]) + first_block[0]
    slot = lax.rem(position, shape.block_size)
    (_, dims), inside = _grid(position, jnp.arange(_width(shape)), part.last + 1, shape.head_dim)
    blocks, places = (jnp.broadcast_to(x[:, None], dims.shape) for x in (block, slot))
    keys, values = (
        plgpu.load(x.at[blocks, head, places, dims], mask=inside, other=0) for x in (pool.keys, pool.values)
    )
    if pool.key_scales is None:
        return position, keys, values, None, None
    scales = (plgpu.load(x.at[block, head, slot], mask=held, other=0) for x in (pool.key_scales, pool.value_scales))
    return position, keys, values, *scales


def _lanes_kernel(
    q: Any,
    pool: Pool,
    tables: Any,
    first_block: Any,
    slopes: Any,
    items: Any,
    _: Any,
    changed: Any,
    made: Parts | None,
    *,
    tiling: Tiling,
    shape: AttentionShape,
    scale: float,
):
    """One query of one head. Each slot of a tile is a softmax of its own, over every slots-th position, so that threads
    exchange no more than their shares of a score until the end."""
    item, head, which = (pl.program_id(i) for i in range(3))
    part = _part(items, item, which, pl.num_programs(2), tiling.slots)

    @pl.when(part.first_tile < part.end_tile)
    def _attend() -> None:
        dims = jnp.arange(_width(shape))
        some = dims < shape.head_dim
        query = plgpu.load(q.at[part.start, head, dims], mask=some, other=0).astype(jnp.float32) * scale
        slope = None if slopes is None else slopes[head] * math.log2(math.e)

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [slots], [slots], [slots, D]
            position, keys, values, key_scales, value_scales = _tile(
                i, part, head, pool, tables, first_block, tiling.slots, shape
            )
            scores = jnp.sum(keys.astype(jnp.float32) * query[None, :], axis=1)
            if key_scales is not None:
                scores *= key_scales
            if slope is not None:
                scores += slope * (position - part.last).astype(jnp.float32)
            held = position <= part.last
            scores = jnp.where(held, scores, _LOWEST)
            raised = jnp.maximum(maximum, scores)
            shrink, weights = jnp.exp2(maximum - raised), jnp.where(held, jnp.exp2(scores - raised), 0)
            total = total * shrink + weights
            if value_scales is not None:
                weights *= value_scales
            return raised, total, acc * shrink[:, None] + weights[:, None] * values.astype(jnp.float32)

        empty = _empty(tiling.slots, _width(shape))
        maximum, total, acc = lax.fori_loop(part.first_tile, part.end_tile, step, empty)
        highest = jnp.max(maximum, axis=0)
        share = jnp.exp2(maximum - highest)
        total, acc = jnp.sum(total * share, axis=0), jnp.sum(acc * share[:, None], axis=0)
        if made is None:
            plgpu.store(changed.at[part.start, head, dims], (acc / total).astype(changed.dtype), mask=some)
        else:
            plgpu.store(made.acc.at[item, which, head, dims], acc, mask=some)
            made.maximum[item, which, head] = highest
            made.total[item, which, head] = total


def _empty(rows: int, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum and accumulator of a softmax over nothing."""
    return (
        jnp.full((rows,), _LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def _tile_kernel(
    q: Any,
    pool: Pool,
    tables: Any,
    first_block: Any,
    slopes: Any,
    items: Any,
    _: Any,
    changed: Any,
    made: Parts | None,
    *,
    tiling: Tiling,
    shape: AttentionShape,
    scale: float,
):
    """Some queries of one chunk with all heads that share a key head: a tile's rows."""
    item, head, which = (pl.program_id(i) for i in range(3))
    part = _part(items, item, which, pl.num_programs(2), tiling.slots)
    dtype, precision = (jnp.float32, lax.Precision.HIGHEST) if _is_exact(shape) else (jnp.bfloat16, None)
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(part.first_tile < part.end_tile)
    def _attend() -> None:
        row = jnp.arange(tiling.rows)
        of_chunk = lax.div(row, shape.group)
        position = part.last + 1 - part.count + of_chunk
        n_rows = part.count * shape.group
        heads = head * shape.group + lax.rem(row, shape.group)
        (_, dims), inside = _grid(row, jnp.arange(_width(shape)), n_rows, shape.head_dim)
        tokens, all_heads = (jnp.broadcast_to(x[:, None], dims.shape) for x in (part.start + of_chunk, heads))
        query = plgpu.load(q.at[tokens, all_heads, dims], mask=inside, other=0).astype(dtype)
        if slopes is not None:
            slope = plgpu.load(slopes.at[heads], mask=row < n_rows, other=0) * math.log2(math.e)

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [rows], [rows], [rows, D]
            key_position, keys, values, key_scales, value_scales = _tile(
                i, part, head, pool, tables, first_block, tiling.slots, shape
            )
            scores = dot(query, keys.astype(dtype), (((1,), (1,)), ((), ()))) * scale
            if key_scales is not None:
                scores *= key_scales[None, :]
            if slopes is not None:
                scores += slope[:, None] * (key_position - part.last).astype(jnp.float32)[None, :]
            visible = key_position[None, :] <= position[:, None]
            scores = jnp.where(visible, scores, _LOWEST)
            raised = jnp.maximum(maximum, jnp.max(scores, axis=1))
            shrink = jnp.exp2(maximum - raised)
            weights = jnp.where(visible, jnp.exp2(scores - raised[:, None]), 0)
            total = total * shrink + jnp.sum(weights, axis=1)
            if value_scales is not None:
                weights *= value_scales[None, :]
            new = dot(weights.astype(dtype), values.astype(dtype), (((1,), (0,)), ((), ())))
            return raised, total, acc * shrink[:, None] + new

        empty = _empty(tiling.rows, _width(shape))
        maximum, total, acc = lax.fori_loop(part.first_tile, part.end_tile, step, empty)
        if made is None:
            acc = acc / jnp.where(total > 0, total, 1)[:, None]
            plgpu.store(changed.at[tokens, all_heads, dims], acc.astype(changed.dtype), mask=inside)
        else:
            plgpu.store(made.acc.at[item, which, all_heads, dims], acc, mask=inside)
            plgpu.store(made.maximum.at[item, which, heads], maximum, mask=row < n_rows)
            plgpu.store(made.total.at[item, which, heads], total, mask=row < n_rows)


def _combine_kernel(made: Parts, items: Any, _: Any, out: Any, __: None, *, tiling: Tiling, shape: AttentionShape):
    """The parts of one query of one head."""
    item, head = pl.program_id(0), pl.program_id(1)
    n_parts = made.total.shape[1]
    part = _part(items, item, jnp.int32(0), n_parts, tiling.slots)

    @pl.when(part.count > 0)
    def _combine() -> None:
        which = jnp.arange(n_parts)
        tiles = lax.div(part.last, tiling.slots) + 1
        used = which * part.end_tile < tiles  # the first part's tiles are as many as any other's
        maximum = plgpu.load(made.maximum.at[item, which, head], mask=used, other=_LOWEST)
        total = plgpu.load(made.total.at[item, which, head], mask=used, other=0)
        share = jnp.exp2(maximum - jnp.max(maximum, axis=0))
        dims = jnp.arange(_width(shape))
        grid, inside = _grid(which, dims, n_parts, shape.head_dim)
        acc = plgpu.load(made.acc.at[item, grid[0], head, grid[1]], mask=inside & used[:, None], other=0)
        acc = jnp.sum(acc * share[:, None], axis=0) / jnp.sum(total * share, axis=0)
        plgpu.store(out.at[part.start, head, dims], acc.astype(out.dtype), mask=dims < shape.head_dim)
