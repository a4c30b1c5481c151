"""Lists of the work of one iteration for the plain-JAX backend, made once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from pallas_kernels.api import AttentionBatch, AttentionShape

# Decode rows served together, and the most slots of one row and of all rows in one loop step. A step of this size takes
# long enough to outweigh the start of its kernels, and XLA shares it between two cores.
_ROWS, _ROW_SLOTS, _STEP_SLOTS = 8, 128, 512
_QUERY_TILE = 128


class Decodes(NamedTuple):
    """Chunks of length 1, longest context first.

    The first `total` entries count; the others have kv_len 0.
    """

    total: jax.Array  # int32[]
    token: jax.Array  # int32[C], flat token
    kv_len: jax.Array  # int32[C]
    tables: jax.Array  # int32[C, columns]; every entry names a block that may be read
    slot: jax.Array  # int32[C, 2], block and slot in it that the token is written to


class Writes(NamedTuple):
    """Blocks that longer chunks write, whole or in part; the first `total` entries count."""

    total: jax.Array  # int32[]
    block: jax.Array  # int32[n]
    token: jax.Array  # int32[n], flat token of the block's slot 0; it may lie outside the chunk and the batch
    start: jax.Array  # int32[n], first flat token of the chunk
    end: jax.Array  # int32[n], one past its last


class Tiles(NamedTuple):
    """Queries of longer chunks in runs of at most one tile; the first `total` entries count."""

    total: jax.Array  # int32[]
    start: jax.Array  # int32[n], first flat token
    end: jax.Array  # int32[n], one past the last
    last: jax.Array  # int32[n], position of the last
    chunk: jax.Array  # int32[n]


class XlaMetadata(NamedTuple):
    decodes: Decodes
    writes: Writes
    tiles: Tiles
    tables: jax.Array  # int32[C, max_blocks]


def prepare(batch: AttentionBatch, shape: AttentionShape) -> XlaMetadata:
    """The work of an iteration on the blocks of the first layer."""
    return XlaMetadata(_decodes(batch, shape), _writes(batch, shape), _query_tiles(batch), batch.block_tables)


def of_layer(meta: XlaMetadata, first_block: jax.Array | int) -> XlaMetadata:
    """The same work on the blocks of the layer that starts at `first_block`."""
    decodes, writes = meta.decodes, meta.writes
    return XlaMetadata(
        decodes._replace(tables=decodes.tables + first_block, slot=decodes.slot.at[:, 0].add(first_block)),
        writes._replace(block=writes.block + first_block),
        meta.tiles,
        meta.tables + first_block,
    )


def decode_step(n_chunks: int, shape: AttentionShape) -> tuple[int, int]:
    """(rows, blocks of each row) in one step of the decode loop."""
    rows = min(_ROWS, n_chunks)
    blocks = min(_ROW_SLOTS, _STEP_SLOTS // rows) // shape.block_size
    return rows, max(1, min(blocks, shape.max_blocks))


def query_tile(n_tokens: int) -> int:
    """Queries of a longer chunk in one tile."""
    return min(_QUERY_TILE, n_tokens)


def _decodes(batch: AttentionBatch, shape: AttentionShape) -> Decodes:
    size = shape.block_size
    single = jnp.diff(batch.query_offsets) == 1
    kv_len = jnp.where(single, batch.kv_lens, 0)
    order = jnp.argsort(-kv_len, stable=True)  # rows of similar length share a group
    kv_len, tables = kv_len[order], batch.block_tables[order]
    column = (kv_len - 1) // size
    block = jnp.take_along_axis(tables, column[:, None], axis=1, mode="clip")
    slot = jnp.concatenate([block, (kv_len - 1 - column * size)[:, None]], axis=1)
    _, blocks = decode_step(kv_len.shape[0], shape)
    in_use = jnp.arange(shape.max_blocks) * size < kv_len[:, None]
    tables = jnp.where(in_use, tables, tables[0, 0])
    tables = jnp.pad(tables, ((0, 0), (0, -shape.max_blocks % blocks)), mode="edge")
    return Decodes(jnp.sum(single, dtype=jnp.int32), batch.query_offsets[order], kv_len, tables, slot)


def _pieces(
    counts: Int32[jax.Array, " C"], most: int
) -> tuple[Int32[jax.Array, ""], Int32[jax.Array, " {most}"], Int32[jax.Array, " {most}"]]:
    """The pieces of all chunks as lists: (total, chunk, index within its chunk)."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    piece = jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.sum(ends <= piece[:, None], axis=1, dtype=jnp.int32)
    chunk = jnp.minimum(chunk, counts.shape[0] - 1)
    return ends[-1], chunk, piece - (ends - counts)[chunk]


def _long(batch: AttentionBatch) -> Int32[jax.Array, " C"]:
    """Lengths of the chunks longer than one, 0 for the others."""
    lengths = jnp.diff(batch.query_offsets)
    return jnp.where(lengths > 1, lengths, 0)


def _writes(batch: AttentionBatch, shape: AttentionShape) -> Writes:
    size, long = shape.block_size, _long(batch)
    begin = batch.kv_lens - long  # position of each chunk's first token
    first = begin // size
    counts = jnp.where(long > 0, -(-batch.kv_lens // size) - first, 0)
    most = batch.positions.shape[0] // size + 2 * long.shape[0]
    total, chunk, which = _pieces(counts, most)
    column = first[chunk] + which
    start, end = batch.query_offsets[chunk], batch.query_offsets[chunk + 1]
    block = jnp.take_along_axis(batch.block_tables[chunk], column[:, None], axis=1, mode="clip")[:, 0]
    return Writes(total, block, start + column * size - begin[chunk], start, end)


def _query_tiles(batch: AttentionBatch) -> Tiles:
    long, n_tokens = _long(batch), batch.positions.shape[0]
    tile = query_tile(n_tokens)
    total, chunk, which = _pieces(-(-long // tile), n_tokens // tile + long.shape[0])
    start, chunk_end = batch.query_offsets[chunk] + which * tile, batch.query_offsets[chunk + 1]
    end = jnp.minimum(start + tile, chunk_end)
    return Tiles(total, start, end, batch.kv_lens[chunk] - 1 - (chunk_end - end), chunk)
