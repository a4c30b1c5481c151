"""Attention of prompts on Hopper (sm_90), in Pallas with Mosaic GPU.

FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608) over a pool of blocks. A program serves up to 128 queries of one
head at a time. One of its warpgroups copies blocks to shared memory, a tile ahead; a block table names the source of
each copy. The other two multiply 64 queries each on tensor cores, and they take turns: one's products run beside the
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
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.gpu.layout import Context

plgpu: Any = mosaic_gpu  # jax 0.10 has not all of it
_DEVICES = ("H100", "H200")  # in JAX's names of them
_PROCESSORS = 132
# Attention of smaller buckets takes microseconds of a step.
_LEAST_TOKENS = 512
_GROUPS = 2  # warpgroups that multiply
_OWN = 64  # queries of each: the rows of one product
QUERIES = _OWN * _GROUPS
_SLOTS, _STAGES = 128, 2  # of a tile, and tiles in shared memory
# Registers of a thread that copies and of one that multiplies. Three warpgroups are launched with 168 a thread, and if
# these came to more they would wait for each other's for ever.
_FEW, _MANY = 40, 232
_LOG2_E = math.log2(math.e)


def serves(shape: AttentionShape, n_tokens: int) -> bool:
    """Whether `attend` serves the prompts of a shape and a bucket on its device."""
    return (
        jax.__version_info__ >= (0, 11)
        and any(name in shape.device_kind for name in _DEVICES)
        and n_tokens >= _LEAST_TOKENS
        and shape.head_dim in (64, 128)
        and shape.dtype == shape.pool_dtype == jnp.bfloat16
        and shape.block_size in (8, 16, 32, 64, 128)
        and shape.windows == (None,)
        and shape.soft_cap is None
        and not shape.sinks
    )


def attend(
    q: jax.Array,
    context: Context,
    items: jax.Array,
    out: jax.Array,
    shape: AttentionShape,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """`out` with the rows of the items written, in place; `scale` must be positive.

    Args:
      items: as `GpuMetadata.prompts`, of up to `QUERIES` queries: the longest contexts first, and items without queries
        last.
    """
    flat = (-1, shape.block_size, shape.head_dim)
    keys, values = (x.reshape(flat) for x in (context.pool.keys, context.pool.values))
    mesh = plgpu.Mesh(
        grid=(min(_PROCESSORS, shape.num_heads * len(items)),),
        grid_names=("program",),
        num_threads=_GROUPS + 1,
        thread_name="group",
    )
    kernel = pl.kernel(
        partial(_kernel, shape=shape, factor=scale * _LOG2_E, interpret=interpret),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        name="prompt_kernel",
    )
    refs = _Refs(jax.new_ref(out), q, keys, values, context.tables, context.first_block, items, context.slopes)
    kernel(refs)
    return jax.freeze(refs.out)


class _Refs(NamedTuple):
    """Arrays in global memory; keys and values are [blocks times KV heads, block_size, D]."""

    out: Any
    q: Any
    keys: Any
    values: Any
    tables: Any
    first_block: Any
    items: Any
    slopes: Any


class _Tiles(NamedTuple):
    """Tiles of keys and values in shared memory, and the barriers for full and free ones."""

    keys: Any
    values: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any


class _Rows(NamedTuple):
    """Queries and outputs of warpgroups in shared memory."""

    loaded: Any  # as copied: row after row
    arrived: Any  # barrier of that copy
    queries: Any  # as tensor cores read them
    outputs: Any


class _Item(NamedTuple):
    """Queries of one head that a program serves together."""

    head: jax.Array
    start: jax.Array  # first flat token
    n_queries: jax.Array  # 0: this program has no more
    last: jax.Array  # position of the last
    chunk: jax.Array

    @property
    def n_tiles(self) -> jax.Array:
        return lax.div(self.last, _SLOTS) + 1


def _kernel(refs: _Refs, *, shape: AttentionShape, factor: float, interpret: bool) -> None:
    def roles(tiles: _Tiles, rows: _Rows, turn: Any) -> None:
        group = lax.axis_index("group")

        @pl.when(group == _GROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(_FEW, action="decrease")
            _over_items(refs.items, shape, lambda item, _, before: _copy_tiles(refs, tiles, shape, item, before))
            for stage in range(_STAGES):
                plgpu.barrier_wait(tiles.keys_free.at[stage])
                plgpu.barrier_wait(tiles.values_free.at[stage])

        @pl.when(group < _GROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(_MANY, action="increase")
            own = _Rows(*(x.at[group] for x in rows))
            for stage in range(_STAGES):
                plgpu.barrier_arrive(tiles.keys_free.at[stage])
                plgpu.barrier_arrive(tiles.values_free.at[stage])
            pl.when(group == 1)(lambda: _take_turns(turn))
            first_item = _item(refs.items, jnp.int32(0), shape)
            pl.when(first_item.n_queries > 0)(lambda: _load_queries(refs.q, own, group, first_item))

            def compute(item: _Item, after: _Item, before: jax.Array) -> None:
                slope = None if refs.slopes is None else refs.slopes[item.head] * _LOG2_E
                plgpu.barrier_wait(own.arrived)
                own.queries[...] = plgpu.load(own.loaded, layout=plgpu.Layout.WGMMA, optimized=False)
                plgpu.commit_smem()
                pl.when(after.n_queries > 0)(lambda: _load_queries(refs.q, own, group, after))
                first = item.last + 1 - item.n_queries + group * _OWN  # position of the first query
                result = _attention(item, first, before, slope, own.queries, tiles, turn, factor, interpret)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # outputs of the item before
                own.outputs[...] = result.astype(own.outputs.dtype)
                plgpu.commit_smem()
                _write(own.outputs, refs.out, group, item)

            _over_items(refs.items, shape, compute)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(group == 0)(lambda: _take_turns(turn))

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    own = (_GROUPS, _OWN, shape.head_dim)
    tile = plgpu.SMEM((_STAGES, _SLOTS, shape.head_dim), shape.dtype, transforms=swizzled)
    full = plgpu.Barrier(num_arrivals=_SLOTS // shape.block_size, num_barriers=_STAGES)
    free = plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=_STAGES)
    pl.run_scoped(
        roles,
        _Tiles(tile, tile, full, full, free, free),
        _Rows(
            loaded=plgpu.SMEM(own, shape.dtype),
            arrived=plgpu.Barrier(num_barriers=_GROUPS),
            queries=plgpu.SMEM(own, shape.dtype, transforms=swizzled),
            outputs=plgpu.SMEM(own, shape.dtype),
        ),
        plgpu.Barrier(num_arrivals=_GROUPS),
        collective_axes="group",
    )


# Work of a program.


def _item(items: Any, index: jax.Array, shape: AttentionShape) -> _Item:
    """A program's item of an index.

    Programs pick the longest that is left, in one order and then the other.
    """
    programs, program = lax.axis_size("program"), lax.axis_index("program")
    task = index * programs + jnp.where(lax.rem(index, 2) == 0, program, programs - 1 - program)
    row = lax.div(task, shape.num_heads)
    there = row < items.shape[0]
    row = jnp.minimum(row, items.shape[0] - 1)
    start, count, last, chunk = (items[row, i] for i in range(4))
    return _Item(lax.rem(task, shape.num_heads), start, jnp.where(there, count, 0), last, chunk)


def _over_items(items: Any, shape: AttentionShape, body: Callable[[_Item, _Item, jax.Array], None]) -> None:
    """Run body(item, the next item, tiles before it) for each item of this program."""

    def step(carry: tuple[jax.Array, _Item, jax.Array]) -> tuple[jax.Array, _Item, jax.Array]:
        index, item, before = carry
        after = _item(items, index + 1, shape)
        body(item, after, before)
        return index + 1, after, before + item.n_tiles

    none = jnp.int32(0)
    lax.while_loop(lambda carry: carry[1].n_queries > 0, step, (none, _item(items, none, shape), none))


# Copies.


def _copy_tiles(refs: _Refs, tiles: _Tiles, shape: AttentionShape, item: _Item, before: jax.Array) -> None:
    """Copies the tiles of an item's context to shared memory, the last block once more."""
    size = shape.block_size
    per_tile = _SLOTS // size
    kv_head, last_column = lax.div(item.head, shape.group), lax.div(item.last, size)
    first = refs.first_block[0]

    @pl.loop(0, item.n_tiles)
    def _copy(i: jax.Array) -> None:
        stage = lax.rem(before + i, _STAGES)
        columns = [jnp.minimum(i * per_tile + j, last_column) for j in range(per_tile)]
        blocks = [(refs.tables[item.chunk, column] + first) * shape.num_kv_heads + kv_head for column in columns]
        for pool, held, full, free in (
            (refs.keys, tiles.keys, tiles.keys_full, tiles.keys_free),
            (refs.values, tiles.values, tiles.values_full, tiles.values_free),
        ):
            plgpu.barrier_wait(free.at[stage])
            for j, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(pool.at[block], held.at[stage, pl.ds(j * size, size)], full.at[stage])


def _load_queries(q: Any, own: _Rows, group: jax.Array, item: _Item) -> None:
    """Start the copy of a warpgroup's queries; rows behind the last token are zeros."""
    plgpu.copy_gmem_to_smem(q.at[pl.ds(item.start + group * _OWN, _OWN), item.head], own.loaded, own.arrived)


def _write(outputs: Any, out: Any, group: jax.Array, item: _Item) -> None:
    """Start the copies of a warpgroup's outputs: of its queries' rows and no others."""
    first, count = item.start + group * _OWN, item.n_queries - group * _OWN

    @pl.when(count >= _OWN)
    def _all() -> None:
        plgpu.copy_smem_to_gmem(outputs, out.at[pl.ds(first, _OWN), item.head])

    @pl.when(count < _OWN)
    def _some() -> None:
        @pl.loop(0, jnp.maximum(count, 0))
        def _row(row: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(outputs.at[row], out.at[first + row, item.head])


# Attending.


def _take_turns(turn: Any) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _attention(
    item: _Item,
    first: jax.Array,
    before: jax.Array,
    slope: jax.Array | None,
    queries: Any,
    tiles: _Tiles,
    turn: Any,
    factor: float,
    interpret: bool,
) -> jax.Array:
    """Attention of a warpgroup's queries, the first at position `first`: float32[queries, D].

    Args:
      before: tiles copied before this item's.
    """
    both, by_row, by_column = (plgpu.Layout.WGMMA, *map(plgpu.Layout.WGMMA.reduce, (1, 0)))
    rows = plgpu.broadcasted_iota(jnp.int32, (_OWN,), 0, layout=by_row)
    columns = plgpu.broadcasted_iota(jnp.int32, (_SLOTS,), 0, layout=by_column)
    # Scores start as what biases them, so that adding it takes no step.
    if slope is None:
        slope = jnp.zeros((), jnp.float32)
        biases = plgpu.layout_cast(jnp.zeros((_OWN, _SLOTS), jnp.float32), both)
    else:
        biases = lax.broadcast_in_dim(columns.astype(jnp.float32) * (slope / factor), (_OWN, _SLOTS), [1])
    product = partial(_product, interpret=interpret)
    # A warpgroup without queries computes a tile for nobody.
    seen_tiles = jnp.clip(lax.div(first + _OWN - 1, _SLOTS) + 1, 1, item.n_tiles)
    whole_tiles = jnp.minimum(lax.div(first + 1, _SLOTS), seen_tiles)

    def stage_of(i: jax.Array) -> jax.Array:
        return lax.rem(before + i, _STAGES)

    def step(i: jax.Array, carry: tuple[jax.Array, ...], masked: bool = False) -> tuple[jax.Array, ...]:
        acc, maximum, total = carry
        stage, base = stage_of(i), i * _SLOTS
        scores = product(biases, queries, tiles.keys.at[stage], lambda: _take_turns(turn), transposed=True)
        plgpu.barrier_arrive(tiles.keys_free.at[stage])
        if masked:
            positions = lax.broadcast_in_dim(rows + (first - base), scores.shape, [0])
            scores = jnp.where(lax.broadcast_in_dim(columns, scores.shape, [1]) <= positions, scores, -jnp.inf)
        # A tile's biases count from its first slot; the maxima, from the item's last query.
        offset = slope * (base - item.last).astype(jnp.float32)
        raised = jnp.maximum(maximum, jnp.max(scores, axis=1) * factor + offset)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(raised - offset, scores.shape, [0]))
        shrink = jnp.exp2(maximum - raised)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink + jnp.sum(weights, axis=1)
        acc, raised, total, rounded = lax.optimization_barrier((acc, raised, total, weights.astype(queries.dtype)))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(tiles.values_full.at[stage])
        plgpu.barrier_wait(turn)
        if masked:
            unused = (i == item.n_tiles - 1) & (item.last - base < _SLOTS - 1)
            pl.when(unused)(lambda: _clear_tail(tiles.values.at[stage], item.last - base))

        def wait_for_keys() -> None:
            pl.when(i + 1 < seen_tiles)(lambda: plgpu.barrier_wait(tiles.keys_full.at[stage_of(i + 1)]))

        acc = product(acc, rounded, tiles.values.at[stage], wait_for_keys)
        plgpu.barrier_arrive(tiles.values_free.at[stage])
        return acc, raised, total

    def skip(i: jax.Array, _: None) -> None:
        """A tile of the other warpgroup only."""
        stage = stage_of(i)
        for full, free in ((tiles.keys_full, tiles.keys_free), (tiles.values_full, tiles.values_free)):
            plgpu.barrier_wait(full.at[stage])
            plgpu.barrier_arrive(free.at[stage])
            _take_turns(turn)

    plgpu.barrier_wait(tiles.keys_full.at[stage_of(jnp.int32(0))])
    carry = (
        plgpu.layout_cast(jnp.zeros(queries.shape, jnp.float32), both),
        plgpu.layout_cast(jnp.full((_OWN,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((_OWN,), jnp.float32), by_row),
    )
    carry = lax.fori_loop(0, whole_tiles, step, carry)
    acc, _, total = lax.fori_loop(whole_tiles, seen_tiles, partial(step, masked=True), carry)
    lax.fori_loop(seen_tiles, item.n_tiles, skip, None)
    return acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])


def _product(
    start: jax.Array, a: Any, b: Any, meanwhile: Callable[[], None], *, transposed: bool = False, interpret: bool
) -> jax.Array:
    """start + a @ b (or b.T); `meanwhile` runs beside the tensor cores."""
    if interpret:  # the interpreter's products start at zero, and take no operands in registers
        meanwhile()
        a, b = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
        return start + a @ (b.T if transposed else b)

    def multiply(sums: Any) -> None:
        plgpu.wgmma(sums, a, b.transpose((1, 0)) if transposed else b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(start))


def _clear_tail(values: Any, last: jax.Array) -> None:
    """Zero the slots behind the last one in use: they may hold NaN, and 0 * NaN is NaN."""
    for at in range(0, _SLOTS, _OWN):
        part = values.at[pl.ds(at, _OWN)]
        held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        slot = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(slot + at <= last, held, jnp.zeros_like(held))
    plgpu.commit_smem()
