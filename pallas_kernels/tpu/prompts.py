"""The Mosaic kernel that attends for chunks longer than 1, after `writes`.

Queries are taken in tiles of the flat tokens, whatever chunks they belong to, so that no copy begins inside a register.
For each tile the kernel loops over KV heads, and for each head over the chunks in the tile; at the end it picks their
rows out of the tile's result. Copies run two steps ahead of the sums, across steps, chunks, heads and tiles.

What is copied together and what is multiplied together differ in size. A step copies many slots for many queries, so
that memory does not set the pace. Its products are of `Part`s: some rows of the tile against some slots. Parts that
hold no token of the chunk, or only slots that none of its tokens sees, are left out, and those of which every token
sees every slot need no mask.

With a sliding window, a chunk's tokens in a tile begin at the first block that any of them sees, and steps, slots and
positions count from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu import costs
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut, part_of_tile, sums_by_product
from pallas_kernels.tpu.layout import (
    LANES,
    LOWEST,
    ON_CORES,
    TpuPool,
    across,
    dot,
    head_span,
    heads_of_tile,
    joint_heads,
    kept_in_memory,
    log_sum,
    operand_dtype,
    positions_of,
    result_lanes,
    round_up,
    scale_rows,
    score_factor,
    with_lanes,
)
from pallas_kernels.tpu.parts import TileParts
from pallas_kernels.tpu.prompt_steps import AHEAD, PromptScratch, PromptSteps

# Scores, biases and sinks are multiplied by this, because the chip has powers of 2 only.
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class _PromptKernel:
    """The kernel's static side; `__call__` is its body."""

    shape: AttentionShape
    scale: float
    window: int | None
    cut: Cut

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
        scratch: PromptScratch,
    ):
        shape, tile, window = self.shape, self.cut.tile, self.window
        size, local, devices, dim = shape.block_size, shape.local_slots, shape.slot_parts, shape.head_dim
        first_slot = 0 if devices == 1 else bounds[4] * local
        kv_buf, scale_buf = scratch.blocks
        q_buf, out_buf, query = scratch.queries, scratch.out, scratch.query
        maximum, total, acc = scratch.maximum, scratch.total, scratch.acc
        lanes, part, joint = head_span(shape), part_of_tile(shape, self.cut), joint_heads(shape)
        most_parts, by_product = min(self.cut.joint_parts, self.cut.tile_slots // part.slots), sums_by_product(shape)
        operand, factor = operand_dtype(shape), score_factor(self.scale, shape)
        if shape.soft_cap is None:
            factor *= LOG2_E
        n_decodes, n_tokens = bounds[0], bounds[1]
        first_tile, end_tile = lax.div(n_decodes, tile) + pl.program_id(0), lax.div(n_tokens + tile - 1, tile)
        end_tile = jnp.where(n_tokens > n_decodes, end_tile, 0)
        steps = PromptSteps(
            shape, self.cut, window, offsets, kv_lens, tables, first_block, tile_chunks, q, pool, out, scratch, end_tile
        )
        parts, span = TileParts(steps, part), steps.span

        def begin_chunk(turn, at, head, chunk):
            """Clear the lanes of other heads' queries; start the softmax, from the sinks if any."""

            def begin(i, _first, _last):
                rows = parts.rows(i)
                members = [q_buf[(lax.rem(turn, 2), *parts.member(i, m))] for m in range(part.members)]
                queries = with_lanes(jnp.concatenate(members).astype(jnp.float32), lanes)
                if dim % LANES:
                    lane = lax.broadcasted_iota(jnp.int32, queries.shape, 1) - (head * dim - steps.lane_of(head))
                    queries = jnp.where((lane >= 0) & (lane < dim), queries, 0.0)
                query[rows] = queries.astype(operand)
                if sinks is None:
                    maximum[rows] = jnp.full((part.rows, LANES), LOWEST, jnp.float32)
                    total[rows] = jnp.zeros((part.rows, LANES), jnp.float32)
                else:
                    sink = LOG2_E * parts.by_row(sinks, head, i)
                    if slopes is not None:  # the bias of all rows counts from the last token
                        before = parts.positions(at, chunk, i) - steps.part_of(at, chunk)[2]
                        sink += parts.by_row(slopes, head, i) * before.astype(jnp.float32)
                    maximum[rows] = jnp.broadcast_to(sink, (part.rows, LANES))
                    total[rows] = jnp.ones((part.rows, LANES), jnp.float32)
                acc[rows] = jnp.zeros((part.rows, lanes), jnp.float32)

            parts.each(at, chunk, begin)

        def add_step(side, at, head, chunk, step):
            """Add a step's slots to the sums of the chunk's tokens, part by part."""

            def add_slots(i, first, last):
                unseen = 0 if window is None else jnp.maximum(first - window + 1 - step * span, 0)
                seen = jnp.clip(last + 1 - step * span, 0, span)
                each = part.slots * devices  # positions

                def of_slots(j):
                    begin = step * span + j * each + first_slot

                    def is_whole(count):
                        whole = begin + count * each - size + local - 1 <= first
                        return whole if window is None else whole & (begin > last - window)

                    add = partial(add_parts, side, at, head, chunk, step, i, j, first, last)
                    together = is_whole(most_parts) & (j + most_parts <= self.cut.tile_slots // part.slots)
                    alone = jnp.logical_not(together)
                    pl.when(together)(partial(add, most_parts, masked=False))
                    if most_parts > 1:
                        pl.when(alone & is_whole(1))(partial(add, 1, masked=False))
                    pl.when(alone & jnp.logical_not(is_whole(1)))(partial(add, 1, masked=True))
                    return jnp.where(together, j + most_parts, j + 1)

                end = lax.div(seen + each - 1, each)
                lax.while_loop(lambda j: j < end, of_slots, jnp.int32(lax.div(unseen, each)))

            parts.each(at, chunk, add_slots)

        def add_parts(side, at, head, chunk, step, i, j, first, last, count, *, masked):
            """Add slots to the sums of some rows, part by part.

            The products of the next part come before the softmax of one: the compiler overlaps them.

            Args:
              first / last: positions of the first and the last token.
              masked: whether some token does not see some slot.
            """
            following = products(side, i, j)
            for n in range(count):
                scores, following = following, products(side, i, j + n + 1) if n + 1 < count else None
                add_part(side, at, head, chunk, step, i, j + n, first, last, scores, masked=masked)

        def products(side, i, j):
            """Products of a part's queries and keys: float32[rows, slots]."""
            return dot(query[parts.rows(i)], kv_buf[side, 0, parts.slots(j)].astype(operand), transposed=True)

        def add_part(side, at, head, chunk, step, i, j, first, last, scores, *, masked):
            """Add a part's slots to the sums of its rows; `scores` are the `products`."""
            rows, values = parts.rows(i), kv_buf[side, 1, parts.slots(j)]
            begin = step * span + j * part.slots * devices
            if masked:  # a slot that no token sees may hold NaN, and 0 * NaN is NaN
                slot = positions_of(lax.broadcasted_iota(jnp.int32, values.shape, 0), shape, first_slot) + begin
                seen = slot <= last
                if window is not None:
                    seen &= slot > first - window
                values = jnp.where(seen, values.astype(jnp.float32), 0.0)
            values = values.astype(operand)
            scores *= factor
            if scale_buf is not None:
                scores *= parts.scales(side, 0, head, j)
            if shape.soft_cap is not None:
                scores = shape.soft_cap * LOG2_E * jnp.tanh(scores)
            position = positions_of(lax.broadcasted_iota(jnp.int32, (1, part.slots), 1), shape, first_slot) + begin
            if slopes is not None:
                from_last = (position - steps.part_of(at, chunk)[2]).astype(jnp.float32)
                scores += parts.by_row(slopes, head, i) * from_last
            visible = None
            if masked:
                mine = parts.positions(at, chunk, i)
                visible = position <= mine
                if window is not None:
                    visible &= position > mine - window
                scores = jnp.where(visible, scores, LOWEST)
            old = maximum[rows]  # [rows, 128], as all that follows for rows
            raised = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            # A row that has seen no slot yet sums up weights of 1; `shrink` is 0 once it sees one.
            weights = jnp.exp2(scores - across(raised, part.slots))
            shrink = jnp.exp2(old - raised)
            maximum[rows] = raised
            if by_product:
                values = jnp.concatenate([values, jnp.ones((part.slots, LANES), operand)], axis=1)
            else:
                total[rows] = total[rows] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            if scale_buf is not None:
                weights *= parts.scales(side, 1, head, j)
                if visible is not None:
                    weights = jnp.where(visible, weights, 0.0)
            weighted = dot(weights.astype(operand), values)
            acc[rows] = acc[rows] * across(shrink, lanes) + weighted[:, :lanes]
            if by_product:
                total[rows] = total[rows] * shrink + weighted[:, lanes:]

        def end_chunk(turn, at, head, chunk):
            """Store the chunk's rows in the tile's result."""

            def end(i, _first, _last):
                rows, sharing, position = parts.rows(i), heads_of_tile(shape), parts.positions(at, chunk, i)
                sums = across(total[rows], lanes)
                results = acc[rows] / jnp.where(sums > 0, sums, 1.0)
                logs = log_sum(maximum[rows] / LOG2_E, total[rows]) if devices > 1 else None
                for m in range(part.members):
                    member, tokens = parts.member(i, m)
                    member += lax.rem(head, joint) * shape.group
                    line, lane = lax.div(member, sharing), lax.rem(member, sharing) * dim
                    mine = slice(m * part.tokens, (m + 1) * part.tokens)
                    result = _turn(results[mine], steps.lane_of(head) - head * dim + lane, dim)
                    result = result[:, : round_up(dim, LANES)]
                    if logs is not None:
                        result = jnp.concatenate([result, logs[mine]], axis=1)
                    stored = position[mine] >= 0
                    if sharing > 1:
                        at_lane = lax.broadcasted_iota(jnp.int32, result.shape, 1) - lane
                        stored &= (at_lane >= 0) & (at_lane < dim)
                    place = (steps.results_of(turn), line, tokens)
                    out_buf[place] = jnp.where(stored, result, out_buf[place])

            parts.each(at, chunk, end)

        def serve_step(carry):
            side, turn, here, ahead = carry
            at, head, chunk, step = here
            following = steps.after(*here)
            new_turn = (following[0] != at) | (following[1] != head)
            ahead = steps.fetch(jnp.where(side == 0, AHEAD, side - 1), *ahead)

            @pl.when((following[0] < end_tile) & new_turn)
            def _():
                steps.of_queries(1 - lax.rem(turn, 2), following[0], following[1]).start()

            first_chunk = chunk == tile_chunks[2 * at]

            @pl.when(first_chunk & (step == 0))
            def _():
                steps.of_queries(lax.rem(turn, 2), at, head).wait()

            @pl.when(first_chunk & (step == 0) & (turn >= 2 * joint) & (lax.rem(head, joint) == 0))
            def _():
                # Of the last results in this buffer, of equal size.
                steps.of_results(turn, at, head, lambda copy: copy.wait())

            @pl.when(step == 0)
            def _():
                begin_chunk(turn, at, head, chunk)

            steps.each_copy(side, at, head, chunk, step, lambda copy: copy.wait())
            add_step(side, at, head, chunk, step)

            @pl.when(following[3] == 0)
            def _():
                end_chunk(turn, at, head, chunk)

            @pl.when(new_turn & (lax.rem(head + 1, joint) == 0))
            def _():
                steps.of_results(turn, at, head, lambda copy: copy.start())

            return jnp.where(side == AHEAD, 0, side + 1), turn + new_turn.astype(jnp.int32), following, ahead

        @pl.when(first_tile < end_tile)
        def _():
            begin = (first_tile, jnp.int32(0), tile_chunks[2 * first_tile], jnp.int32(0))
            steps.of_queries(0, *begin[:2]).start()
            ahead = lax.fori_loop(0, AHEAD, lambda side, ahead: steps.fetch(side, *ahead), begin)
            carry = (jnp.int32(0), jnp.int32(0), begin, ahead)
            turns = lax.while_loop(lambda carry: carry[2][0] < end_tile, serve_step, carry)[1]
            for back in range(2):

                @pl.when(turns > back * joint)
                def _(back=back):
                    steps.of_results(turns - 1 - back * joint, first_tile, 0, lambda copy: copy.wait())


def _turn(x: jax.Array, lanes: jax.Array, head_dim: int) -> jax.Array:
    """x rotated to the right by `lanes` lanes, or to the left."""
    if head_dim % LANES == 0:
        return x
    return pltpu.roll(x, lax.rem(lanes + x.shape[1], x.shape[1]), 1)


@partial(jax.jit, static_argnames=("shape", "scale", "window", "cut", "interpret"))
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
    cut: Cut,
    interpret: Any,
) -> jax.Array:
    """Attention of the chunks after the decodes; their keys and values are in the pool.

    Args:
      q: queries, arranged as `writes.NewSlots`: the first lines of a head.
      bounds: int32[4], the first two of which are the first flat token of these chunks, and one past the last. With
        several `slot_parts`, which of them this is comes after.
      tile_chunks: int32[2 * tiles]. First and last of these chunks in each tile.
      slopes: float32[N], if shape.alibi.
      sinks: float32[N], if shape.sinks.

    Returns:
      float32[T in whole tiles, N / heads_of_tile * result_lanes]; tokens of other chunks hold arbitrary values.
    """
    size, lanes, rows = shape.local_slots, head_span(shape), shape.group * cut.tile
    tile, slots = cut.tile, cut.tile_slots
    given, sharing = result_lanes(shape), heads_of_tile(shape)
    slopes = None if slopes is None else slopes * LOG2_E
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def scratch(*sizes: int, dtype: Any = np.float32) -> Any:
        return pltpu.VMEM(sizes, dtype)

    scales = None if pool.scales is None else scratch(AHEAD + 1, slots // size, 2, scale_rows(shape), size)
    return pl.pallas_call(
        _PromptKernel(shape=shape, scale=scale, window=window, cut=cut),
        out_shape=jax.ShapeDtypeStruct((q.shape[2], shape.num_heads // sharing * given), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(chip(shape).cores,),
            in_specs=(
                *(None if values is None else pl.BlockSpec(memory_space=pltpu.SMEM) for values in (slopes, sinks)),
                anywhere,
                jax.tree.map(lambda _: anywhere, pool),
            ),
            out_specs=anywhere,
            scratch_shapes=[
                PromptScratch(
                    blocks=TpuPool(scratch(AHEAD + 1, 2, slots, lanes, dtype=shape.pool_dtype), scales),
                    queries=scratch(2, shape.group, tile, min(lanes, q.shape[3]), dtype=q.dtype),
                    out=scratch(2, joint_heads(shape) * shape.group // sharing, tile, given),
                    query=scratch(rows, lanes, dtype=operand_dtype(shape)),
                    maximum=scratch(rows, LANES),
                    total=scratch(rows, LANES),
                    acc=scratch(rows, lanes),
                    block_sems=pltpu.SemaphoreType.DMA((AHEAD + 1,)),
                    query_sems=pltpu.SemaphoreType.DMA((2,)),
                    out_sems=pltpu.SemaphoreType.DMA((2,)),
                )
            ],
        ),
        compiler_params=ON_CORES,
        cost_estimate=costs.of_prompts(shape, q.shape[2], tile, window),
        interpret=interpret,
        name="attention_prompts",
    )(bounds, offsets, kv_lens, tables, first_block, tile_chunks, slopes, sinks, q, kept_in_memory(pool, interpret))
