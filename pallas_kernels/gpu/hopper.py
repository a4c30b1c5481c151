"""Attention of prompts on Hopper (sm_90), in Pallas with Mosaic GPU.

FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608) over a pool of blocks. A program serves up to 128 queries of one
head at a time. One of its warpgroups copies blocks to shared memory, a few tiles ahead; a block table names the source
of each copy. The other two multiply 64 queries each on tensor cores, and they take turns: one's products run beside the
other's softmax. Tiles that every query sees whole are not masked. There are as many programs as processors, and each
goes on to its next queries, whose keys are copied meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.gpu.kernels import Context

_OWN = 64  # queries of a warpgroup: the rows of one product
_GROUPS = 2
QUERIES = _OWN * _GROUPS
_DEVICES = ("H100", "H200")  # in JAX's names of them
_PROCESSORS = 132
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
    return Tiling(128, 2)


def attend(
    q: jax.Array,
    context: Context,
    items: jax.Array,
    out: jax.Array,
    shape: AttentionShape,
    scale: float,
    interpret: Any = False,
) -> jax.Array:
    """`out` with the rows of the items written, in place; `scale` must be positive.

    Args:
      items: as `GpuMetadata.prompts`, up to `QUERIES` queries each; the longest contexts first, and those without
        queries last.
    """
    flat = (-1, shape.block_size, shape.head_dim)
    keys, values = (x.reshape(flat) for x in (context.pool.keys, context.pool.values))
    written = jax.new_ref(out)
    mesh = plgpu.Mesh(
        grid=(min(_PROCESSORS, shape.num_heads * len(items)),),
        grid_names=("program",),
        num_threads=_GROUPS + 1,
        thread_name="group",
    )
    inputs = (q, keys, values, context.tables, context.first_block, items)
    slopes = () if context.slopes is None else (context.slopes,)
    pl.kernel(
        partial(_kernel, tiling=tiling_of(shape), shape=shape, factor=scale * _LOG2_E),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        name="prompt_kernel",
    )(written, *inputs, *slopes)
    return jax.freeze(written)


class _Tiles(NamedTuple):
    """Tiles of keys and values in shared memory, with the barriers that say when they are full and free."""

    keys: Any
    values: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any


class _Rows(NamedTuple):
    """Queries and outputs of the warpgroups in shared memory."""

    loaded: Any  # as copied: row after row
    arrived: Any  # barrier of that copy
    queries: Any  # as tensor cores read them
    outputs: Any


class _Item(NamedTuple):
    """Queries that a program serves together."""

    head: jax.Array
    start: jax.Array  # first flat token
    count: jax.Array  # 0: this program has no more
    last: jax.Array  # position of the last
    chunk: jax.Array


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
    factor: float,
) -> None:
    def roles(tiles: _Tiles, rows: _Rows, turn: Any) -> None:
        group = lax.axis_index("group")

        @pl.when(group == _GROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(40, action="decrease")
            copy = partial(_copy_tiles, keys, values, tables, first_block, tiles, tiling, shape)
            _over_items(items, shape, jnp.int32(0), lambda item, _, at: copy(item, at))

        @pl.when(group < _GROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            own = _Rows(*(x.at[group] for x in rows))
            for stage in range(tiling.stages):
                plgpu.barrier_arrive(tiles.keys_free.at[stage])
                plgpu.barrier_arrive(tiles.values_free.at[stage])
            pl.when(group == 1)(lambda: _take_turns(turn))
            slope = slopes[0] if slopes else None
            compute = partial(_compute_queries, group, out, slope, own, tiles, turn, tiling, shape, factor)

            def load(item: _Item) -> None:
                first = item.start + group * _OWN
                plgpu.copy_gmem_to_smem(q.at[pl.ds(first, _OWN), item.head], own.loaded, own.arrived)

            foremost = _item(items, jnp.int32(0), shape)
            pl.when(foremost.count > 0)(lambda: load(foremost))
            _over_items(items, shape, jnp.int32(0), partial(compute, load))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(group == 0)(lambda: _take_turns(turn))

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((tiling.stages, tiling.slots, shape.head_dim), q.dtype, transforms=swizzled)
    own = (_GROUPS, _OWN, shape.head_dim)
    full = plgpu.Barrier(num_arrivals=tiling.slots // shape.block_size, num_barriers=tiling.stages)
    free = plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=tiling.stages)
    pl.run_scoped(
        roles,
        _Tiles(tile, tile, full, full, free, free),
        _Rows(
            loaded=plgpu.SMEM(own, q.dtype),
            arrived=plgpu.Barrier(num_barriers=_GROUPS),
            queries=plgpu.SMEM(own, q.dtype, transforms=swizzled),
            outputs=plgpu.SMEM(own, q.dtype),
        ),
        plgpu.Barrier(num_arrivals=_GROUPS),
        collective_axes="group",
    )


def _item(items: Any, index: jax.Array, shape: AttentionShape) -> _Item:
    """A program's item of an index.

    Programs take turns at picking the longest that is left, in one order and then the other.
    """
    programs, program = lax.axis_size("program"), lax.axis_index("program")
    turn = jnp.where(lax.rem(index, 2) == 0, program, programs - 1 - program)
    task = index * programs + turn
    row = lax.div(task, shape.num_heads)
    there = row < items.shape[0]
    row = jnp.minimum(row, items.shape[0] - 1)
    start, count, last, chunk = (items[row, i] for i in range(4))
    return _Item(lax.rem(task, shape.num_heads), start, jnp.where(there, count, 0), last, chunk)


def _over_items(
    items: Any, shape: AttentionShape, at: jax.Array, body: Callable[[_Item, _Item, jax.Array], jax.Array]
) -> None:
    """Run at = body(item, next item, at) for each item of this program."""

    def step(carry: tuple[jax.Array, _Item, jax.Array]) -> tuple[jax.Array, _Item, jax.Array]:
        index, item, at = carry
        after = _item(items, index + 1, shape)
        return index + 1, after, body(item, after, at)

    lax.while_loop(lambda carry: carry[1].count > 0, step, (jnp.int32(0), _item(items, jnp.int32(0), shape), at))


def _take_turns(turn: Any) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _copy_tiles(
    keys: Any,
    values: Any,
    tables: Any,
    first_block: Any,
    tiles: _Tiles,
    tiling: Tiling,
    shape: AttentionShape,
    item: _Item,
    at: jax.Array,
) -> jax.Array:
    """Copy the tiles of an item's context to shared memory, each block as its table entry says.

    Behind the last block, that block is copied again.

    Args:
      at: tiles copied before, by all items.

    Returns: tiles copied now.
    """
    size = shape.block_size
    per_tile = tiling.slots // size
    kv_head = lax.div(item.head, shape.group)
    last_column = lax.div(item.last, size)
    first = first_block[0]
    n_tiles = lax.div(item.last, tiling.slots) + 1

    @pl.loop(0, n_tiles)
    def _copy(i: jax.Array) -> None:
        stage = lax.rem(at + i, tiling.stages)
        blocks = [
            (tables[item.chunk, jnp.minimum(i * per_tile + j, last_column)] + first) * shape.num_kv_heads + kv_head
            for j in range(per_tile)
        ]
        for pool, held, full, free in (
            (keys, tiles.keys, tiles.keys_full, tiles.keys_free),
            (values, tiles.values, tiles.values_full, tiles.values_free),
        ):
            plgpu.barrier_wait(free.at[stage])
            for j, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(pool.at[block], held.at[stage, pl.ds(j * size, size)], full.at[stage])

    return at + n_tiles


def _compute_queries(
    group: jax.Array,
    out: Any,
    slopes: Any,
    own: _Rows,
    tiles: _Tiles,
    turn: Any,
    tiling: Tiling,
    shape: AttentionShape,
    factor: float,
    load: Callable[[_Item], None],
    item: _Item,
    after: _Item,
    at: jax.Array,
) -> jax.Array:
    """Attention of a warpgroup's part of an item, written to its rows of `out`.

    Args:
      load: starts the copy of an item's queries.
      at: tiles copied before this item's.

    Returns: tiles copied with this item's.
    """
    slots, stages = tiling
    by_both, by_row, by_column = (plgpu.Layout.WGMMA, *map(plgpu.Layout.WGMMA.reduce, (1, 0)))
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout) for n, layout in ((_OWN, by_row), (slots, by_column))
    )
    first = item.last + 1 - item.count + group * _OWN  # position of the first query
    if slopes is None:
        slope, biases = jnp.float32(0), plgpu.layout_cast(jnp.zeros((_OWN, slots), jnp.float32), by_both)
    else:
        slope = slopes[item.head] * _LOG2_E
        biases = lax.broadcast_in_dim(columns.astype(jnp.float32) * (slope / factor), (_OWN, slots), [1])

    plgpu.barrier_wait(own.arrived)
    own.queries[...] = plgpu.load(own.loaded, layout=by_both, optimized=False)
    plgpu.commit_smem()
    pl.when(after.count > 0)(lambda: load(after))

    n_tiles = lax.div(item.last, slots) + 1
    # A warpgroup without queries computes a tile for nobody.
    seen_tiles = jnp.clip(lax.div(first + _OWN - 1, slots) + 1, 1, n_tiles)
    whole_tiles = jnp.minimum(lax.div(first + 1, slots), seen_tiles)

    def stage_of(i: jax.Array) -> jax.Array:
        return lax.rem(at + i, stages)

    def step(i: jax.Array, carry: tuple[jax.Array, ...], masked: bool = False) -> tuple[jax.Array, ...]:
        acc, maximum, total = carry
        stage = stage_of(i)

        def multiply_keys(scores: Any) -> None:
            plgpu.wgmma(scores, own.queries, tiles.keys.at[stage].transpose((1, 0)))
            _take_turns(turn)

        scores = pl.run_state(multiply_keys)(plgpu.ACC.init(biases))
        plgpu.barrier_arrive(tiles.keys_free.at[stage])
        base = i * slots
        if masked:
            positions, slot = (lax.broadcast_in_dim(x, scores.shape, [n]) for n, x in enumerate((rows + (first - base), columns)))
            scores = jnp.where(slot <= positions, scores, -jnp.inf)
        # A tile's biases count from its first slot; the maxima, from the item's last query.
        offset = slope * (base - item.last).astype(jnp.float32)
        raised = jnp.maximum(maximum, jnp.max(scores, axis=1) * factor + offset)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(raised - offset, scores.shape, [0]))
        shrink = jnp.exp2(maximum - raised)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        rounded = weights.astype(out.dtype)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc, raised, total, rounded = lax.optimization_barrier((acc, raised, total, rounded))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(tiles.values_full.at[stage])
        plgpu.barrier_wait(turn)
        if masked:
            unused = (i == n_tiles - 1) & (item.last - base < slots - 1)
            pl.when(unused)(lambda: _clear_tail(tiles.values.at[stage], item.last - base, slots))

        def multiply_values(acc: Any) -> None:
            plgpu.wgmma(acc, rounded, tiles.values.at[stage])
            pl.when(i + 1 < seen_tiles)(lambda: plgpu.barrier_wait(tiles.keys_full.at[stage_of(i + 1)]))

        acc = pl.run_state(multiply_values)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(tiles.values_free.at[stage])
        return acc, raised, total

    def skip(i: jax.Array, _: None) -> None:
        """A tile of the other warpgroup only."""
        stage = stage_of(i)
        plgpu.barrier_wait(tiles.keys_full.at[stage])
        plgpu.barrier_arrive(tiles.keys_free.at[stage])
        _take_turns(turn)
        plgpu.barrier_wait(tiles.values_full.at[stage])
        plgpu.barrier_arrive(tiles.values_free.at[stage])
        _take_turns(turn)

    plgpu.barrier_wait(tiles.keys_full.at[stage_of(jnp.int32(0))])
    carry = (
        plgpu.layout_cast(jnp.zeros((_OWN, shape.head_dim), jnp.float32), by_both),
        plgpu.layout_cast(jnp.full((_OWN,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((_OWN,), jnp.float32), by_row),
    )
    carry = lax.fori_loop(0, whole_tiles, step, carry)
    acc, _, total = lax.fori_loop(whole_tiles, seen_tiles, partial(step, masked=True), carry)
    lax.fori_loop(seen_tiles, n_tiles, skip, None)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # outputs of the item before
    own.outputs[...] = (acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])).astype(out.dtype)
    plgpu.commit_smem()
    _write(own.outputs, out, item.start + group * _OWN, item.count - group * _OWN, item.head)
    return at + n_tiles


def _write(outputs: Any, out: Any, first: jax.Array, count: jax.Array, head: jax.Array) -> None:
    """Start the copies of a warpgroup's outputs, of `count` queries at most."""

    @pl.when(count >= _OWN)
    def _all() -> None:
        plgpu.copy_smem_to_gmem(outputs, out.at[pl.ds(first, _OWN), head])

    @pl.when(count < _OWN)
    def _some() -> None:
        @pl.loop(0, jnp.maximum(count, 0))
        def _row(row: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(outputs.at[row], out.at[first + row, head])


def _clear_tail(values: Any, last: jax.Array, slots: int) -> None:
    """Zero the slots behind the last one in use: they may hold NaN, and 0 * NaN is NaN."""
    for at in range(0, slots, _OWN):
        part = values.at[pl.ds(at, _OWN)]
        held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        slot = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(slot + at <= last, held, jnp.zeros_like(held))
    plgpu.commit_smem()
