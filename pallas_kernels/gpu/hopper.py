"""Attention of prompts on Hopper (sm_90), in Pallas with Mosaic GPU.

One program serves up to 128 queries of one head: FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). One warpgroup
copies blocks of the pool to shared memory, a few tiles ahead; each of two others multiplies 64 queries with them on
tensor cores, and they take turns: one's products run beside the other's softmax. A block table names the source of each
copy. Tiles that every query sees whole are not masked.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.gpu.kernels import Context

_GROUP_QUERIES = 64  # of a warpgroup: the rows of one product
_GROUPS = 2
QUERIES = _GROUP_QUERIES * _GROUPS
_DEVICES = ("H100", "H200")  # in JAX's names of them
_LOG2_E = math.log2(math.e)


class Tiling(NamedTuple):
    """Slots of a tile, and tiles in shared memory."""

    slots: int
    stages: int


def serves(shape: AttentionShape, n_tokens: int) -> bool:
    """Whether `attend` serves prompts of a shape, in a bucket of so many tokens, on its device."""
    return (
        jax.__version_info__ >= (0, 11)
        and any(name in shape.device_kind for name in _DEVICES)
        and n_tokens >= QUERIES
        and shape.head_dim in (64, 128)
        and shape.dtype == shape.pool_dtype == jnp.bfloat16
        and shape.block_size in (8, 16, 32, 64, 128)
        and shape.windows == (None,)
        and shape.soft_cap is None
        and not shape.sinks
    )


def tiling_of(shape: AttentionShape) -> Tiling:
    return Tiling(128, 2 if shape.head_dim > 64 else 4)


def attend(
    q: jax.Array,
    context: Context,
    items: jax.Array,
    out: jax.Array,
    shape: AttentionShape,
    scale: float,
    interpret: Any = False,
) -> jax.Array:
    """`out` with the rows of the items written, in place."""
    tiling = tiling_of(shape)
    flat = (-1, shape.block_size, shape.head_dim)
    keys, values = (x.reshape(flat) for x in (context.pool.keys, context.pool.values))
    written = jax.new_ref(out)
    body = partial(_kernel, tiling=tiling, shape=shape, scale=scale)
    mesh = plgpu.Mesh(
        grid=(shape.num_heads, len(items)),
        grid_names=("head", "item"),
        num_threads=_GROUPS + 1,
        thread_name="group",
    )
    slopes = () if context.slopes is None else (context.slopes,)
    inputs = (q, keys, values, context.tables, context.first_block, items, *slopes)
    pl.kernel(
        body,
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="prompt_kernel",
    )(written, *inputs)
    return jax.freeze(written)


def _kernel(
    out: Any,
    q: Any,
    keys: Any,
    values: Any,
    tables: Any,
    first_block: Any,
    items: Any,
    *slopes: Any,
    tiling: Tiling,
    shape: AttentionShape,
    scale: float,
) -> None:
    item = lax.axis_index("item")
    start, count, last, chunk = (items[item, i] for i in range(4))
    dims, slots = shape.head_dim, tiling.slots
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = partial(plgpu.SMEM, dtype=q.dtype, transforms=swizzled)
    copies = slots // shape.block_size

    @pl.when(count > 0)
    def _attend() -> None:
        def roles(rows: Any, queries: Any, tiles: _Tiles, turn: Any) -> None:
            group = lax.axis_index("group")
            n_tiles = lax.div(last, slots) + 1

            @pl.when(group == _GROUPS)
            def _copy() -> None:
                plgpu.set_max_registers(40, action="decrease")
                _copy_tiles(keys, values, tables, first_block, chunk, last, n_tiles, tiles, tiling, shape)

            @pl.when(group < _GROUPS)
            def _compute() -> None:
                plgpu.set_max_registers(232, action="increase")
                work = _Work(start, count, last, n_tiles, group)
                _compute_queries(q, out, slopes, work, rows, queries, tiles, turn, tiling, shape, scale)

        pl.run_scoped(
            roles,
            (
                plgpu.SMEM((_GROUPS, _GROUP_QUERIES, dims), q.dtype),
                plgpu.Barrier(num_barriers=_GROUPS),
            ),
            tile((_GROUPS, _GROUP_QUERIES, dims)),
            _Tiles(
                tile((tiling.stages, slots, dims)),
                tile((tiling.stages, slots, dims)),
                plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
                plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
                plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=tiling.stages),
                plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=tiling.stages),
            ),
            plgpu.Barrier(num_arrivals=_GROUPS),
            collective_axes="group",
        )


class _Tiles(NamedTuple):
    """Tiles of keys and values in shared memory, with the barriers that say when they are full and free."""

    keys: Any
    values: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any


class _Work(NamedTuple):
    """The queries of a program, and which warpgroup this is."""

    start: jax.Array
    count: jax.Array
    last: jax.Array
    n_tiles: jax.Array
    group: jax.Array


def _copy_tiles(
    keys: Any,
    values: Any,
    tables: Any,
    first_block: Any,
    chunk: jax.Array,
    last: jax.Array,
    n_tiles: jax.Array,
    tiles: _Tiles,
    tiling: Tiling,
    shape: AttentionShape,
) -> None:
    """Copy the tiles of a context to shared memory, each block as its table entry says.

    Behind the last block, that block is copied again.
    """
    size, slots = shape.block_size, tiling.slots
    per_tile = slots // size
    kv_head = lax.div(lax.axis_index("head"), shape.group)
    last_column = lax.div(last, size)
    first = first_block[0]

    def copy(i: jax.Array, wait: bool) -> None:
        stage = lax.rem(i, tiling.stages)
        blocks = [
            (tables[chunk, jnp.minimum(i * per_tile + j, last_column)] + first) * shape.num_kv_heads + kv_head
            for j in range(per_tile)
        ]
        for pool, held, full, free in (
            (keys, tiles.keys, tiles.keys_full, tiles.keys_free),
            (values, tiles.values, tiles.values_full, tiles.values_free),
        ):
            if wait:
                plgpu.barrier_wait(free.at[stage])
            for j, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(pool.at[block], held.at[stage, pl.ds(j * size, size)], full.at[stage])

    ahead = jnp.minimum(n_tiles, tiling.stages)
    pl.loop(0, ahead)(partial(copy, wait=False))
    pl.loop(ahead, n_tiles)(partial(copy, wait=True))


def _compute_queries(
    q: Any,
    out: Any,
    slopes: tuple[Any, ...],
    work: _Work,
    rows: tuple[Any, Any],
    queries: Any,
    tiles: _Tiles,
    turn: Any,
    tiling: Tiling,
    shape: AttentionShape,
    scale: float,
) -> None:
    """Attention of a warpgroup's queries, written to their rows of `out`."""
    dims, slots, stages = shape.head_dim, tiling.slots, tiling.stages
    head = lax.axis_index("head")
    group, last = work.group, work.last
    own, own_loaded = rows[0].at[group], rows[1].at[group]
    queries = queries.at[group]
    first_token = work.start + group * _GROUP_QUERIES
    n_rows = jnp.clip(work.count - group * _GROUP_QUERIES, 0, _GROUP_QUERIES)
    first = last + 1 - work.count + group * _GROUP_QUERIES  # position of the first query
    factor = scale * _LOG2_E
    by_row, by_both = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    plgpu.copy_gmem_to_smem(q.at[pl.ds(first_token, _GROUP_QUERIES), head], own, own_loaded)
    plgpu.barrier_wait(own_loaded)
    queries[...] = plgpu.load(own, layout=by_both, optimized=False)
    plgpu.commit_smem()

    def take_turns() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    seen_tiles = jnp.where(n_rows > 0, jnp.minimum(lax.div(first + _GROUP_QUERIES - 1, slots) + 1, work.n_tiles), 0)
    whole_tiles = jnp.minimum(lax.div(first + 1, slots), seen_tiles)
    slope = slopes[0][head] * _LOG2_E if slopes else None

    def step(i: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        acc, maximum, total = carry
        stage = lax.rem(i, stages)

        def scores_of(products: Any) -> jax.Array:
            plgpu.wgmma(products, queries, tiles.keys.at[stage].transpose((1, 0)))
            take_turns()
            return products[...]

        scores = pl.run_scoped(scores_of, plgpu.ACC((_GROUP_QUERIES, slots), jnp.float32))
        plgpu.barrier_arrive(tiles.keys_free.at[stage])

        iota = partial(plgpu.broadcasted_iota, jnp.int32, (_GROUP_QUERIES, slots), layout=by_both)
        base = i * slots
        if slope is not None:
            scores = scores * factor + iota(1).astype(jnp.float32) * slope
        if masked:
            scores = jnp.where(iota(0) + (first - base) >= iota(1), scores, -jnp.inf)
        highest = jnp.max(scores, axis=1)
        offset = jnp.float32(0)
        if slope is not None:
            offset = slope * (base - last).astype(jnp.float32)
            highest += offset
        else:
            highest *= factor
        raised = jnp.maximum(maximum, highest)
        shrink = jnp.exp2(maximum - raised)
        if slope is not None:
            weights = jnp.exp2(scores - lax.broadcast_in_dim(raised - offset, scores.shape, [0]))
        else:
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(raised, scores.shape, [0]))
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        rounded = weights.astype(q.dtype)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc, raised, total, rounded = lax.optimization_barrier((acc, raised, total, rounded))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(tiles.values_full.at[stage])
        plgpu.barrier_wait(turn)
        if masked:

            @pl.when(i == work.n_tiles - 1)
            def _clear() -> None:
                _clear_tail(tiles.values.at[stage], last - base, slots)

        def add(acc: Any) -> None:
            plgpu.wgmma(acc, rounded, tiles.values.at[stage])

            @pl.when(i + 1 < seen_tiles)
            def _wait() -> None:
                plgpu.barrier_wait(tiles.keys_full.at[lax.rem(i + 1, stages)])

        acc = pl.run_state(add)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(tiles.values_free.at[stage])
        return acc, raised, total

    def skip(i: jax.Array, _: None) -> None:
        """A tile of the other warpgroup only."""
        stage = lax.rem(i, stages)
        plgpu.barrier_arrive(tiles.keys_free.at[stage])
        plgpu.barrier_arrive(tiles.values_free.at[stage])
        take_turns()
        take_turns()

    pl.when(seen_tiles > 0)(lambda: plgpu.barrier_wait(tiles.keys_full.at[0]))
    pl.when(group == 1)(take_turns)
    carry = (
        plgpu.layout_cast(jnp.zeros((_GROUP_QUERIES, dims), jnp.float32), by_both),
        plgpu.layout_cast(jnp.full((_GROUP_QUERIES,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((_GROUP_QUERIES,), jnp.float32), by_row),
    )
    carry = lax.fori_loop(0, whole_tiles, partial(step, masked=False), carry)
    acc, _, total = lax.fori_loop(whole_tiles, seen_tiles, partial(step, masked=True), carry)
    lax.fori_loop(seen_tiles, work.n_tiles, skip, None)
    pl.when(group == 0)(take_turns)

    own[...] = (acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])).astype(out.dtype)
    plgpu.commit_smem()

    @pl.when(n_rows == _GROUP_QUERIES)
    def _write() -> None:
        plgpu.copy_smem_to_gmem(own, out.at[pl.ds(first_token, _GROUP_QUERIES), head])

    @pl.when(n_rows < _GROUP_QUERIES)
    def _write_some() -> None:
        @pl.loop(0, n_rows)
        def _write_row(row: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(own.at[row], out.at[first_token + row, head])

    plgpu.wait_smem_to_gmem(0)


def _clear_tail(values: Any, last: jax.Array, slots: int) -> None:
    """Zero the slots behind the last one in use: they may hold NaN, and 0 * NaN is NaN."""
    for at in range(0, slots, _GROUP_QUERIES):
        part = values.at[pl.ds(at, _GROUP_QUERIES)]
        held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        slot = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(slot + at <= last, held, jnp.zeros_like(held))
    plgpu.commit_smem()
