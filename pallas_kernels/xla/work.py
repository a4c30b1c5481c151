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

    The first `total` entries count; the others have kv_len 0. Of slots, the first `written` entries count.
    """

    total: jax.Array  # int32[]
    token: jax.Array  # int32[C], flat token
    kv_len: jax.Array  # int32[C]
    tables: jax.Array  # int32[C, columns]; every entry names a block that may be read
    written: jax.Array  # int32[]
    slot: jax.Array  # int32[C, 3], block, slot in it and the flat token that is written there


class Writes(NamedTuple):
    """Blocks that longer chunks write, whole or in part; the first `total` entries count."""

    total: jax.Array  # int32[]
    block: jax.Array  # int32[n]
    token: jax.Array  # int32[n], flat token of the block's first slot here; it may lie outside the chunk and the batch
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
    first_slot: jax.Array  # int32[], of those of a block that this device holds


def prepare(batch: AttentionBatch, shape: AttentionShape, part: jax.Array | int) -> XlaMetadata:
    """The work of an iteration on the blocks of the first layer."""
    first_slot = jnp.int32(part * shape.local_slots)
    decodes, writes = _decodes(batch, shape, first_slot), _writes(batch, shape, first_slot)
    return XlaMetadata(decodes, writes, _query_tiles(batch), batch.block_tables, first_slot)


def positions(column: jax.Array, meta: XlaMetadata, shape: AttentionShape) -> jax.Array:
    """Positions of this device's slots in table columns [...]: int32[..., local_slots]."""
    return column[..., None] * shape.block_size + meta.first_slot + jnp.arange(shape.local_slots)


def of_layer(meta: XlaMetadata, first_block: jax.Array | int) -> XlaMetadata:
    """The same work on the blocks of the layer that starts at `first_block`."""
    decodes, writes = meta.decodes, meta.writes
    return XlaMetadata(
        decodes._replace(tables=decodes.tables + first_block, slot=decodes.slot.at[:, 0].add(first_block)),
        writes._replace(block=writes.block + first_block),
        meta.tiles,
        meta.tables + first_block,
        meta.first_slot,
    )


def decode_step(n_chunks: int, shape: AttentionShape) -> tuple[int, int]:
    """(rows, blocks of each row) in one step of the decode loop."""
    rows = min(_ROWS, n_chunks)
    blocks = min(_ROW_SLOTS, _STEP_SLOTS // rows) // shape.local_slots
    return rows, max(1, min(blocks, shape.max_blocks))


def query_tile(n_tokens: int) -> int:
    """Queries of a longer chunk in one tile."""
    return min(_QUERY_TILE, n_tokens)


def _decodes(batch: AttentionBatch, shape: AttentionShape, first_slot: jax.Array) -> Decodes:
    size = shape.block_size
    single = jnp.diff(batch.query_offsets) == 1
    kv_len = jnp.where(single, batch.kv_lens, 0)
    order = jnp.argsort(-kv_len, stable=True)  # rows of similar length share a group
    kv_len, tables = kv_len[order], batch.block_tables[order]
    column = (kv_len - 1) // size
    block = jnp.take_along_axis(tables, column[:, None], axis=1, mode="clip")
    slot = kv_len - 1 - column * size - first_slot
    total, token = jnp.sum(single, dtype=jnp.int32), batch.query_offsets[order]
    written, places = total, jnp.concatenate([block, slot[:, None], token[:, None]], axis=1)
    if shape.slot_parts > 1:
        is_here = (kv_len > 0) & (slot >= 0) & (slot < shape.local_slots)
        written, places = jnp.sum(is_here, dtype=jnp.int32), places[jnp.argsort(~is_here, stable=True)]
    _, blocks = decode_step(kv_len.shape[0], shape)
    in_use = jnp.arange(shape.max_blocks) * size < kv_len[:, None]
    tables = jnp.where(in_use, tables, tables[0, 0])
    tables = jnp.pad(tables, ((0, 0), (0, -shape.max_blocks % blocks)), mode="edge")
    return Decodes(total, token, kv_len, tables, written, places)


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


def _writes(batch: AttentionBatch, shape: AttentionShape, first_slot: jax.Array) -> Writes:
    size, long = shape.block_size, _long(batch)
    begin = batch.kv_lens - long  # position of each chunk's first token
    first = begin // size
    counts = jnp.where(long > 0, -(-batch.kv_lens // size) - first, 0)
    most = batch.positions.shape[0] // size + 2 * long.shape[0]
    total, chunk, which = _pieces(counts, most)
    column = first[chunk] + which
    start, end = batch.query_offsets[chunk], batch.query_offsets[chunk + 1]
    block = jnp.take_along_axis(batch.block_tables[chunk], column[:, None], axis=1, mode="clip")[:, 0]
    return Writes(total, block, start + column * size + first_slot - begin[chunk], start, end)


def _query_tiles(batch: AttentionBatch) -> Tiles:
    long, n_tokens = _long(batch), batch.positions.shape[0]
    tile = query_tile(n_tokens)
    total, chunk, which = _pieces(-(-long // tile), n_tokens // tile + long.shape[0])
    start, chunk_end = batch.query_offsets[chunk] + which * tile, batch.query_offsets[chunk + 1]
    end = jnp.minimum(start + tile, chunk_end)
    return Tiles(total, start, end, batch.kv_lens[chunk] - 1 - (chunk_end - end), chunk)
