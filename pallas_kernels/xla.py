"""Ragged attention in plain JAX, written so that XLA makes it fast on a CPU; it runs on every platform.

Chunks of length 1 (decodes) and longer ones (prompts) take separate loops, both over work that exists: a decode row
visits the blocks its context fills, a query tile of a prompt the blocks up to its last position. Trip counts are data,
so cost follows the context in use and neither the window nor the pool. Softmax is online (Milakov and Gimelshein,
2018): a block that a mask empties leaves maximum, sum and accumulator as they were, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.api import AttentionBatch, AttentionShape

# Queries of a prompt chunk that are served together.
_QUERY_TILE = 32
# Stands for minus infinity where a difference of two of them must not be NaN.
_LOWEST = -1e30
_HIGHEST = lax.Precision.HIGHEST


class Pool(NamedTuple):
    """One layer's keys and values. A key block holds its slots innermost, so that scores of neighbouring slots are
    neighbouring lanes."""

    keys: Any  # [n_blocks, K, D, block_size], arrays or their ShapeDtypeStruct
    values: Any  # [n_blocks, K, block_size, D]


class Rows(NamedTuple):
    """Chunks of length 1, first `total` entries of C."""

    total: jax.Array  # int32[]
    chunk: jax.Array  # int32[C]
    token: jax.Array  # int32[C], flat token


class Tiles(NamedTuple):
    """Pieces of longer chunks: query tiles, or blocks to write. First `total` entries."""

    total: jax.Array  # int32[]
    chunk: jax.Array  # int32[n]
    piece: jax.Array  # int32[n], which piece of its chunk


class Meta(NamedTuple):
    batch: AttentionBatch
    decodes: Rows
    writes: Tiles
    queries: Tiles


class XlaBackend:
    name = "xla"
    platforms = None

    def supports(self, shape: AttentionShape) -> str | None:
        for what, dtype in (("queries", shape.dtype), ("pool", shape.pool_dtype)):
            if dtype not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
                return f"{what} of {dtype}; it serves float32 and bfloat16"
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 64

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        # CPUs compute in float32 whatever is stored, and converting costs more than the bytes it saves.
        return np.dtype(np.float32) if platform == "cpu" else np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> Pool:
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.block_size
        return Pool(
            keys=jax.ShapeDtypeStruct((n_blocks, heads, dim, size), shape.pool_dtype),
            values=jax.ShapeDtypeStruct((n_blocks, heads, size, dim), shape.pool_dtype),
        )

    def prepare(self, batch: AttentionBatch, shape: AttentionShape) -> Meta:
        with jax.named_scope("attention_prepare"):
            n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
            lengths = jnp.diff(batch.query_offsets)
            single = lengths == 1
            order = jnp.argsort(~single, stable=True).astype(jnp.int32)
            decodes = Rows(jnp.sum(single, dtype=jnp.int32), order, batch.query_offsets[order])
            long = jnp.where(lengths > 1, lengths, 0)
            tile = min(_QUERY_TILE, n_tokens)
            queries = _tiles(-(-long // tile), n_tokens // tile + n_chunks)
            first = (batch.kv_lens - long) // shape.block_size
            blocks = jnp.where(long > 0, -(-batch.kv_lens // shape.block_size) - first, 0)
            writes = _tiles(blocks, n_tokens // shape.block_size + 2 * n_chunks)
            return Meta(batch, decodes, writes, queries)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: Pool,
        meta: Meta,
        shape: AttentionShape,
        *,
        slopes: jax.Array | np.ndarray | None,
        scale: float,
    ) -> tuple[jax.Array, Pool]:
        with jax.named_scope("attention_write"):
            pool = _write_decodes(k, v, pool, meta, shape)
            pool = _write_prompts(k, v, pool, meta, shape)
        with jax.named_scope("attention_attend"):
            group = (shape.num_kv_heads, shape.group)
            bias = None if slopes is None else jnp.asarray(slopes, jnp.float32).reshape(*group, 1)
            queries = (q.astype(jnp.float32) * scale).reshape(-1, *group, shape.head_dim)  # [T, K, G, D]
            out = jnp.zeros(queries.shape, jnp.float32)
            out = _attend_decodes(queries, out, pool, meta, shape, bias)
            out = _attend_prompts(queries, out, pool, meta, shape, bias)
            return out.reshape(q.shape).astype(q.dtype), pool


def _tiles(counts: jax.Array, most: int) -> Tiles:
    """Numbers the pieces of all chunks, `counts` int32[C] of them, in one list of `most` entries."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    pieces = jnp.arange(most, dtype=jnp.int32)
    chunk = jnp.searchsorted(ends, pieces, side="right").astype(jnp.int32)
    chunk = jnp.minimum(chunk, counts.shape[0] - 1)
    return Tiles(ends[-1], chunk, pieces - (ends - counts)[chunk])


def _write_decodes(k: jax.Array, v: jax.Array, pool: Pool, meta: Meta, shape: AttentionShape) -> Pool:
    batch, decodes = meta.batch, meta.decodes

    def write(i: jax.Array, pool: Pool) -> Pool:
        chunk, token = decodes.chunk[i], decodes.token[i]
        position = batch.kv_lens[chunk] - 1
        block, slot = batch.block_tables[chunk, position // shape.block_size], position % shape.block_size
        key = lax.dynamic_slice_in_dim(k, token, 1).astype(pool.keys.dtype)[..., None]  # [1, K, D, 1]
        value = lax.dynamic_slice_in_dim(v, token, 1).astype(pool.values.dtype)[:, :, None]  # [1, K, 1, D]
        return Pool(
            lax.dynamic_update_slice(pool.keys, key, (block, 0, 0, slot)),
            lax.dynamic_update_slice(pool.values, value, (block, 0, slot, 0)),
        )

    return lax.fori_loop(0, decodes.total, write, pool)


def _write_prompts(k: jax.Array, v: jax.Array, pool: Pool, meta: Meta, shape: AttentionShape) -> Pool:
    batch, size = meta.batch, shape.block_size
    pad = ((size, size), (0, 0), (0, 0))  # a block may begin before the first flat token and end after the last
    k, v = jnp.pad(k.astype(pool.keys.dtype), pad), jnp.pad(v.astype(pool.values.dtype), pad)

    def write(i: jax.Array, pool: Pool) -> Pool:
        chunk, index = meta.writes.chunk[i], meta.writes.piece[i]
        start, end = batch.query_offsets[chunk], batch.query_offsets[chunk + 1]
        begin = batch.kv_lens[chunk] - (end - start)  # position of the chunk's first token
        column = begin // size + index
        token = start + column * size - begin  # flat token of the block's slot 0
        flat = token + jnp.arange(size)
        mine = (flat >= start) & (flat < end)
        block = batch.block_tables[chunk, column]

        def merge(held: jax.Array, new: jax.Array, mine: jax.Array) -> jax.Array:
            old = lax.dynamic_index_in_dim(held, block)
            return lax.dynamic_update_index_in_dim(held, jnp.where(mine, new, old), block, 0)

        key = lax.dynamic_slice_in_dim(k, token + size, size).transpose(1, 2, 0)[None]  # [1, K, D, size]
        value = lax.dynamic_slice_in_dim(v, token + size, size).transpose(1, 0, 2)[None]  # [1, K, size, D]
        return Pool(merge(pool.keys, key, mine), merge(pool.values, value, mine[:, None]))

    return lax.fori_loop(0, meta.writes.total, write, pool)


def _block_step(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    q: jax.Array,  # [K, Q, D], scaled
    keys: jax.Array,  # [K, D, size]
    values: jax.Array,  # [K, size, D]
    bias: jax.Array | None,  # [K, Q, size]
    visible: jax.Array,  # bool [Q, size]
    held: jax.Array,  # bool [size]: slots that hold a token of the row
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of keys taken into the running maximum [K, Q, 1], sum [K, Q, 1] and accumulator [K, Q, D]."""
    maximum, total, acc = carry
    scores = jnp.einsum("kqd,kds->kqs", q, keys.astype(jnp.float32), precision=_HIGHEST)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(visible, scores, _LOWEST)
    raised = jnp.maximum(maximum, scores.max(-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - raised), 0)
    shrink = jnp.exp(maximum - raised)
    # A slot nobody wrote may hold NaN, and 0 * NaN is NaN.
    values = jnp.where(held[:, None], values.astype(jnp.float32), 0)
    acc = acc * shrink + jnp.einsum("kqs,ksd->kqd", weights, values, precision=_HIGHEST)
    return raised, total * shrink + weights.sum(-1, keepdims=True), acc


def _empty(heads: int, queries: int, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        jnp.full((heads, queries, 1), _LOWEST, jnp.float32),
        jnp.zeros((heads, queries, 1), jnp.float32),
        jnp.zeros((heads, queries, dim), jnp.float32),
    )


def _attend_decodes(
    q: jax.Array, out: jax.Array, pool: Pool, meta: Meta, shape: AttentionShape, bias: jax.Array | None
) -> jax.Array:
    batch, decodes, size = meta.batch, meta.decodes, shape.block_size

    def row(i: jax.Array, out: jax.Array) -> jax.Array:
        chunk, token = decodes.chunk[i], decodes.token[i]
        kv_len = batch.kv_lens[chunk]
        query = lax.dynamic_index_in_dim(q, token, keepdims=False)  # [K, G, D]

        def step(j: jax.Array, carry):
            block = batch.block_tables[chunk, j]
            position = j * size + jnp.arange(size)
            held = position < kv_len
            return _block_step(
                carry,
                query,
                lax.dynamic_index_in_dim(pool.keys, block, keepdims=False),
                lax.dynamic_index_in_dim(pool.values, block, keepdims=False),
                None if bias is None else bias * (position - kv_len + 1).astype(jnp.float32),
                held[None],
                held,
            )

        _, total, acc = lax.fori_loop(0, -(-kv_len // size), step, _empty(*query.shape))
        return lax.dynamic_update_index_in_dim(out, acc / total, token, 0)

    return lax.fori_loop(0, decodes.total, row, out)


def _attend_prompts(
    q: jax.Array, out: jax.Array, pool: Pool, meta: Meta, shape: AttentionShape, bias: jax.Array | None
) -> jax.Array:
    batch, size, group = meta.batch, shape.block_size, shape.group
    n_tokens, heads, _, dim = q.shape
    tile = min(_QUERY_TILE, n_tokens)
    if bias is not None:
        bias = jnp.repeat(bias, tile, axis=1)  # [K, G * tile, 1]

    def piece(i: jax.Array, out: jax.Array) -> jax.Array:
        chunk, index = meta.queries.chunk[i], meta.queries.piece[i]
        start, end = batch.query_offsets[chunk], batch.query_offsets[chunk + 1]
        first = start + index * tile
        origin = jnp.minimum(first, n_tokens - tile)  # the last tile of all may reach back over earlier tokens
        flat = origin + jnp.arange(tile)
        mine = (flat >= first) & (flat < end)
        position = jnp.where(mine, batch.kv_lens[chunk] - end + flat, -1)  # [tile]
        last = position.max()
        query = lax.dynamic_slice_in_dim(q, origin, tile).transpose(1, 2, 0, 3).reshape(heads, group * tile, dim)

        def step(j: jax.Array, carry):
            block = batch.block_tables[chunk, j]
            key_position = j * size + jnp.arange(size)
            visible = key_position <= jnp.tile(position, group)[:, None]  # [G * tile, size]
            return _block_step(
                carry,
                query,
                lax.dynamic_index_in_dim(pool.keys, block, keepdims=False),
                lax.dynamic_index_in_dim(pool.values, block, keepdims=False),
                None if bias is None else bias * (key_position - last).astype(jnp.float32),
                visible,
                key_position <= last,
            )

        _, total, acc = lax.fori_loop(0, last // size + 1, step, _empty(heads, group * tile, dim))
        new = (acc / jnp.where(total > 0, total, 1)).reshape(heads, group, tile, dim).transpose(2, 0, 1, 3)
        old = lax.dynamic_slice_in_dim(out, origin, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None, None], new, old), origin, 0)

    return lax.fori_loop(0, meta.queries.total, piece, out)


BACKEND = XlaBackend()
