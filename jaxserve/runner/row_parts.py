"""The chunks of an iteration whose rows have their blocks in one part of the pool. Traced.

`scheduler.row_parts` chooses the part of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.api import AttentionBatch


class PartBatch(NamedTuple):
    """An iteration without the chunks of other parts.

    T flat tokens, as many as in the whole iteration; those of the part come first, in the same order.

    Attributes:
      batch: its block tables count from the part's first block.
      tokens: int32[T] the flat token of the whole iteration at each place; any for padding.
      places: int32[T] the place here of each flat token of the whole iteration; T for those of other parts.
    """

    batch: AttentionBatch
    tokens: jax.Array
    places: jax.Array


def of_part(batch: AttentionBatch, part: jax.Array | int, blocks: int, block_size: int) -> PartBatch:
    """The part of an iteration that devices with one part of the pool compute.

    A row's newest block says which part it is in: blocks before a sliding window may have been given to others.

    Args:
      blocks: of the cache group, in each part; block b of the whole pool is in part b // blocks.
    """
    n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
    last = jnp.maximum(batch.kv_lens - 1, 0) // block_size
    newest = jnp.take_along_axis(batch.block_tables, last[:, None], axis=1, mode="clip")[:, 0]
    is_mine = (newest // blocks == part) & (batch.kv_lens > 0)  # [C]
    order = jnp.argsort(~is_mine, stable=True).astype(jnp.int32)
    lengths = jnp.where(is_mine, jnp.diff(batch.query_offsets), 0)[order]
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    flat = jnp.arange(n_tokens, dtype=jnp.int32)
    # All comparisons at once, as in `batch.unpack`.
    token_chunk = jnp.searchsorted(offsets[1:], flat, side="right", method="compare_all")
    token_chunk = jnp.minimum(token_chunk, n_chunks - 1).astype(jnp.int32)
    in_use = flat < offsets[-1]
    source = batch.query_offsets[order[token_chunk]] + flat - offsets[token_chunk]
    tokens = jnp.where(in_use, source, 0)
    own = AttentionBatch(
        query_offsets=offsets,
        kv_lens=jnp.where(is_mine, batch.kv_lens, 0)[order],
        # Entries of blocks that the row does not hold are not read, or have no effect: any block of the part will do.
        block_tables=jnp.clip(batch.block_tables[order] - part * blocks, 0, blocks - 1),
        token_chunk=token_chunk,
        positions=jnp.where(in_use, batch.positions[tokens], 0),
    )
    place = jnp.zeros(n_chunks, jnp.int32).at[order].set(jnp.arange(n_chunks, dtype=jnp.int32))  # of each chunk
    chunk = batch.token_chunk
    is_mine = is_mine[chunk] & (flat < batch.query_offsets[-1])
    places = jnp.where(is_mine, offsets[place[chunk]] + flat - batch.query_offsets[chunk], n_tokens)
    return PartBatch(own, tokens, places)


def copies_of_part(copies: jax.Array, part: jax.Array | int, blocks: jax.Array) -> jax.Array:
    """The block copies of one part, int32[N, 2], which count from its first block.

    Those of other parts copy a block onto itself.

    Args:
      copies: int32[N, 2] source and target of the whole pool's blocks, -1 after the last.
      blocks: int32[N, 1] blocks in each part of the cache group that each copy belongs to.
    """
    own = jnp.where(copies // blocks == part, copies - part * blocks, 0)
    return jnp.where(copies < 0, copies, own)
