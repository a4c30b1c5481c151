"""The loops of the plain-JAX backend over decodes and over tiles of longer chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float32, Int32

from pallas_kernels.api import AttentionShape, PartialAttention
from pallas_kernels.xla.pool import BFLOAT16, INT8, XlaPool, loaded, rows_at
from pallas_kernels.xla.work import XlaMetadata, decode_step, positions, query_tile

# Most slots that the queries of a tile visit in one loop step.
_TILE_SLOTS = 128
# Partial sums that `_contract` keeps. XLA recomputes a producer inside each of up to 15 consumers; from 16 on it
# stores it, which is what makes the contraction one pass over the pool.
_PARTIAL_SUMS = 16
# Replaces minus infinity where a difference of two of them must not be NaN.
_LOWEST = -1e30


def attend_decodes(
    q: Float32[jax.Array, "T K G D"],
    found: PartialAttention,
    pool: XlaPool,
    meta: XlaMetadata,
    shape: AttentionShape,
    slopes: Float32[jax.Array, "K G 1"] | None,
    sinks: Float32[jax.Array, "K G 1"] | None,
    scale: float,
    window: int | None,
) -> PartialAttention:
    """Adds decodes to `found`: out [T, K, G, D], and lse [T, K, G, 1] or None."""
    n_tokens, heads, group, dim = q.shape
    decodes, size = meta.decodes, shape.local_slots
    n_chunks = decodes.token.shape[0]
    rows, blocks = decode_step(n_chunks, shape)

    def attend(i: jax.Array, found: PartialAttention) -> PartialAttention:
        first = jnp.minimum(i * rows, n_chunks - rows)
        token = lax.dynamic_slice_in_dim(decodes.token, first, rows)
        kv_len = lax.dynamic_slice_in_dim(decodes.kv_len, first, rows)
        query = rows_at(q, token)  # [rows, K, G, D]
        queries = jnp.repeat(query, blocks, axis=0)
        n_steps, slots = _decode_steps(meta, first, kv_len, shape, window)

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [rows, K, G, 1], [rows, K, G, 1], [rows, K, G, D]
            block, position, held = slots(j)
            scores = _contract(pool.keys, block, queries).reshape(rows, blocks, heads, group, size) * scale
            if pool.key_scales is not None:
                scores *= rows_at(pool.key_scales, block).reshape(rows, blocks, heads, 1, size)
            scores = _soft_capped(scores, shape)
            if slopes is not None:
                back = position - (kv_len - 1)[:, None, None, None, None]
                scores += slopes * back.astype(jnp.float32)
            scores = jnp.where(held, scores, _LOWEST)
            raised = jnp.maximum(maximum, scores.max(-1, keepdims=True).max(1))
            weights = jnp.where(held, jnp.exp(scores - raised[:, None]), 0)
            shrink = jnp.exp(maximum - raised)
            total = total * shrink + weights.sum(-1, keepdims=True).sum(1)
            readable: jax.Array | None = held.reshape(-1, size)
            if pool.value_scales is not None:  # the scales may be NaN
                value_scales = rows_at(pool.value_scales, block).reshape(rows, blocks, heads, 1, size)
                weights, readable = jnp.where(held, weights * value_scales, 0), None
            new = _contract(pool.values, block, weights.reshape(-1, heads, group, size), readable)
            acc = acc * shrink
            for b in range(blocks):
                acc += new.reshape(rows, blocks, heads, group, dim)[:, b]
            return raised, total, acc

        maximum, total, acc = lax.fori_loop(0, n_steps, step, _initial((rows, heads, group), dim, sinks))
        # Rows past the last decode have an index past the last token, so nothing is written for them.
        token = jnp.where(kv_len > 0, token, n_tokens)
        out = found.out.at[token].set(acc / jnp.where(total > 0, total, 1), mode="drop")
        if found.lse is None:
            return PartialAttention(out, None)
        return PartialAttention(out, found.lse.at[token].set(_log_sum(maximum, total), mode="drop"))

    return lax.fori_loop(0, -(-decodes.total // rows), attend, found)


def _decode_steps(
    meta: XlaMetadata, first: jax.Array, kv_len: Int32[jax.Array, " rows"], shape: AttentionShape, window: int | None
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]]:
    """The number of steps of the rows from `first` on, and the slots that each step visits.

    Returns:
      (steps, slots): slots(step) is (blocks of all rows [rows * blocks], positions of their slots [rows or nothing,
      blocks, 1, 1, size], which of those the rows see [rows, blocks, 1, 1, size]).
    """
    decodes, size = meta.decodes, shape.block_size
    rows, blocks = decode_step(decodes.token.shape[0], shape)
    if window is None:  # all rows are in the same columns of their tables

        def slots(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            block = lax.dynamic_slice(decodes.tables, (first, j * blocks), (rows, blocks)).reshape(-1)
            position = positions(j * blocks + jnp.arange(blocks), meta, shape)[:, None, None]
            return block, position, position < kv_len[:, None, None, None, None]

        return -(-kv_len[0] // (blocks * size)), slots

    start = jnp.maximum(kv_len - window, 0) // size  # column of the first block that a row sees
    tables = lax.dynamic_slice_in_dim(decodes.tables, first, rows)

    def slots_from_start(j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        column = start[:, None] + j * blocks + jnp.arange(blocks)
        block = jnp.take_along_axis(tables, column, axis=1, mode="clip").reshape(-1)
        position = positions(column, meta, shape)[:, :, None, None]
        after = kv_len[:, None, None, None, None]
        return block, position, (position >= after - window) & (position < after)

    return jnp.max(-(-(kv_len - start * size) // (blocks * size))), slots_from_start


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
      pool: [n_blocks, K, R, lanes], float32, the bits of bfloat16, or int8 without its scales.
      held: rows r that may be read; the others may hold NaN.
    """
    n_blocks, heads, reduced, lanes = pool.shape
    sums = next((n for n in range(_PARTIAL_SUMS, reduced) if reduced % n == 0), reduced)
    n_terms = reduced // sums
    pool = pool.reshape(n_blocks, heads, sums, n_terms, lanes)
    weights = weights.reshape(*weights.shape[:-1], sums, n_terms)
    partial_sums = jnp.float32(0)
    for term in range(n_terms):
        part = loaded(pool.at[blocks, :, :, term].get(mode="promise_in_bounds"))  # [B, K, sums, lanes]
        if held is not None:
            part = jnp.where(held[:, None, term::n_terms, None], part, 0)
        partial_sums += weights[..., term, None] * part[:, :, None]  # [B, K, G, sums, lanes]
    return sum(partial_sums[..., i, :] for i in range(1, sums)) + partial_sums[..., 0, :]


def attend_prompts(
    q: Float32[jax.Array, "T K G D"],
    found: PartialAttention,
    pool: XlaPool,
    meta: XlaMetadata,
    shape: AttentionShape,
    slopes: Float32[jax.Array, "K G 1"] | None,
    sinks: Float32[jax.Array, "K G 1"] | None,
    scale: float,
    window: int | None,
) -> PartialAttention:
    """Adds longer chunks to `found`: out [T, K, G, D], and lse [T, K, G, 1] or None."""
    n_tokens, heads, group, dim = q.shape
    size, local, tiles = shape.block_size, shape.local_slots, meta.tiles
    tile = query_tile(n_tokens)
    blocks = min(max(1, _TILE_SLOTS // local), shape.max_blocks)
    # Products of bfloat16, which represents every int8 exactly, are exact in float32, and many CPUs and all
    # accelerators compute them faster.
    narrow = shape.dtype == BFLOAT16 and shape.pool_dtype in (BFLOAT16, INT8)
    dtype = jnp.bfloat16 if narrow else jnp.float32
    dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def operand(stored: jax.Array) -> jax.Array:
        if not narrow:
            return loaded(stored)
        return lax.bitcast_convert_type(stored, dtype) if stored.dtype == jnp.uint16 else stored.astype(dtype)

    def scales(held: jax.Array, block: jax.Array) -> jax.Array:
        return rows_at(held, block).swapaxes(0, 1).reshape(heads, 1, 1, -1)  # [K, 1, 1, slots]

    def attend(i: jax.Array, found: PartialAttention) -> PartialAttention:
        start, end, last = tiles.start[i], tiles.end[i], tiles.last[i]
        table = lax.dynamic_index_in_dim(meta.tables, tiles.chunk[i], keepdims=False)
        origin = jnp.minimum(start, n_tokens - tile)  # the very last tile may overlap earlier tokens
        flat = origin + jnp.arange(tile)
        mine = (flat >= start) & (flat < end)
        position = jnp.where(mine, last - (end - 1 - flat), -1)  # [tile]
        lowest = 0 if window is None else jnp.maximum(last - (end - 1 - start) - window + 1, 0)  # that a query sees
        query = lax.dynamic_slice_in_dim(q, origin, tile).transpose(1, 2, 0, 3)  # [K, G, tile, D]
        query = query.reshape(heads, group * tile, dim).astype(dtype)

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            maximum, total, acc = carry  # [K, G, tile, 1], [K, G, tile, 1], [K, G, tile, D]
            block = rows_at(table, jnp.minimum(j * blocks + jnp.arange(blocks), last // size))
            key_position = positions(j * blocks + jnp.arange(blocks), meta, shape).reshape(-1)
            keys = rows_at(pool.keys, block).transpose(1, 2, 0, 3).reshape(heads, dim, blocks * local)
            values = rows_at(pool.values, block).transpose(1, 0, 2, 3).reshape(heads, blocks * local, dim)
            # A slot that is unwritten, or of another row, may hold NaN, and 0 * NaN is NaN.
            readable = key_position <= last
            if window is not None:
                readable &= key_position >= lowest
            values = jnp.where(readable[:, None], values, 0)
            scores = dot("kqd,kds->kqs", query, operand(keys)).reshape(heads, group, tile, -1) * scale
            if pool.key_scales is not None:
                scores *= scales(pool.key_scales, block)
            scores = _soft_capped(scores, shape)
            if slopes is not None:
                scores += slopes[..., None] * (key_position - last).astype(jnp.float32)
            visible = key_position <= position[:, None]  # [tile, slots]
            if window is not None:
                visible &= key_position > position[:, None] - window
            scores = jnp.where(visible, scores, _LOWEST)
            raised = jnp.maximum(maximum, scores.max(-1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - raised), 0)
            shrink = jnp.exp(maximum - raised)
            total = total * shrink + weights.sum(-1, keepdims=True)
            if pool.value_scales is not None:
                weights = jnp.where(visible, weights * scales(pool.value_scales, block), 0)
            new = dot("kqs,ksd->kqd", weights.reshape(heads, group * tile, -1).astype(dtype), operand(values))
            acc = acc * shrink + new.reshape(acc.shape)
            return raised, total, acc

        step_slots = blocks * size
        tile_sinks = sinks if sinks is None else sinks[..., None]  # [K, G, 1, 1]
        if tile_sinks is not None and slopes is not None:  # biases count from `last`
            tile_sinks += slopes[..., None] * (position - last).astype(jnp.float32)[:, None]
        nothing = _initial((heads, group, tile), dim, tile_sinks)
        maximum, total, acc = lax.fori_loop(lowest // step_slots, last // step_slots + 1, step, nothing)

        def put(held: jax.Array, new: jax.Array) -> jax.Array:  # [T, K, G, ...], [K, G, tile, ...]
            old = lax.dynamic_slice_in_dim(held, origin, tile)
            new = jnp.where(mine[:, None, None, None], new.transpose(2, 0, 1, 3), old)
            return lax.dynamic_update_slice_in_dim(held, new, origin, 0)

        out = put(found.out, acc / jnp.where(total > 0, total, 1))
        return PartialAttention(out, None if found.lse is None else put(found.lse, _log_sum(maximum, total)))

    return lax.fori_loop(0, tiles.total, attend, found)


def _initial(leading: tuple[int, ...], dim: int, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum, sum and accumulator of a softmax over the sinks, or an empty one."""
    shape = (*leading, 1)
    if sinks is None:
        maximum, total = jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        maximum, total = jnp.broadcast_to(jnp.maximum(sinks, _LOWEST), shape), jnp.ones(shape, jnp.float32)
    return maximum, total, jnp.zeros((*leading, dim), jnp.float32)


def _soft_capped(scores: jax.Array, shape: AttentionShape) -> jax.Array:
    return scores if shape.soft_cap is None else shape.soft_cap * jnp.tanh(scores / shape.soft_cap)


def _log_sum(maximum: jax.Array, total: jax.Array) -> jax.Array:
    return jnp.where(total > 0, maximum + jnp.log(jnp.where(total > 0, total, 1)), _LOWEST)
