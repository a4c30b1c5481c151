"""The order in which the kernels go through their work, and the copies, which run ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.layout import LANES, TpuPool, head_span, lanes_of, slot_tile, visited

# Steps whose blocks are on their way while one is computed.
AHEAD = 2


def buffers(units: int) -> int:
    """Buffers for results: at least one for each unit of a step, and a power of 2."""
    return 1 << (units - 1).bit_length()


class DecodeScratch(NamedTuple):
    """Scratch memory of a core; B is the number of `buffers`."""

    blocks: TpuPool  # [2, units, 2, slots, lanes] and [2, units, slots / block_size, 2, scale_rows, block_size]
    new: TpuPool  # [B, 2, slot_tile, lanes] and [B, 2, scale_rows, block_size]
    rows: Any  # [2 * B, ...]
    out: Any  # [B, group, lanes]
    maximum: Any  # [1, groups, rows, 128], equal in all lanes: after the last unit; of slot parts, after each
    total: Any  # [units, groups, rows, 128], equal in all lanes: after each unit
    acc: Any  # [units, groups, rows, lanes of a group]: after each unit
    slopes: Any  # [groups, rows, 128], equal in all lanes, or None; the other too
    sinks: Any
    block_sems: Any  # [2, units]
    row_sems: Any  # [2 * B]
    out_sems: Any  # [B]; the other too
    new_sems: Any


class DecodeSteps(NamedTuple):
    """The steps of a core of the kernel for chunks of length 1.

    A unit is given by its row and its number within that; a step has several of them. The core's rows are `low` up to
    `high`. The rest is the kernel's.
    """

    shape: AttentionShape
    window: int | None
    units: int
    slots: int
    low: Any
    high: Any
    first_slot: Any
    kv_lens: Any
    tables: Any
    first_block: Any
    rows: Any
    out: Any
    pool: TpuPool
    scratch: DecodeScratch

    @property
    def span(self) -> int:
        """Positions of a unit, those on other devices included."""
        return self.slots * self.shape.slot_parts

    def in_ring(self, row, n):
        """The place of a row in n buffers, a power of 2."""
        return (row - self.low) & (n - 1)

    def length(self, row):
        """Slots of a row, from the first block that is visited."""
        return visited(self.kv_lens[row], self.window, self.shape.block_size)

    def after(self, row, step):
        """The unit after this one; past the last row, the same one."""
        ends = (step + 1) * self.span >= self.length(row)
        return jnp.where(ends, jnp.minimum(row + 1, self.high), row), jnp.where(ends, 0, step + 1)

    def block_of(self, row, column):
        if self.window is not None:
            column += lax.div(self.kv_lens[row] - self.length(row), self.shape.block_size)
        return self.tables[row * self.shape.max_blocks + column] + self.first_block[0]

    def used(self, row, column):
        """Slots of a block up to the row's last, in whole memory tiles.

        Of a block that devices share, each copies its part as a whole.
        """
        size, tile = self.shape.block_size, slot_tile(self.shape.pool_dtype)
        if self.shape.slot_parts > 1:
            return self.shape.local_slots
        rest = jnp.minimum(self.length(row) - column * size, size)
        return pl.multiple_of((rest + tile - 1) & -tile, tile)

    def each_copy(self, side, row, step, unit, act):
        """Call `act` with every copy that fetches a unit."""
        size, local = self.shape.block_size, self.shape.local_slots
        kv_buf, scale_buf = self.scratch.blocks

        @pl.when((row < self.high) & (step == 0))
        def _():
            ring = self.in_ring(row, 2 * buffers(self.units))
            act(pltpu.make_async_copy(self.rows.at[row], self.scratch.rows.at[ring], self.scratch.row_sems.at[ring]))

        for b in range(self.slots // local):
            column = step * (self.slots // local) + b

            needed = (row < self.high) & (column * size < self.length(row)) if b else row < self.high  # one at least

            @pl.when(needed)
            def _(b=b, column=column):
                block, used = self.block_of(row, column), self.used(row, column)
                sem = self.scratch.block_sems.at[side, unit]
                source, place = self.pool.kv.at[block, :, pl.ds(0, used)], pl.ds(b * local, used)
                act(pltpu.make_async_copy(source, kv_buf.at[side, unit, :, place], sem))
                if self.pool.scales is not None:
                    act(pltpu.make_async_copy(self.pool.scales.at[block], scale_buf.at[side, unit, b], sem))

    def start(self, side, row, step):
        """Start the copies of a step; returns its units and the one after them."""
        started = []
        for unit in range(self.units):
            self.each_copy(side, row, step, unit, lambda copy: copy.start())
            started.append((row, step))
            row, step = self.after(row, step)
        return started, (row, step)

    def held(self, position):
        """A position's slot here, or one of its block; that or -1; and the slots up to the position."""
        if self.shape.slot_parts == 1:
            return position, position, position + 1
        size, local = self.shape.block_size, self.shape.local_slots
        column, offset = lax.div(position, size) * local, lax.rem(position, size) - self.first_slot
        slot = column + jnp.clip(offset, 0, local - 1)
        own = jnp.where((offset >= 0) & (offset < local), slot, -1)
        return slot, own, column + jnp.clip(offset + 1, 0, local)

    def of_ring(self, row, act):
        """Call `act` with every copy that stores a row's results."""
        ring = self.in_ring(row, buffers(self.units))
        act(pltpu.make_async_copy(self.scratch.out.at[ring], self.out.at[row], self.scratch.out_sems.at[ring]))
        self.of_new(row, act)

    def of_new(self, row, act):
        """Call `act` with every copy that stores a row's token in the pool."""
        ring, last = self.in_ring(row, buffers(self.units)), self.length(row) - 1
        tile = slot_tile(self.shape.pool_dtype)
        new_buf, new_scale_buf = self.scratch.new
        sem, block = self.scratch.new_sems.at[ring], self.block_of(row, lax.div(last, self.shape.block_size))
        inside = lax.rem(self.held(last)[0], self.shape.local_slots)
        place = pl.ds(pl.multiple_of(inside - lax.rem(inside, tile), tile), tile)
        act(pltpu.make_async_copy(new_buf.at[ring], self.pool.kv.at[block, :, place], sem))
        if self.pool.scales is not None:
            act(pltpu.make_async_copy(new_scale_buf.at[ring], self.pool.scales.at[block], sem))


class PromptScratch(NamedTuple):
    """Scratch memory of a core: buffers for inputs and outputs; a head's queries, softmax."""

    blocks: TpuPool  # [AHEAD + 1, 2, slots, head_span], [AHEAD + 1, slots / block_size, 2, scale_rows, block_size]
    queries: Any  # [2, group, tile, head_span]
    out: Any  # [2, group, tile, out_lanes]
    query: Any  # [rows, head_span]
    maximum: Any  # [rows, 128], equal in all lanes; the sum too
    total: Any
    acc: Any  # [rows, head_span]
    block_sems: Any  # [AHEAD + 1]
    query_sems: Any  # [2]; the other too
    out_sems: Any


class PromptSteps(NamedTuple):
    """The steps of a core of the kernel for longer chunks.

    A step is given by the tile, the head, the chunk and its number within that; `end_tile` is one past the last tile
    that has work. The rest is the kernel's.
    """

    shape: AttentionShape
    cut: Cut
    window: int | None
    offsets: Any
    kv_lens: Any
    tables: Any
    first_block: Any
    tile_chunks: Any
    q: Any
    pool: TpuPool
    out: Any
    scratch: PromptScratch
    end_tile: Any

    @property
    def span(self) -> int:
        """Positions of a step, those on other devices included."""
        return self.cut.tile_slots * self.shape.slot_parts

    def lane_of(self, head):
        """The first lane of the span that holds a head."""
        aligned = lax.div(head * self.shape.head_dim, LANES) * LANES
        return pl.multiple_of(jnp.minimum(aligned, lanes_of(self.shape) - head_span(self.shape)), LANES)

    def part_of(self, at, chunk):
        """A chunk's tokens in a tile: (begin, end, last position from the first block seen)."""
        begin, end, last = self.place_of(at, chunk)
        if self.window is not None:
            last = visited(last + 1, self.window + end - begin - 1, self.shape.block_size) - 1
        return begin, end, last

    def place_of(self, at, chunk):
        """Like `part_of`, with the position counted from the row's start."""
        begin = jnp.maximum(self.offsets[chunk] - at * self.cut.tile, 0)
        end = jnp.minimum(self.offsets[chunk + 1], (at + 1) * self.cut.tile)
        return begin, end - at * self.cut.tile, self.kv_lens[chunk] - 1 - (self.offsets[chunk + 1] - end)

    def after(self, at, head, chunk, step):
        """The next step: the next blocks, chunk, head or tile."""
        more_steps = (step + 1) * self.span <= self.part_of(at, chunk)[2]
        more_chunks = chunk < self.tile_chunks[2 * at + 1]
        more_heads = head + 1 < self.shape.num_kv_heads
        new_head = jnp.logical_not(more_steps | more_chunks)
        next_at = jnp.where(new_head & jnp.logical_not(more_heads), at + chip(self.shape).cores, at)
        in_range = jnp.minimum(next_at, self.tile_chunks.shape[0] // 2 - 1)
        next_head = jnp.where(new_head, jnp.where(more_heads, head + 1, 0), head)
        next_chunk = jnp.where(more_steps, chunk, jnp.where(more_chunks, chunk + 1, self.tile_chunks[2 * in_range]))
        return next_at, next_head, next_chunk, jnp.where(more_steps, step + 1, 0)

    def block_of(self, at, chunk, column):
        if self.window is not None:
            column += lax.div(self.place_of(at, chunk)[2] - self.part_of(at, chunk)[2], self.shape.block_size)
        return self.tables[chunk * self.shape.max_blocks + column] + self.first_block[0]

    def each_copy(self, side, at, head, chunk, step, act):
        """Call `act` with every copy that fetches the blocks of a step."""
        last, local, lanes = self.part_of(at, chunk)[2], self.shape.local_slots, head_span(self.shape)
        kv_buf, scale_buf = self.scratch.blocks
        blocks = self.cut.tile_slots // local
        for b in range(blocks):
            column = step * blocks + b

            @pl.when(column * self.shape.block_size <= last)
            def _(b=b, column=column):
                block = self.block_of(at, chunk, column)
                source = self.pool.kv.at[block, :, :, pl.ds(self.lane_of(head), lanes)]
                sem = self.scratch.block_sems.at[side]
                act(pltpu.make_async_copy(source, kv_buf.at[side, :, pl.ds(b * local, local)], sem))
                if self.pool.scales is not None:
                    act(pltpu.make_async_copy(self.pool.scales.at[block], scale_buf.at[side, b], sem))

    def of_queries(self, side, at, head):
        """The copy of a KV head's queries."""
        place, sem = self._tokens_of(at), self.scratch.query_sems.at[side]
        group, lanes = pl.ds(0, self.shape.group), pl.ds(self.lane_of(head), head_span(self.shape))
        whole = self.shape.head_dim % LANES == 0
        queries = self.q.at[head, group, place] if whole else self.q.at[0, group, place, lanes]
        return pltpu.make_async_copy(queries, self.scratch.queries.at[side], sem)

    def of_results(self, side, at, head, act):
        """Call `act` with the copies of a KV head's results, each of which has lanes of its own."""
        sem = self.scratch.out_sems.at[side]
        for j in range(self.shape.group):
            held = self.scratch.out.at[side, j]
            lanes = held.shape[1]
            first = pl.multiple_of((head * self.shape.group + j) * lanes, LANES)
            act(pltpu.make_async_copy(held, self.out.at[self._tokens_of(at), pl.ds(first, lanes)], sem))

    def _tokens_of(self, at):
        return pl.ds(pl.multiple_of(at * self.cut.tile, self.cut.tile), self.cut.tile)

    def fetch(self, side, at, head, chunk, step):
        """Start the copies of a step; returns the step after it. Past the last one, neither."""

        @pl.when(at < self.end_tile)
        def _():
            self.each_copy(side, at, head, chunk, step, lambda copy: copy.start())

        following = self.after(jnp.minimum(at, self.tile_chunks.shape[0] // 2 - 1), head, chunk, step)
        before = (at, head, chunk, step)
        return tuple(jnp.where(at < self.end_tile, new, old) for new, old in zip(following, before, strict=True))
