"""The Mosaic kernel that attends for chunks longer than 1, after `writes`.

Queries are taken in tiles of the flat tokens, whatever chunks they belong to, so that no copy begins inside a register.
For each tile the kernel loops over KV heads, and for each head over the chunks in the tile; at the end it picks their
rows out of the tile's result. Copies run one step ahead of the sums, across steps, chunks, heads and tiles.

With a sliding window, a chunk's tokens in a tile begin at the first block that any of them sees, and steps, slots and
positions count from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.cuts import cores
from pallas_kernels.tpu.layout import (
    LANES,
    LOWEST,
    TpuPool,
    dot,
    lanes_of,
    operand_dtype,
    round_up,
    scale_rows,
    score_factor,
    soft_capped,
    visited,
)


def head_span(shape: AttentionShape) -> int:
    """Lanes of the lane tiles that can hold a whole head at any start."""
    dim = shape.head_dim
    starts = range(0, shape.num_kv_heads * dim, dim)
    widest = max(round_up(start + dim, LANES) - start // LANES * LANES for start in starts)
    return min(widest, lanes_of(shape))


def out_lanes(shape: AttentionShape) -> int:
    """Lanes of one head."""
    return round_up(shape.head_dim, LANES)


class _PromptScratch(NamedTuple):
    """Scratch memory of a core: two buffers for inputs and outputs; a head's queries, softmax."""

    blocks: TpuPool  # [2, 2, slots, head_span] and [2, slots / block_size, 2, scale_rows, block_size]
    queries: Any  # [2, group, tile, out_lanes]; the results too
    out: Any
    query: Any  # [rows, head_span]
    maximum: Any  # [rows, 128], equal in all lanes; the sum too
    total: Any
    acc: Any  # [rows, head_span]
    block_sems: Any  # [2]; the others too
    query_sems: Any
    out_sems: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptKernel:
    """The kernel's static side; `__call__` is its body."""

    shape: AttentionShape
    scale: float
    window: int | None
    tile: int
    slots: int

    def __call__(
        self,
        bounds,
        offsets,
        kv_lens,
        tables,
        first_block,
        tile_chunks,
        slopes,
        sinks,
        q,
        pool: TpuPool,
        out,
        scratch: _PromptScratch,
    ):
        shape, tile, slots, window = self.shape, self.tile, self.slots, self.window
        size, dim, group = shape.block_size, shape.head_dim, shape.group
        kv_buf, scale_buf = scratch.blocks
        q_buf, out_buf, query = scratch.queries, scratch.out, scratch.query
        maximum, total, acc = scratch.maximum, scratch.total, scratch.acc
        blocks, heads, rows, lanes = slots // size, shape.num_kv_heads, group * tile, head_span(shape)
        operand, factor = operand_dtype(shape), score_factor(self.scale, shape)
        n_decodes, n_tokens = bounds[0], bounds[1]
        first_tile, end_tile = lax.div(n_decodes, tile) + pl.program_id(0), lax.div(n_tokens + tile - 1, tile)
        end_tile = jnp.where(n_tokens > n_decodes, end_tile, 0)

        def lane_of(head):
            """The first lane of the span that holds a head."""
            aligned = lax.div(head * dim, LANES) * LANES
            return pl.multiple_of(jnp.minimum(aligned, lanes_of(shape) - lanes), LANES)

        def part_of(at, chunk):
            """A chunk's tokens in a tile: (begin, end, last position from the first block seen)."""
            begin, end, last = place_of(at, chunk)
            if window is not None:
                last = visited(last + 1, window + end - begin - 1, size) - 1
            return begin, end, last

        def place_of(at, chunk):
            """Like `part_of`, with the position counted from the row's start."""
            begin = jnp.maximum(offsets[chunk] - at * tile, 0)
            end = jnp.minimum(offsets[chunk + 1], (at + 1) * tile)
            return begin, end - at * tile, kv_lens[chunk] - 1 - (offsets[chunk + 1] - end)

        def first_seen(begin, end, last):
            """The first position that is visible to the first of some tokens."""
            return last - (end - begin - 1) - window + 1

        def after(at, head, chunk, step):
            """The next step: the next blocks, chunk, head or tile."""
            more_steps = (step + 1) * slots <= part_of(at, chunk)[2]
            more_chunks = chunk < tile_chunks[2 * at + 1]
            more_heads = head + 1 < heads
            new_head = jnp.logical_not(more_steps | more_chunks)
            next_at = jnp.where(new_head & jnp.logical_not(more_heads), at + cores(shape), at)
            in_range = jnp.minimum(next_at, tile_chunks.shape[0] // 2 - 1)
            next_head = jnp.where(new_head, jnp.where(more_heads, head + 1, 0), head)
            next_chunk = jnp.where(more_steps, chunk, jnp.where(more_chunks, chunk + 1, tile_chunks[2 * in_range]))
            return next_at, next_head, next_chunk, jnp.where(more_steps, step + 1, 0)

        def block_of(at, chunk, column):
            if window is not None:
                column += lax.div(place_of(at, chunk)[2] - part_of(at, chunk)[2], size)
            return tables[chunk * shape.max_blocks + column] + first_block[0]

        def each_copy(side, at, head, chunk, step, act):
            """Call `act` with every copy that fetches the blocks of a step."""
            last = part_of(at, chunk)[2]
            for b in range(blocks):
                column = step * blocks + b

                @pl.when(column * size <= last)
                def _(b=b, column=column):
                    block = block_of(at, chunk, column)
                    source, sem = pool.kv.at[block, :, :, pl.ds(lane_of(head), lanes)], scratch.block_sems.at[side]
                    act(pltpu.make_async_copy(source, kv_buf.at[side, :, pl.ds(b * size, size)], sem))
                    if pool.scales is not None:
                        act(pltpu.make_async_copy(pool.scales.at[block], scale_buf.at[side, b], sem))

        def of_queries(side, at, head):
            place = pl.ds(pl.multiple_of(at * tile, tile), tile)
            return pltpu.make_async_copy(q.at[head, :, place], q_buf.at[side], scratch.query_sems.at[side])

        def of_results(side, at, head):
            place = pl.ds(pl.multiple_of(at * tile, tile), tile)
            return pltpu.make_async_copy(out_buf.at[side], out.at[head, :, place], scratch.out_sems.at[side])

        def begin_chunk(turn, at, head, chunk):
            """Move the head's queries to its lanes; start the softmax, from the sinks if any."""
            queries = q_buf[lax.rem(turn, 2)].astype(jnp.float32).reshape(rows, out_lanes(shape))
            if lanes > out_lanes(shape):
                queries = jnp.concatenate([queries, jnp.zeros((rows, lanes - out_lanes(shape)), jnp.float32)], axis=1)
            query[...] = _turn(queries, head * dim - lane_of(head), dim).astype(operand)
            if sinks is None:
                maximum[...] = jnp.full(maximum.shape, LOWEST, jnp.float32)
                total[...] = jnp.zeros(total.shape, jnp.float32)
            else:
                sink = self._by_row(sinks, head)
                if slopes is not None:  # the bias of all rows counts from the last token
                    before = positions(at, chunk) - part_of(at, chunk)[2]
                    sink += self._by_row(slopes, head) * before.astype(jnp.float32)
                maximum[...] = jnp.broadcast_to(sink, maximum.shape)
                total[...] = jnp.ones(total.shape, jnp.float32)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        def positions(at, chunk):
            """Position of each row's token, -1 outside the chunk: int32[rows, 1]."""
            begin, end, last = part_of(at, chunk)
            token = lax.broadcasted_iota(jnp.int32, (group, tile, 1), 1).reshape(rows, 1)
            return jnp.where((token >= begin) & (token < end), last - (end - 1 - token), -1)

        def add_step(side, at, head, chunk, step):
            begin, end, last = part_of(at, chunk)
            keys, values = kv_buf[side, 0].astype(operand), kv_buf[side, 1]
            # A slot that no token sees may hold NaN, and 0 * NaN is NaN.
            slot = lax.broadcasted_iota(jnp.int32, values.shape, 0) + step * slots
            seen = slot <= last
            if window is not None:
                seen &= slot >= first_seen(begin, end, last)
            values = jnp.where(seen, values.astype(jnp.float32), 0.0).astype(operand)
            scores = dot(query[...], keys, transposed=True) * factor  # [rows, slots]
            if scale_buf is not None:
                scores *= self._scales_of(scale_buf, side, 0, head)
            scores = soft_capped(scores, shape)
            position = lax.broadcasted_iota(jnp.int32, scores.shape, 1) + step * slots
            if slopes is not None:
                scores += self._by_row(slopes, head) * (position - last).astype(jnp.float32)
            mine = positions(at, chunk)
            visible = position <= mine
            if window is not None:
                visible &= position > mine - window
            scores = jnp.where(visible, scores, LOWEST)
            old = maximum[:, :1]
            raised = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - raised), 0.0)
            shrink = jnp.exp(old - raised)
            maximum[...] = jnp.broadcast_to(raised, maximum.shape)
            added = total[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            total[...] = jnp.broadcast_to(added, total.shape)
            if scale_buf is not None:
                weights = jnp.where(visible, weights * self._scales_of(scale_buf, side, 1, head), 0.0)
            acc[...] = acc[...] * shrink + dot(weights.astype(operand), values)

        def end_chunk(turn, at, head, chunk):
            """Store the chunk's rows in the tile's result."""
            side, sums = lax.rem(turn, 2), total[:, :1]
            result = acc[...] / jnp.where(sums > 0, sums, 1.0)
            result = _turn(result, lane_of(head) - head * dim, dim)[:, : out_lanes(shape)]
            mine = positions(at, chunk) >= 0
            out_buf[side] = jnp.where(mine, result, out_buf[side].reshape(result.shape)).reshape(out_buf.shape[1:])

        def serve_step(carry):
            side, turn, at, head, chunk, step = carry
            following = after(at, head, chunk, step)
            new_turn = (following[0] != at) | (following[1] != head)

            @pl.when(following[0] < end_tile)
            def _():
                each_copy(1 - side, *following, lambda copy: copy.start())

            @pl.when((following[0] < end_tile) & new_turn)
            def _():
                of_queries(1 - lax.rem(turn, 2), following[0], following[1]).start()

            first_chunk = chunk == tile_chunks[2 * at]

            @pl.when(first_chunk & (step == 0))
            def _():
                of_queries(lax.rem(turn, 2), at, head).wait()

            @pl.when(first_chunk & (step == 0) & (turn >= 2))
            def _():
                of_results(lax.rem(turn, 2), at, head).wait()  # of the turn before last, of equal size

            @pl.when(step == 0)
            def _():
                begin_chunk(turn, at, head, chunk)

            each_copy(side, at, head, chunk, step, lambda copy: copy.wait())
            add_step(side, at, head, chunk, step)

            @pl.when(following[3] == 0)
            def _():
                end_chunk(turn, at, head, chunk)

            @pl.when(new_turn)
            def _():
                of_results(lax.rem(turn, 2), at, head).start()

            return 1 - side, turn + new_turn.astype(jnp.int32), *following

        @pl.when(first_tile < end_tile)
        def _():
            begin = (first_tile, jnp.int32(0), tile_chunks[2 * first_tile], jnp.int32(0))
            of_queries(0, *begin[:2]).start()
            each_copy(0, *begin, lambda copy: copy.start())
            carry = (jnp.int32(0), jnp.int32(0), *begin)
            turns = lax.while_loop(lambda carry: carry[2] < end_tile, serve_step, carry)[1]
            for back in range(2):

                @pl.when(turns > back)
                def _(back=back):
                    of_results(lax.rem(turns - 1 - back, 2), first_tile, 0).wait()

    def _scales_of(self, scale_buf: Any, side: jax.Array, half: int, head: jax.Array) -> jax.Array:
        """The scales of a head's slots: float32[1, slots]."""
        blocks = self.slots // self.shape.block_size
        return jnp.concatenate([scale_buf[side, b, half, pl.ds(head, 1)] for b in range(blocks)], axis=1)

    def _by_row(self, values: Any, head: jax.Array) -> jax.Array:
        """Per-head values for a tile's rows: float32[group * tile, 1], or a scalar for one head."""
        group, tile = self.shape.group, self.tile
        if group == 1:
            return values[head]
        member = lax.broadcasted_iota(jnp.int32, (group, tile, 1), 0).reshape(group * tile, 1)
        by_row = jnp.zeros(member.shape, jnp.float32)
        for j in range(group):
            by_row = jnp.where(member == j, values[head * group + j], by_row)
        return by_row


def _turn(x: jax.Array, lanes: jax.Array, head_dim: int) -> jax.Array:
    """x rotated to the right by `lanes` lanes, or to the left."""
    if head_dim % LANES == 0:
        return x
    return pltpu.roll(x, lax.rem(lanes + x.shape[1], x.shape[1]), 1)


@partial(jax.jit, static_argnames=("shape", "scale", "window", "tile", "slots", "interpret"))
def attend(
    q: jax.Array,
    pool: TpuPool,
    bounds: jax.Array,
    offsets: jax.Array,
    kv_lens: jax.Array,
    tables: jax.Array,
    first_block: jax.Array,
    tile_chunks: jax.Array,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    *,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    tile: int,
    slots: int,
    interpret: Any,
) -> jax.Array:
    """Attention of the chunks after the decodes; their keys and values are in the pool.

    Args:
      q: [K, group, T in whole tiles, out_lanes]: queries by head, zeros past head_dim.
      bounds: int32[2]. First flat token of these chunks, and one past the last.
      tile_chunks: int32[2 * tiles]. First and last of these chunks in each tile.
      slopes: float32[N], if shape.alibi.
      sinks: float32[N], if shape.sinks.

    Returns:
      float32 of the same shape; tokens of other chunks hold arbitrary values.
    """
    size, lanes, rows = shape.block_size, head_span(shape), shape.group * tile
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def scratch(*sizes: int, dtype: Any = np.float32) -> Any:
        return pltpu.VMEM(sizes, dtype)

    scales = None if pool.scales is None else scratch(2, slots // size, 2, scale_rows(shape), size)
    return pl.pallas_call(
        _PromptKernel(shape=shape, scale=scale, window=window, tile=tile, slots=slots),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(cores(shape),),
            in_specs=(
                *(None if values is None else pl.BlockSpec(memory_space=pltpu.SMEM) for values in (slopes, sinks)),
                anywhere,
                jax.tree.map(lambda _: anywhere, pool),
            ),
            out_specs=anywhere,
            scratch_shapes=[
                _PromptScratch(
                    blocks=TpuPool(scratch(2, 2, slots, lanes, dtype=shape.pool_dtype), scales),
                    queries=scratch(2, shape.group, tile, out_lanes(shape), dtype=q.dtype),
                    out=scratch(2, shape.group, tile, out_lanes(shape)),
                    query=scratch(rows, lanes, dtype=operand_dtype(shape)),
                    maximum=scratch(rows, LANES),
                    total=scratch(rows, LANES),
                    acc=scratch(rows, lanes),
                    block_sems=pltpu.SemaphoreType.DMA((2,)),
                    query_sems=pltpu.SemaphoreType.DMA((2,)),
                    out_sems=pltpu.SemaphoreType.DMA((2,)),
                )
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="attention_prompts",
    )(bounds, offsets, kv_lens, tables, first_block, tile_chunks, slopes, sinks, q, pool)
