"""The Mosaic kernel for chunks of length 1: writes each row's token, then attends.

The rows' contexts are cut into units of equal size and visited as one sequence, row after row, `units` of them at a
time. Their blocks are fetched while the ones before are computed, so the queue of copies is as deep for many short rows
as for one long one. The units of a step are summed up separately, in chains of matmuls that the compiler interleaves,
and are then merged into their rows' running softmax in order. So a row's result does not depend on the other rows.

With a sliding window, a row begins at the first block that its query sees, and units, slots and positions count from
there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from pallas_kernels.tpu.cuts import memory_of_decodes
from pallas_kernels.tpu.decode_steps import ROWS, TOKENS, DecodeScratch, DecodeSteps, buffers
from pallas_kernels.tpu.head_groups import HeadGroup, by_row, head_groups, moved, query_lanes, rounded, scales_by_row
from pallas_kernels.tpu.layout import (
    LANES,
    LOWEST,
    ON_CORES,
    TpuPool,
    across,
    dot,
    heads_of_tile,
    kept_in_memory,
    lanes_of,
    log_sum,
    operand_dtype,
    positions_of,
    result_lanes,
    round_up,
    scale_rows,
    score_factor,
    slot_tile,
    soft_capped,
    with_lanes,
)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class _DecodeKernel:
    """The kernel's static side; `__call__` is its body."""

    shape: AttentionShape
    scale: float
    window: int | None
    units: int
    slots: int

    def __call__(
        self,
        bounds,
        kv_lens,
        tables,
        first_block,
        tokens,
        slopes,
        sinks,
        _pool: TpuPool,
        out,
        pool: TpuPool,
        scratch: DecodeScratch,
    ):
        shape, local, parts = self.shape, self.shape.local_slots, self.shape.slot_parts
        first_slot = 0 if parts == 1 else bounds[2 * chip(shape).cores + 1] * local
        kv_buf, scale_buf = scratch.blocks
        new_buf, new_scale_buf = scratch.new
        row_buf, out_buf, total, acc = scratch.rows, scratch.out, scratch.total, scratch.acc
        groups, units, group = head_groups(shape), self.units, shape.group
        for values, kept in ((slopes, scratch.slopes), (sinks, scratch.sinks)):
            for which, place in enumerate(groups if values is not None else ()):
                kept[which] = by_row(values, place, shape)
        core = pl.program_id(0)
        low, high = bounds[core], bounds[core + 1]
        slots, tile, window = self.slots, slot_tile(shape.pool_dtype), self.window
        operand, factor = operand_dtype(shape), score_factor(self.scale, shape)
        steps = DecodeSteps(
            shape, window, units, slots, low, high, first_slot, kv_lens, tables, first_block, tokens, out, pool, scratch
        )
        rings, span = buffers(units), steps.span

        def take(row, _):
            """Put the queries, key and value of a row's token in lines, with zeros past the heads."""
            copied, wide, ring = scratch.tokens, scratch.wide, steps.in_ring(row, rings)
            heads, lines, count, lanes = wide.shape
            side, own = steps.tokens_of(row)[1], pl.ds(lax.rem(row, count), 1)

            def widen(head, _):
                wide[head] = copied[side, head].astype(jnp.float32)

            def of_head(head, _):
                place = pl.ds(pl.multiple_of(head * lanes, LANES), lanes) if heads > 1 else slice(None)
                for line in range(lines):
                    token = wide[head, line, own]
                    row_buf[ring, line : line + 1, place] = token if heads > 1 else with_lanes(token, lanes_of(shape))

            pl.when((row == low) | (lax.rem(row, count) == 0))(lambda: lax.fori_loop(0, heads, widen, None))
            lax.fori_loop(0, heads, of_head, None)

        def token_of(row):
            """Queries, key and value of a row's token: float32[group + 2, lanes]."""
            return row_buf[steps.in_ring(row, rings)]

        def add_token(side, row, step, unit):
            """Put the row's token into its slot, here and in the pool; zero the values after it."""
            ring = steps.in_ring(row, rings)
            slot, own, seen = steps.held(steps.length(row) - 1 - step * span)
            first = pl.multiple_of(slot - lax.rem(slot, tile), tile)
            index = lax.broadcasted_iota(jnp.int32, (tile, kv_buf.shape[-1]), 0) + first
            token = token_of(row)
            for half in range(2):
                given = token[group + half : group + half + 1]
                if scale_buf is not None:
                    given, scales = rounded(given, shape)
                    self._add_scales(scale_buf, new_scale_buf, scales, half, side, unit, ring, slot, own)
                old = kv_buf[side, unit, half, pl.ds(first, tile)].astype(jnp.float32)
                new = jnp.where(index == own, given, old)
                if half == 1:
                    new = jnp.where(index >= seen, 0.0, new)  # unwritten slots may be NaN, and 0 * NaN is NaN
                new = new.astype(kv_buf.dtype)
                kv_buf[side, unit, half, pl.ds(first, tile)] = new
                new_buf[ring, half] = new

            def clear(i, _):
                place = pl.ds(pl.multiple_of(i * tile, tile), tile)
                kv_buf[side, unit, 1, place] = jnp.zeros((tile, kv_buf.shape[-1]), kv_buf.dtype)

            lax.fori_loop(lax.div(first, tile) + 1, slots // tile, clear, None)
            steps.of_new(row, lambda copy: copy.start())

        def clear_unseen(side, row, unit):
            """Zero the values before the window, which may be NaN."""
            unseen = steps.length(row) - window
            if parts > 1:
                unseen = jnp.clip(unseen - first_slot, 0, local)

            def clear(i, _):
                place = pl.ds(pl.multiple_of(i * tile, tile), tile)
                held = kv_buf[side, unit, 1, place]
                index = lax.broadcasted_iota(jnp.int32, held.shape, 0) + i * tile
                kept = jnp.where(index < unseen, 0.0, held.astype(jnp.float32))
                kv_buf[side, unit, 1, place] = kept.astype(held.dtype)

            lax.fori_loop(0, lax.div(jnp.maximum(unseen, 0) + tile - 1, tile), clear, None)

        def query(row, place, masks):
            """The queries of a group, one row per head (`HeadGroup`)."""
            token = token_of(row)
            lanes = slice(place.start, place.start + place.lanes)
            q = jnp.zeros((place.rows, place.lanes), jnp.float32)
            for j in range(group):
                q = jnp.where(masks[j], token[j : j + 1, lanes], q)
            return q.astype(operand)

        def scores_of(side, row, step, unit, which, mask):
            """The masked scores of one unit, [rows, slots], and which of its slots are seen."""
            place = groups[which]
            keys = kv_buf[side, unit, 0, :, pl.ds(place.start, place.lanes)].astype(operand)
            scores = dot(query(row, place, mask), keys, transposed=True) * factor
            if scale_buf is not None:
                scores *= self._scales_of_rows(scale_buf, side, unit, 0, place)
            scores = soft_capped(scores, shape)
            position = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            position = positions_of(position, shape, first_slot) + step * span
            if slopes is not None:
                ahead = (position - (steps.length(row) - 1)).astype(jnp.float32)
                scores += across(scratch.slopes[which], slots) * ahead
            seen = position < steps.length(row)
            if window is not None:
                seen &= position >= steps.length(row) - window
            return jnp.where(seen, scores, LOWEST), seen

        def weighted(side, unit, which, scores, held):
            """Maximum, sum [rows, 128] and weighted values of one unit."""
            place = groups[which]
            most = jnp.broadcast_to(jnp.max(scores, axis=1, keepdims=True), (place.rows, LANES))
            weights = jnp.where(held, jnp.exp(scores - across(most, slots)), 0.0)
            sums = jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), (place.rows, LANES))
            if scale_buf is not None:
                weights = jnp.where(held, weights * self._scales_of_rows(scale_buf, side, unit, 1, place), 0.0)
            values = kv_buf[side, unit, 1, :, pl.ds(place.start, place.lanes)].astype(operand)
            return most, sums, dot(weights.astype(operand), values)

        def merge(step, which, state, most, sums, new):
            """Merge a unit into its row's softmax; the first unit starts it, from the sinks if any."""
            maximum, total, acc = state
            began, lanes = step > 0, groups[which].lanes
            old = jnp.where(began, maximum, LOWEST if sinks is None else scratch.sinks[which])
            raised = jnp.maximum(old, most)
            kept = jnp.exp(old - raised)
            shrink, grow = jnp.where(began, kept, 0.0), jnp.exp(most - raised)
            total = jnp.where(began, total * shrink, 0.0 if sinks is None else kept) + sums * grow
            acc = jnp.where(began, acc * across(shrink, lanes), 0.0) + new * across(grow, lanes)
            return raised, total, acc

        def add_units(side, here, which, mask):
            """Sum up the units of a step, and keep the softmax of their rows as it is after each."""
            lanes, last = groups[which].lanes, units - 1
            scores = [scores_of(side, row, step, unit, which, mask) for unit, (row, step) in enumerate(here)]
            sums = [weighted(side, unit, which, *scores[unit]) for unit in range(units)]
            state = scratch.maximum[last if parts > 1 else 0, which], total[last, which], acc[last, which, :, :lanes]
            for unit, (_, step) in enumerate(here):
                state = merge(step, which, state, *sums[unit])
                total[unit, which], acc[unit, which, :, :lanes] = state[1:]
                if parts > 1 or unit == last:
                    scratch.maximum[unit if parts > 1 else 0, which] = state[0]

        def finish(row, unit, masks):
            """Store a row's result, each head's in its lanes of a tile."""
            sharing, dim = heads_of_tile(shape), shape.head_dim
            side = lax.rem(lax.div(row, ROWS), 2)
            is_row = lax.broadcasted_iota(jnp.int32, (ROWS, result_lanes(shape)), 0) == lax.rem(row, ROWS)
            steps.begin_results(row)
            for which, place in enumerate(groups):
                sums, logs = total[unit, which], None
                if parts > 1:
                    logs = log_sum(scratch.maximum[unit, which], sums)
                    sums = jnp.where(sums > 0, sums, 1.0)
                result, tiles = acc[unit, which, :, : place.lanes] / across(sums, place.lanes), {}
                for j, mask in enumerate(masks[which]):
                    mine = jnp.sum(jnp.where(mask, result, 0.0), axis=0, keepdims=True)
                    for h in range(min(place.heads, shape.num_kv_heads - place.first)):
                        tile, at = divmod((place.first + h) * group + j, sharing)
                        found = moved(mine, h * dim, at * dim, dim)
                        if logs is not None:
                            row_of_head = j * place.heads + h
                            found = jnp.concatenate([found, logs[row_of_head : row_of_head + 1]], axis=1)
                        if tile in tiles:
                            lane = lax.broadcasted_iota(jnp.int32, found.shape, 1) - at * dim
                            found = jnp.where((lane >= 0) & (lane < dim), found, tiles[tile])
                        tiles[tile] = found
                for tile, found in tiles.items():
                    place = side, slice(None), pl.ds(tile * result_lanes(shape), result_lanes(shape))
                    out_buf[place] = jnp.where(is_row, found, out_buf[place])
            steps.end_results(row)

        def iteration(i, carry):
            here, cursor = carry
            side = lax.rem(i, 2)
            following, cursor = steps.start(1 - side, *cursor)
            for unit, (row, step) in enumerate(here):
                steps.wait(side, row, step, unit)
            steps.more_tokens(here, lambda copy: copy.wait())
            lax.fori_loop(*steps.begun(here), take, None)
            if window is not None:
                for unit, (row, step) in enumerate(here):
                    pl.when((row < high) & (step == 0))(partial(clear_unseen, side, row, unit))

            def end(row, step, unit):
                pl.when(row - low >= rings)(lambda: steps.of_new(row - rings, lambda copy: copy.wait()))
                add_token(side, row, step, unit)

            steps.each_end(here, following[0], end)
            masks = [query_lanes(place, shape) for place in groups]
            for which, mask in enumerate(masks):
                add_units(side, here, which, mask)
            steps.each_end(here, following[0], lambda row, _, unit: finish(row, unit, masks))
            return following, cursor

        n_units = bounds[chip(shape).cores + 1 + core]
        pl.when(low < high)(lambda: steps.of_tokens(low).start())
        carry = steps.start(0, low, jnp.int32(0))
        pl.when(low < high)(lambda: steps.of_tokens(low).wait())
        lax.fori_loop(0, lax.div(n_units + units - 1, units), iteration, carry)
        for back in range(rings):

            @pl.when(high - low > back)
            def _(back=back):
                steps.of_new(high - 1 - back, lambda copy: copy.wait())

        steps.wait_for_results()

    def _scales_of_rows(self, scale_buf: Any, side: jax.Array, unit: int, half: int, place: HeadGroup) -> jax.Array:
        """The scales of a unit's slots for each row's head: float32[rows, slots]."""
        blocks = self.slots // self.shape.local_slots
        heads = slice(place.first, min(place.first + place.heads, scale_buf.shape[-2]))
        by_head = jnp.concatenate([scale_buf[side, unit, b, half, heads] for b in range(blocks)], axis=1)
        return scales_by_row(by_head, place, self.shape)

    def _add_scales(self, scale_buf, new_scale_buf, scales, half, side, unit, ring, slot, own) -> None:
        """Store the scales [scale_rows, 1] of a row's token, here and in the output buffer."""
        size = self.shape.local_slots
        block, inside = lax.div(slot, size), lax.rem(own, size)
        held = scale_buf[side, unit, block, half]
        index = lax.broadcasted_iota(jnp.int32, held.shape, 1)
        new = jnp.where(index == inside, scales, held)
        scale_buf[side, unit, block, half] = new
        new_scale_buf[ring, half] = new


@partial(jax.jit, static_argnames=("shape", "scale", "window", "units", "slots", "interpret"))
def attend(
    tokens: jax.Array,
    pool: TpuPool,
    bounds: jax.Array,
    kv_lens: jax.Array,
    tables: jax.Array,
    first_block: jax.Array,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    *,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    units: int,
    slots: int,
    interpret: Any,
) -> tuple[jax.Array, TpuPool]:
    """Write and attend.

    Args:
      tokens: queries, keys and values, arranged as `writes.NewSlots`; the kernel rounds to int8.
      bounds: int32[2 * cores + 1]. First row of each core, the end, and the number of units of each core. With several
        `slot_parts`, which of them this is comes after.
      kv_lens: int32[C + 1]. The last entry belongs to no row.
      tables: int32[C * max_blocks].
      slopes: float32[N], if shape.alibi.
      sinks: float32[N], if shape.sinks.

    Returns:
      (float32[cores * C in whole memory tiles, N / heads_of_tile * result_lanes], pool): for each core, its rows among
      all of them. Other cores' rows there, and those past the last decode, hold arbitrary values.
    """
    n_chunks, lanes, size, dtype = kv_lens.shape[0] - 1, lanes_of(shape), shape.local_slots, shape.pool_dtype
    cores, columns = chip(shape).cores, shape.num_heads // heads_of_tile(shape) * result_lanes(shape)
    heads, lines, n_tokens, token_lanes = tokens.shape
    together = min(n_tokens, TOKENS)
    groups = head_groups(shape)
    state, rings = (len(groups), groups[0].rows), buffers(units)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pool_specs = jax.tree.map(lambda _: anywhere, pool)

    def scratch(*sizes: int, dtype: Any = np.float32) -> Any:
        return pltpu.VMEM(sizes, dtype)

    def scales(*sizes: int) -> Any:
        return None if pool.scales is None else scratch(*sizes, 2, scale_rows(shape), size)

    by_head = tuple(None if values is None else pl.BlockSpec(memory_space=pltpu.SMEM) for values in (slopes, sinks))
    n_before = 5 + sum(values is not None for values in (slopes, sinks))  # operands before the pool
    return pl.pallas_call(
        _DecodeKernel(shape=shape, scale=scale, window=window, units=units, slots=slots),
        out_shape=(
            jax.ShapeDtypeStruct((cores * round_up(n_chunks, ROWS), columns), jnp.float32),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pool),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores,),
            in_specs=(anywhere, *by_head, pool_specs),
            out_specs=(anywhere, pool_specs),
            scratch_shapes=[
                DecodeScratch(
                    blocks=TpuPool(scratch(2, units, 2, slots, lanes, dtype=dtype), scales(2, units, slots // size)),
                    new=TpuPool(scratch(rings, 2, slot_tile(dtype), lanes, dtype=dtype), scales(rings)),
                    tokens=scratch(2, heads, lines, together, token_lanes, dtype=tokens.dtype),
                    wide=scratch(heads, lines, together, token_lanes),
                    rows=scratch(rings, lines, lanes),
                    out=scratch(2, ROWS, columns),
                    maximum=scratch(units if shape.slot_parts > 1 else 1, *state, LANES),
                    total=scratch(units, *state, LANES),
                    acc=scratch(units, *state, groups[0].lanes),
                    slopes=None if slopes is None else scratch(*state, LANES),
                    sinks=None if sinks is None else scratch(*state, LANES),
                    block_sems=pltpu.SemaphoreType.DMA((2, units)),
                    token_sems=pltpu.SemaphoreType.DMA((2,)),
                    out_sems=pltpu.SemaphoreType.DMA((2,)),
                    new_sems=pltpu.SemaphoreType.DMA((rings,)),
                )
            ],
        ),
        input_output_aliases={n_before + i: 1 + i for i in range(len(jax.tree.leaves(pool)))},
        compiler_params=replace(ON_CORES, vmem_limit_bytes=memory_of_decodes(units, slots, shape)),
        cost_estimate=costs.of_decodes(shape, n_chunks, window),
        interpret=interpret,
        name="attention_decodes",
    )(bounds, kv_lens, tables, first_block, tokens, slopes, sinks, kept_in_memory(pool, interpret))
