"""The Mosaic kernel that writes the tokens of chunks longer than 1 to their blocks.

It works block by block. If a chunk fills every slot of a block, the block is only written. Otherwise the kernel reads
the block first and keeps the other slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu import costs
from pallas_kernels.tpu.layout import (
    COMPILER_PARAMS,
    LANES,
    TpuPool,
    kept_in_memory,
    lanes_of,
    round_up,
    scale_rows,
    slot_tile,
    with_lanes,
)


class NewSlots(NamedTuple):
    """Keys and values of the flat tokens in the pool's dtype, padded to whole memory tiles.

    They are the last two lines. Those of queries may come before, which are not read.
    """

    kv: Any  # [K, lines, tokens, D], and [1, lines, tokens, lanes] if heads lie `side_by_side`
    scales: Any = None  # float32[2, K, tokens]


class _WriteScratch(NamedTuple):
    """Scratch memory: two buffers for a block's new slots, and two for the block."""

    given: TpuPool  # [2, 2, block_size + slot_tile, K * D, or lanes] and [2, 2, K, block_size in whole tiles + 128]
    block: TpuPool  # [2, 2, block_size, lanes] and [2, 2, scale_rows, block_size]
    in_sems: Any  # [2]; the others too
    out_sems: Any


class _Leaf(NamedTuple):
    """Keys and values, or their scales, in any memory."""

    new: Any
    pool: Any
    given: Any
    block: Any
    axis: int  # the axis of slots within a half
    multiple: int  # on that axis, a copy may begin at multiples of this

    @property
    def tokens(self):
        return self.new.shape[self.axis - 2]

    @property
    def copied(self):
        """Tokens of a copy: as many as the buffer holds, or all."""
        return min(self.tokens, self.given.shape[2 + self.axis])

    def first(self, token):
        """The first token of a copy that has `token` and those after it.

        The copy is within the flat tokens, and begins at a multiple.
        """
        most = self.tokens - self.copied
        return pl.multiple_of(jnp.clip(token & -self.multiple, 0, most), self.multiple)

    def each_copy(self, token, side, half, sem, act):
        """Call `act` with every copy of the keys (half 0) or values of `token` and those after it."""
        source, target, given = pl.ds(self.first(token), self.copied), pl.ds(0, self.copied), self.given.at[side, half]
        if self.axis == 1:
            act(pltpu.make_async_copy(self.new.at[half, :, source], given.at[:, target], sem))
            return
        heads, lines, _, lanes = self.new.shape

        def of_head(head, _):
            place = pl.ds(pl.multiple_of(head * lanes, LANES), lanes) if heads > 1 else slice(None)
            act(pltpu.make_async_copy(self.new.at[head, lines - 2 + half, source], given.at[target, place], sem))

        lax.fori_loop(0, heads, of_head, None)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class _WriteKernel:
    """The kernel's static side; `__call__` is its body."""

    shape: AttentionShape

    def __call__(
        self,
        bounds,
        offsets,
        kv_lens,
        tables,
        first_block,
        new: NewSlots,
        _pool: TpuPool,
        pool: TpuPool,
        scratch: _WriteScratch,
    ):
        shape, size, local = self.shape, self.shape.block_size, self.shape.local_slots
        first_slot = 0 if shape.slot_parts == 1 else bounds[4] * local
        kept = list(zip(pool, scratch.given, scratch.block, strict=True))
        leaves = [_Leaf(new.kv, *kept[0], axis=0, multiple=slot_tile(shape.pool_dtype))]
        if new.scales is not None:
            leaves.append(_Leaf(new.scales, *kept[1], axis=1, multiple=LANES))
        first_chunk, end_chunk = bounds[2], bounds[3]

        def after(chunk, column):
            more = (column + 1) * size < kv_lens[chunk]
            chunk = jnp.where(more, chunk, chunk + 1)
            return chunk, jnp.where(more, column + 1, first_column(chunk))

        def first_column(chunk):
            return lax.div(start_of(chunk), size)

        def start_of(chunk):
            """Position of a chunk's first token."""
            return kv_lens[chunk] - (offsets[chunk + 1] - offsets[chunk])

        def place(chunk, column):
            """(block, flat token of its first slot, first and last + 1 slot of the chunk)."""
            begin = start_of(chunk) - column * size - first_slot
            block = tables[chunk * shape.max_blocks + column] + first_block[0]
            return (
                block,
                offsets[chunk] - begin,
                jnp.maximum(begin, 0),
                kv_lens[chunk] - column * size - first_slot,
            )

        def reads(side, chunk, column, act):
            block, token, begin, end = place(chunk, column)
            for leaf in leaves:
                for half in range(2):
                    leaf.each_copy(token, side, half, scratch.in_sems.at[side], act)

                @pl.when((begin > 0) | (end < local))
                def _(leaf=leaf):
                    act(pltpu.make_async_copy(leaf.pool.at[block], leaf.block.at[side], scratch.in_sems.at[side]))

        def writes(side, chunk, column, act):
            block = place(chunk, column)[0]
            for leaf in leaves:
                act(pltpu.make_async_copy(leaf.block.at[side], leaf.pool.at[block], scratch.out_sems.at[side]))

        def merge(side, chunk, column):
            _, token, begin, end = place(chunk, column)
            for leaf in leaves:
                length = leaf.given.shape[2 + leaf.axis]
                # A device that holds no slot of the chunk's in this block has any shift, and merges nothing.
                shift = jnp.clip(token - leaf.first(token), -length, length)
                for half in range(2):
                    given = leaf.given[side, half].astype(jnp.float32)
                    given = pltpu.roll(given, lax.rem(length - shift, length), leaf.axis)
                    given = given[:, :local] if leaf.axis else with_lanes(given[:local], leaf.block.shape[-1])
                    index = lax.broadcasted_iota(jnp.int32, given.shape, leaf.axis)
                    held = leaf.block[side, half, : len(given)]  # of scales, the rows that are used
                    merged = jnp.where((index >= begin) & (index < end), given, held.astype(jnp.float32))
                    leaf.block[side, half, : len(given)] = merged.astype(held.dtype)

        def serve(carry):
            turn, chunk, column = carry
            side, following = lax.rem(turn, 2), after(chunk, column)

            @pl.when((turn > 0) & (following[0] < end_chunk))
            def _():
                writes(1 - side, chunk, column, lambda copy: copy.wait())  # of the step before, of equal size

            @pl.when(following[0] < end_chunk)
            def _():
                reads(1 - side, *following, lambda copy: copy.start())

            reads(side, chunk, column, lambda copy: copy.wait())
            merge(side, chunk, column)
            writes(side, chunk, column, lambda copy: copy.start())
            return turn + 1, *following

        @pl.when(first_chunk < end_chunk)
        def _():
            begin = (first_chunk, first_column(first_chunk))
            reads(0, *begin, lambda copy: copy.start())
            turns = lax.while_loop(lambda carry: carry[1] < end_chunk, serve, (jnp.int32(0), *begin))[0]
            writes(lax.rem(turns - 1, 2), *begin, lambda copy: copy.wait())

            @pl.when(turns > 1)
            def _():
                writes(lax.rem(turns, 2), *begin, lambda copy: copy.wait())


@partial(jax.jit, static_argnames=("shape", "interpret"))
def write(
    new: NewSlots,
    pool: TpuPool,
    bounds: jax.Array,
    offsets: jax.Array,
    kv_lens: jax.Array,
    tables: jax.Array,
    first_block: jax.Array,
    *,
    shape: AttentionShape,
    interpret: Any,
) -> TpuPool:
    """Write the tokens of chunks to their blocks.

    Args:
      bounds: int32[4], the last two of which are the first chunk to write, and one past the last. With several
        `slot_parts`, which of them this is comes after.
    """
    size, dtype, lanes, rows = shape.local_slots, shape.pool_dtype, lanes_of(shape), scale_rows(shape)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs, new_specs = (jax.tree.map(lambda _: anywhere, operands) for operands in (pool, new))
    n_new, n_leaves = len(jax.tree.leaves(new)), len(jax.tree.leaves(pool))
    given = pltpu.VMEM((2, 2, size + slot_tile(dtype), new.kv.shape[0] * new.kv.shape[3]), dtype)
    block = pltpu.VMEM((2, 2, size, lanes), dtype)
    given_scales = block_scales = None
    if pool.scales is not None:
        given_scales = pltpu.VMEM((2, 2, shape.num_kv_heads, round_up(size, LANES) + LANES), jnp.float32)
        block_scales = pltpu.VMEM((2, 2, rows, size), jnp.float32)
    return pl.pallas_call(
        _WriteKernel(shape=shape),
        out_shape=(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pool),),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            in_specs=(new_specs, specs),
            out_specs=(specs,),
            scratch_shapes=[
                _WriteScratch(
                    given=TpuPool(given, given_scales),
                    block=TpuPool(block, block_scales),
                    in_sems=pltpu.SemaphoreType.DMA((2,)),
                    out_sems=pltpu.SemaphoreType.DMA((2,)),
                )
            ],
        ),
        input_output_aliases={5 + n_new + i: i for i in range(n_leaves)},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=costs.of_writes(shape, new.kv.shape[2]),
        interpret=interpret,
        name="attention_write",
    )(bounds, offsets, kv_lens, tables, first_block, new, kept_in_memory(pool, interpret))[0]
