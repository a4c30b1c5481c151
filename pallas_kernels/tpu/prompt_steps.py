"""The order in which the kernel of prompts does its work, and its copies, which run ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.layout import LANES, TpuPool, head_span, joint_heads, lanes_of, side_by_side, visited

# Steps whose blocks are on their way while one is computed.
AHEAD = 2


class PromptScratch(NamedTuple):
    """Scratch memory of a core: buffers for inputs and outputs; a head's queries, softmax."""

    blocks: TpuPool  # [AHEAD + 1, 2, slots, head_span], [AHEAD + 1, slots / block_size, 2, scale_rows, block_size]
    queries: Any  # [2, group, tile, head_span, or D]
    out: Any  # [2, tiles that are copied together, tile, result_lanes]
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
        queries = self.q.at[0, group, place, lanes] if side_by_side(self.shape) else self.q.at[head, group, place]
        return pltpu.make_async_copy(queries, self.scratch.queries.at[side], sem)

    def results_of(self, turn):
        """The buffer of a turn's results."""
        return lax.rem(lax.div(turn, joint_heads(self.shape)), 2)

    def of_results(self, turn, at, head, act):
        """Call `act` with the copies of results: a KV head's, and those that share its lane tiles."""
        side = self.results_of(turn)
        sem = self.scratch.out_sems.at[side]
        _, tiles, _, lanes = self.scratch.out.shape
        for j in range(tiles):
            first = pl.multiple_of((lax.div(head, joint_heads(self.shape)) * tiles + j) * lanes, LANES)
            place = self.out.at[self._tokens_of(at), pl.ds(first, lanes)]
            act(pltpu.make_async_copy(self.scratch.out.at[side, j], place, sem))

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
