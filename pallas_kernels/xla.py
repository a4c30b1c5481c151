"""Ragged attention in plain JAX, written so that XLA makes it fast on a CPU; it runs on every platform.

Chunks of length 1 (decodes) and longer ones (prompts) take separate loops, both over work that exists: a group of
decode rows visits the blocks its longest context fills, a query tile of a prompt the blocks up to its last position.
Trip counts are data, so cost follows the context in use and neither the window nor the pool. Softmax is online (Milakov
and Gimelshein, 2018): a block that a mask empties leaves maximum, sum and accumulator as they were, to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.api import AttentionBatch, AttentionShape

# Decode rows served together, and the slots of one row and of all rows that a loop step visits at most. A step of this
# size is long against the cost of starting its kernels, and XLA shares it between two cores.
_ROWS, _ROW_SLOTS, _STEP_SLOTS = 8, 128, 512
# Queries of a prompt chunk served together, and the slots they visit in a loop step at most.
_QUERY_TILE, _TILE_SLOTS = 128, 128
# Partial sums that `_contract` keeps. XLA recomputes a producer inside each of up to 15 consumers; from 16 on it
# stores it, which is what makes the contraction one pass over the pool.
_PARTIAL_SUMS = 16
# Stands for minus infinity where a difference of two of them must not be NaN.
_LOWEST = -1e30
_HIGHEST = lax.Precision.HIGHEST
_BFLOAT16 = np.dtype(jnp.bfloat16)


class Pool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or the names of their axes.

    A key block holds its slots innermost, so that scores of neighbouring slots are neighbouring lanes. bfloat16 is held
    as its bits (uint16): XLA's CPU compiler widens a bfloat16 operand of a slice or an update as a whole, pool and all.
    """

    keys: Any  # [n_blocks, K, D, block_size]
    values: Any  # [n_blocks, K, block_size, D]


class Decodes(NamedTuple):
    """Chunks of length 1, longest context first; the first `total` entries count, the others have kv_len 0."""

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
    """Queries of longer chunks in runs of at most a tile; the first `total` entries count."""

    total: jax.Array  # int32[]
    start: jax.Array  # int32[n], first flat token
    end: jax.Array  # int32[n], one past the last
    last: jax.Array  # int32[n], position of the last
    chunk: jax.Array  # int32[n]


class Meta(NamedTuple):
    decodes: Decodes
    writes: Writes
    tiles: Tiles
    tables: jax.Array  # int32[C, max_blocks]


class XlaBackend:
    name = "xla"
    platforms = None

    def supports(self, shape: AttentionShape) -> str | None:
        for what, dtype in (("queries", shape.dtype), ("pool", shape.pool_dtype)):
            if dtype not in (np.float32, _BFLOAT16):
                return f"{what} of {dtype}; it serves float32 and bfloat16"
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 64

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> Pool:
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.block_size
        dtype = np.uint16 if shape.pool_dtype == _BFLOAT16 else shape.pool_dtype
        return Pool(
            keys=jax.ShapeDtypeStruct((n_blocks, heads, dim, size), dtype),
            values=jax.ShapeDtypeStruct((n_blocks, heads, size, dim), dtype),
        )

    def pool_axes(self) -> Pool:
        axes = (None, "heads", None, None)
        return Pool(keys=axes, values=axes)

    def prepare(self, batch: AttentionBatch, shape: AttentionShape) -> Meta:
        with jax.named_scope("attention_prepare"):
            return Meta(_decodes(batch, shape), _writes(batch, shape), _query_tiles(batch), batch.block_tables)

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: Pool,
        meta: Meta,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"], Pool]:
        return _attend(q, k, v, pool, _of_layer(meta, first_block), slopes, shape, scale)


@partial(jax.jit, static_argnames=("shape", "scale"))  # traced once for all layers of a program
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: Pool,
    meta: Meta,
    slopes: jax.Array | None,
    shape: AttentionShape,
    scale: float,
) -> tuple[jax.Array, Pool]:
    prompts = q.shape[0] > 1  # a bucket of one token holds no longer chunk
    with jax.named_scope("attention_write"):
        k, v = _stored(k, shape), _stored(v, shape)
        pool = _write_decodes(k, v, pool, meta.decodes)
        if prompts:
            pool = _write_prompts(k, v, pool, meta.writes)
    with jax.named_scope("attention_attend"):
        if slopes is not None:
            slopes = slopes.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group, 1)
        queries = q.astype(jnp.float32).reshape(-1, shape.num_kv_heads, shape.group, shape.head_dim)  # [T, K, G, D]
        out = jnp.zeros(queries.shape, jnp.float32)
        out = _attend_decodes(queries, out, pool, meta.decodes, shape, slopes, scale)
        if prompts:
            out = _attend_prompts(queries, out, pool, meta, shape, slopes, scale)
        return out.reshape(q.shape).astype(q.dtype), pool


def _of_layer(meta: Meta, first_block: jax.Array | int) -> Meta:
    """The same work on the blocks of the layer whose first block this is."""
    decodes, writes = meta.decodes, meta.writes
    return Meta(
        decodes._replace(tables=decodes.tables + first_block, slot=decodes.slot.at[:, 0].add(first_block)),
        writes._replace(block=writes.block + first_block),
        meta.tiles,
        meta.tables + first_block,
    )


# What is to be done, as lists: once an iteration.


def _decode_step(n_chunks: int, shape: AttentionShape) -> tuple[int, int]:
    """(rows, blocks of each row) that a step of the decode loop visits."""
    rows = min(_ROWS, n_chunks)
    blocks = min(_ROW_SLOTS, _STEP_SLOTS // rows) // shape.block_size
    return rows, max(1, min(blocks, shape.max_blocks))


def _decodes(batch: AttentionBatch, shape: AttentionShape) -> Decodes:
    size = shape.block_size
    single = jnp.diff(batch.query_offsets) == 1
    kv_len = jnp.where(single, batch.kv_lens, 0)
    order = jnp.argsort(-kv_len, stable=True)  # rows of like length share a group
    kv_len, tables = kv_len[order], batch.block_tables[order]
    column = (kv_len - 1) // size
    block = jnp.take_along_axis(tables, column[:, None], axis=1, mode="clip")
    slot = jnp.concatenate([block, (kv_len - 1 - column * size)[:, None]], axis=1)
    _, blocks = _decode_step(kv_len.shape[0], shape)
    in_use = jnp.arange(shape.max_blocks) * size < kv_len[:, None]
    tables = jnp.where(in_use, tables, tables[0, 0])
    tables = jnp.pad(tables, ((0, 0), (0, -shape.max_blocks % blocks)), mode="edge")
    return Decodes(jnp.sum(single, dtype=jnp.int32), batch.query_offsets[order], kv_len, tables, slot)


def _pieces(
    counts: Int32[jax.Array, " C"], most: int
) -> tuple[Int32[jax.Array, ""], Int32[jax.Array, " {most}"], Int32[jax.Array, " {most}"]]:
    """Pieces of all chunks as a list: (total, chunk, place in its chunk)."""
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
    tile = min(_QUERY_TILE, n_tokens)
    total, chunk, which = _pieces(-(-long // tile), n_tokens // tile + long.shape[0])
    start, chunk_end = batch.query_offsets[chunk] + which * tile, batch.query_offsets[chunk + 1]
    end = jnp.minimum(start + tile, chunk_end)
    return Tiles(total, start, end, batch.kv_lens[chunk] - 1 - (chunk_end - end), chunk)


# Writing.


def _stored(x: Float[jax.Array, "T K D"], shape: AttentionShape) -> jax.Array:
    x = x.astype(shape.pool_dtype)
    return lax.bitcast_convert_type(x, jnp.uint16) if shape.pool_dtype == _BFLOAT16 else x


def _write_decodes(k: jax.Array, v: jax.Array, pool: Pool, decodes: Decodes) -> Pool:
    def write(i: jax.Array, pool: Pool) -> Pool:
        block, slot, token = decodes.slot[i, 0], decodes.slot[i, 1], decodes.token[i]
        key = lax.dynamic_slice_in_dim(k, token, 1)[..., None]  # [1, K, D, 1]
        value = lax.dynamic_slice_in_dim(v, token, 1)[:, :, None]  # [1, K, 1, D]
        return Pool(
            lax.dynamic_update_slice(pool.keys, key, (block, 0, 0, slot)),
            lax.dynamic_update_slice(pool.values, value, (block, 0, slot, 0)),
        )

    return lax.fori_loop(0, decodes.total, write, pool)


def _write_prompts(k: jax.Array, v: jax.Array, pool: Pool, writes: Writes) -> Pool:
    size = pool.values.shape[2]
    # With room for a block that begins or ends outside the batch, and turned as the pool holds them, once for all
    # blocks; a padding that XLA merges with the turn takes four times as long.
    k, v = lax.optimization_barrier([jnp.pad(x, ((size, size), (0, 0), (0, 0))) for x in (k, v)])
    keys, values = k.transpose(1, 2, 0), v.swapaxes(0, 1)

    def write(i: jax.Array, pool: Pool) -> Pool:
        block, first = writes.block[i], writes.token[i]
        token = first + jnp.arange(size)
        mine = (token >= writes.start[i]) & (token < writes.end[i])

        def merge(held: jax.Array, new: jax.Array, mine: jax.Array) -> jax.Array:
            old = lax.dynamic_index_in_dim(held, block)
            return lax.dynamic_update_index_in_dim(held, jnp.where(mine, new, old), block, 0)

        key = lax.dynamic_slice_in_dim(keys, first + size, size, axis=2)[None]  # [1, K, D, size]
        value = lax.dynamic_slice_in_dim(values, first + size, size, axis=1)[None]  # [1, K, size, D]
        return Pool(merge(pool.keys, key, mine), merge(pool.values, value, mine[:, None]))

    return lax.fori_loop(0, writes.total, write, pool)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for indices known to be in range."""
    return x.at[index].get(mode="promise_in_bounds")


# Attending.


def _loaded(x: jax.Array) -> jax.Array:
    """What the pool holds, as float32."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)


def _contract(
    pool: jax.Array,
    blocks: Int32[jax.Array, " B"],
    weights: Float32[jax.Array, "B K G R"],
    held: Bool[jax.Array, "B R"] | None = None,
) -> Float32[jax.Array, "B K G lanes"]:
    """sum over r of weights[b, k, g, r] * pool[blocks[b], k, r, :], for one query per row.

    A batched dot would copy each block out of the pool before it multiplies; sums of slices fuse with the read. Terms
    of neighbouring r are added while the block streams by, in 16 partial sums, and those are added up at the end.

    Args:
      pool: [n_blocks, K, R, lanes], float32 or the bits of bfloat16.
      held: rows r that may be read; the others may hold NaN.
    """
    n_blocks, heads, reduced, lanes = pool.shape
    sums = next((n for n in range(_PARTIAL_SUMS, reduced) if reduced % n == 0), reduced)
    n_terms = reduced // sums
    pool = pool.reshape(n_blocks, heads, sums, n_terms, lanes)
    weights = weights.reshape(*weights.shape[:-1], sums, n_terms)
    partial_sums = jnp.float32(0)
    for term in range(n_terms):
        part = _loaded(pool.at[blocks, :, :, term].get(mode="promise_in_bounds"))  # [B, K, sums, lanes]
        if held is not None:
            part = jnp.where(held[:, None, term::n_terms, None], part, 0)
        partial_sums += weights[..., term, None] * part[:, :, None]  # [B, K, G, sums, lanes]
    return sum(partial_sums[..., i, :] for i in range(1, sums)) + partial_sums[..., 0, :]


def _attend_decodes(
    q: Float32[jax.Array, "T K G D"],
    out: Float32[jax.Array, "T K G D"],
    pool: Pool,
    decodes: Decodes,
    shape: AttentionShape,
    slopes: Float32[jax.Array, "K G 1"] | None,
    scale: float,
) -> Float32[jax.Array, "T K G D"]:
    n_tokens, heads, group, dim = q.shape
    n_chunks, size = decodes.token.shape[0], shape.block_size
    rows, blocks = _decode_step(n_chunks, shape)

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * rows, n_chunks - rows)
        token = lax.dynamic_slice_in_dim(decodes.token, first, rows)
        kv_len = lax.dynamic_slice_in_dim(decodes.kv_len, first, rows)
        query = _rows(q, token)  # [rows, K, G, D]
        queries = jnp.repeat(query, blocks, axis=0)

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [rows, K, G, 1], [rows, K, G, 1], [rows, K, G, D]
            block = lax.dynamic_slice(decodes.tables, (first, j * blocks), (rows, blocks)).reshape(-1)
            position = (j * blocks * size + jnp.arange(blocks * size)).reshape(blocks, 1, 1, size)
            held = position < kv_len[:, None, None, None, None]  # [rows, blocks, 1, 1, size]
            scores = _contract(pool.keys, block, queries).reshape(rows, blocks, heads, group, size) * scale
            if slopes is not None:
                back = position - (kv_len - 1)[:, None, None, None, None]
                scores += slopes * back.astype(jnp.float32)
            scores = jnp.where(held, scores, _LOWEST)
            raised = jnp.maximum(maximum, scores.max(-1, keepdims=True).max(1))
            weights = jnp.where(held, jnp.exp(scores - raised[:, None]), 0)
            shrink = jnp.exp(maximum - raised)
            new = _contract(pool.values, block, weights.reshape(-1, heads, group, size), held.reshape(-1, size))
            acc = acc * shrink
            for b in range(blocks):
                acc += new.reshape(rows, blocks, heads, group, dim)[:, b]
            return raised, total * shrink + weights.sum(-1, keepdims=True).sum(1), acc

        _, total, acc = lax.fori_loop(0, -(-kv_len[0] // (blocks * size)), step, _empty((rows, heads, group), dim))
        # Rows past the last decode aim past the last token, where nothing is written.
        token = jnp.where(kv_len > 0, token, n_tokens)
        return out.at[token].set(acc / jnp.where(total > 0, total, 1), mode="drop")

    return lax.fori_loop(0, -(-decodes.total // rows), attend, out)


def _attend_prompts(
    q: Float32[jax.Array, "T K G D"],
    out: Float32[jax.Array, "T K G D"],
    pool: Pool,
    meta: Meta,
    shape: AttentionShape,
    slopes: Float32[jax.Array, "K G 1"] | None,
    scale: float,
) -> Float32[jax.Array, "T K G D"]:
    n_tokens, heads, group, dim = q.shape
    size, tiles = shape.block_size, meta.tiles
    tile = min(_QUERY_TILE, n_tokens)
    blocks = min(max(1, _TILE_SLOTS // size), shape.max_blocks)
    # Products of bfloat16 are exact in float32, and many CPUs and all accelerators multiply them faster.
    dtype = jnp.bfloat16 if shape.dtype == shape.pool_dtype == _BFLOAT16 else jnp.float32
    dot = partial(jnp.einsum, precision=_HIGHEST, preferred_element_type=jnp.float32)

    def operand(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits, dtype) if dtype == jnp.bfloat16 else _loaded(bits)

    def attend(i: jax.Array, out: jax.Array) -> jax.Array:
        start, end, last = tiles.start[i], tiles.end[i], tiles.last[i]
        table = lax.dynamic_index_in_dim(meta.tables, tiles.chunk[i], keepdims=False)
        origin = jnp.minimum(start, n_tokens - tile)  # the last tile of all may reach back over earlier tokens
        flat = origin + jnp.arange(tile)
        mine = (flat >= start) & (flat < end)
        position = jnp.where(mine, last - (end - 1 - flat), -1)  # [tile]
        query = lax.dynamic_slice_in_dim(q, origin, tile).transpose(1, 2, 0, 3)  # [K, G, tile, D]
        query = query.reshape(heads, group * tile, dim).astype(dtype)

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [K, G, tile, 1], [K, G, tile, 1], [K, G, tile, D]
            block = _rows(table, jnp.minimum(j * blocks + jnp.arange(blocks), last // size))
            key_position = j * blocks * size + jnp.arange(blocks * size)
            keys = _rows(pool.keys, block).transpose(1, 2, 0, 3).reshape(heads, dim, blocks * size)
            values = _rows(pool.values, block).transpose(1, 0, 2, 3).reshape(heads, blocks * size, dim)
            # A slot nobody wrote may hold NaN, and 0 * NaN is NaN.
            values = jnp.where((key_position <= last)[:, None], values, 0)
            scores = dot("kqd,kds->kqs", query, operand(keys)).reshape(heads, group, tile, -1) * scale
            if slopes is not None:
                scores += slopes[..., None] * (key_position - last).astype(jnp.float32)
            visible = key_position <= position[:, None]  # [tile, slots]
            scores = jnp.where(visible, scores, _LOWEST)
            raised = jnp.maximum(maximum, scores.max(-1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - raised), 0)
            shrink = jnp.exp(maximum - raised)
            new = dot("kqs,ksd->kqd", weights.reshape(heads, group * tile, -1).astype(dtype), operand(values))
            acc = acc * shrink + new.reshape(acc.shape)
            return raised, total * shrink + weights.sum(-1, keepdims=True), acc

        _, total, acc = lax.fori_loop(0, last // (blocks * size) + 1, step, _empty((heads, group, tile), dim))
        new = (acc / jnp.where(total > 0, total, 1)).transpose(2, 0, 1, 3)  # [tile, K, G, D]
        old = lax.dynamic_slice_in_dim(out, origin, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None, None], new, old), origin, 0)

    return lax.fori_loop(0, tiles.total, attend, out)


def _empty(leading: tuple[int, ...], dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum and accumulator of a softmax over nothing."""
    return (
        jnp.full((*leading, 1), _LOWEST, jnp.float32),
        jnp.zeros((*leading, 1), jnp.float32),
        jnp.zeros((*leading, dim), jnp.float32),
    )


BACKEND = XlaBackend()
