"""The order in which the kernel of decodes does its work, and its copies, which run ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.layout import TpuPool, slot_tile, visited

# Tokens that are copied together, in whole memory tiles: as many as two steps have rows, or more.
TOKENS = 16
# Rows whose results are copied together, as they are a whole memory tile.
ROWS = 8


def buffers(units: int) -> int:
    """Buffers for new tokens: at least one for each unit of a step, and a power of 2."""
    return 1 << (units - 1).bit_length()


class DecodeScratch(NamedTuple):
    """Scratch memory of a core; B is the number of `buffers`."""

    blocks: TpuPool  # [2, units, 2, slots, lanes] and [2, units, slots / block_size, 2, scale_rows, block_size]
    new: TpuPool  # [B, 2, slot_tile, lanes] and [B, 2, scale_rows, block_size]
    tokens: Any  # [2, K, group + 2, TOKENS, D], or with heads `side_by_side`
    wide: Any  # the same in float32, of one of the two
    rows: Any  # [B, group + 2, lanes]
    out: Any  # [2, ROWS, tiles * result_lanes]
    maximum: Any  # [1, groups, rows, 128], equal in all lanes: after the last unit; of slot parts, after each
    total: Any  # [units, groups, rows, 128], equal in all lanes: after each unit
    acc: Any  # [units, groups, rows, lanes of a group]: after each unit
    slopes: Any  # [groups, rows, 128], equal in all lanes, or None; the other too
    sinks: Any
    block_sems: Any  # [2, units]
    token_sems: Any  # [2]
    out_sems: Any  # [2]
    new_sems: Any  # [B]


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
    tokens: Any
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

    def begun(self, units):
        """The rows that begin in a step: the first of them, and one past the last."""
        (row, step), (last, _) = units[0], units[-1]
        return jnp.where(step > 0, row + 1, row), jnp.minimum(last + 1, self.high)

    def tokens_of(self, row):
        """The number of the tokens that are copied together and have a row's, and their buffer."""
        copied = lax.div(row, self.scratch.tokens.shape[3])
        return copied, lax.rem(copied, 2)

    def of_tokens(self, row):
        """The copy of the tokens that have a row's."""
        (copied, side), count = self.tokens_of(row), self.scratch.tokens.shape[3]
        place = pl.ds(pl.multiple_of(copied * count, count), count)
        if self.tokens.shape[2] == count:  # perhaps no whole memory tile
            place = slice(None)
        target, sem = self.scratch.tokens.at[side], self.scratch.token_sems.at[side]
        return pltpu.make_async_copy(self.tokens.at[:, :, place], target, sem)

    def more_tokens(self, units, act):
        """Call `act` with the copy of the tokens that a step is the first to need.

        Those of row `low` are copied before. Two buffers will do, because two steps that follow each other have no more
        rows than a copy has tokens.
        """
        (first, end), count = self.begun(units), self.scratch.tokens.shape[3]
        first = lax.div(jnp.maximum(first, self.low + 1) + count - 1, count) * count
        pl.when(first < end)(lambda: act(self.of_tokens(first)))

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

    def used(self, positions, blocks):
        """Slots here of so many blocks that hold the next positions of a row, in whole memory tiles."""
        size, tile = self.shape.block_size, slot_tile(self.shape.pool_dtype)
        positions = jnp.minimum(positions, blocks * size)
        if self.shape.slot_parts > 1:  # of a block that devices share, each copies its part as a whole
            return pl.multiple_of(lax.div(positions + size - 1, size) * self.shape.local_slots, tile)
        return pl.multiple_of((positions + tile - 1) & -tile, tile)

    def fetch(self, side, row, step, unit):
        """Start the copies of a unit's blocks."""
        (kv_buf, scale_buf), sem = self.scratch.blocks, self.scratch.block_sems.at[side, unit]
        local, blocks = self.shape.local_slots, self.slots // self.shape.local_slots
        positions = self.length(row) - step * self.span

        for b in range(blocks):
            rest = positions - b * self.shape.block_size
            needed = (row < self.high) & (rest > 0) if b else row < self.high  # one at least

            @pl.when(needed)
            def _(b=b, rest=rest):
                block, used = self.block_of(row, step * blocks + b), self.used(rest, 1)
                source, place = self.pool.kv.at[block, :, pl.ds(0, used)], pl.ds(b * local, used)
                pltpu.make_async_copy(source, kv_buf.at[side, unit, :, place], sem).start()
                if self.pool.scales is not None:
                    pltpu.make_async_copy(self.pool.scales.at[block], scale_buf.at[side, unit, b], sem).start()

    def wait(self, side, row, step, unit):
        """Wait for all copies of a unit. Their semaphore counts bytes, whatever copies bring them."""
        (kv_buf, scale_buf), sem = self.scratch.blocks, self.scratch.block_sems.at[side, unit]
        size, blocks = self.shape.block_size, self.slots // self.shape.local_slots

        @pl.when(row < self.high)
        def _():
            positions = self.length(row) - step * self.span
            copied = kv_buf.at[side, unit, :, pl.ds(0, self.used(positions, blocks))]
            pltpu.make_async_copy(copied, copied, sem).wait()
            if scale_buf is not None:
                copied = scale_buf.at[side, unit, pl.ds(0, lax.div(jnp.minimum(positions, self.span) + size - 1, size))]
                pltpu.make_async_copy(copied, copied, sem).wait()

    def start(self, side, row, step):
        """Start the copies of a step; returns its units and the one after them."""
        started = []
        for unit in range(self.units):
            self.fetch(side, row, step, unit)
            started.append((row, step))
            row, step = self.after(row, step)
        self.more_tokens(started, lambda copy: copy.start())
        return started, (row, step)

    def each_end(self, units, after, act):
        """Call act(row, its last step, unit) for the rows that end in a step.

        Args:
          after: the unit after the step's.
        """
        row, step = units[0]

        def of_row(row, first):
            last = lax.div(self.length(row) - 1, self.span)
            act(row, last, first + last)
            return first + last + 1

        lax.fori_loop(row, after[0], of_row, -step)

    def held(self, position):
        """A position's slot here, or one of its block; that or -1; and the slots up to the position."""
        if self.shape.slot_parts == 1:
            return position, position, position + 1
        size, local = self.shape.block_size, self.shape.local_slots
        column, offset = lax.div(position, size) * local, lax.rem(position, size) - self.first_slot
        slot = column + jnp.clip(offset, 0, local - 1)
        own = jnp.where((offset >= 0) & (offset < local), slot, -1)
        return slot, own, column + jnp.clip(offset + 1, 0, local)

    def of_results(self, row):
        """The copy of the results that have a row's."""
        number = lax.div(row, ROWS)
        side, first = lax.rem(number, 2), pl.program_id(0) * (self.out.shape[0] // pl.num_programs(0))
        place = pl.ds(pl.multiple_of(first + number * ROWS, ROWS), ROWS)
        return pltpu.make_async_copy(self.scratch.out.at[side], self.out.at[place], self.scratch.out_sems.at[side])

    def begin_results(self, row):
        """Wait for the buffer of the results that a row is the first of."""
        before = row - 2 * ROWS
        pl.when((lax.rem(row, ROWS) == 0) & (before + ROWS > self.low))(lambda: self.of_results(before).wait())

    def end_results(self, row):
        """Store the results that a row is the last of."""
        is_last = (lax.rem(row, ROWS) == ROWS - 1) | (row == self.high - 1)
        pl.when(is_last)(lambda: self.of_results(row).start())

    def wait_for_results(self):
        """Wait for what is still being stored."""
        last = self.high - 1
        pl.when(self.low < self.high)(lambda: self.of_results(last).wait())
        before = last - lax.rem(last, ROWS) - 1
        pl.when(before >= self.low)(lambda: self.of_results(before).wait())

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
