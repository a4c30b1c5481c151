"""The pool of the plain-JAX and native backends: its layout, and writes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from pallas_kernels import int8
from pallas_kernels.api import AttentionShape
from pallas_kernels.xla.work import Decodes, Writes

BFLOAT16, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)


class XlaPool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or other values of each.

    The innermost axis of a key block is its slots, so scores of adjacent slots are in adjacent lanes. bfloat16 is
    stored as its bits (uint16): XLA's CPU compiler widens the whole bfloat16 operand of a slice or an update, pool and
    all.
    Scales belong to int8 (`int8.quantize`) and are None otherwise.
    """

    keys: Any  # [n_blocks, K, D, block_size]
    values: Any  # [n_blocks, K, block_size, D]
    key_scales: Any = None  # float32[n_blocks, K, block_size]
    value_scales: Any = None  # likewise


_SLOT_AXIS = XlaPool(keys=3, values=2, key_scales=2, value_scales=2)


def stored(k: Float[jax.Array, "T K D"], v: Float[jax.Array, "T K D"], shape: AttentionShape) -> XlaPool:
    """Keys and values of tokens in the pool's layout; T in place of blocks and slots."""
    if shape.pool_dtype == INT8:
        (keys, key_scales), (values, value_scales) = int8.quantize(k), int8.quantize(v)
        return XlaPool(keys, values, key_scales, value_scales)
    k, v = k.astype(shape.pool_dtype), v.astype(shape.pool_dtype)
    if shape.pool_dtype == BFLOAT16:
        k, v = (lax.bitcast_convert_type(x, jnp.uint16) for x in (k, v))
    return XlaPool(k, v)


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for indices known to be in range."""
    return x.at[index].get(mode="promise_in_bounds")


def loaded(x: jax.Array) -> jax.Array:
    """Values of the pool as float32."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)


def _each(change: Callable[..., jax.Array], *pools: XlaPool) -> XlaPool:
    """Apply `change` to the corresponding parts of pools that have them."""
    return XlaPool._make(None if parts[0] is None else change(*parts) for parts in zip(*pools, strict=True))


def write_decodes(new: XlaPool, pool: XlaPool, decodes: Decodes) -> XlaPool:
    def write(i: jax.Array, pool: XlaPool) -> XlaPool:
        block, slot, token = decodes.slot[i, 0], decodes.slot[i, 1], decodes.slot[i, 2]

        def put(held: jax.Array, new: jax.Array, slot_axis: int) -> jax.Array:
            one = jnp.expand_dims(lax.dynamic_slice_in_dim(new, token, 1), slot_axis)
            place = [block, *[0] * (held.ndim - 1)]
            place[slot_axis] = slot
            return lax.dynamic_update_slice(held, one, place)

        return _each(put, pool, new, _SLOT_AXIS)

    return lax.fori_loop(0, decodes.written, write, pool)


def write_prompts(new: XlaPool, pool: XlaPool, writes: Writes) -> XlaPool:
    size = pool.values.shape[2]
    # Padded for a block that begins or ends outside the batch, and transposed to the pool's layout, once for all
    # blocks. If XLA merges the padding with the transposition, that takes four times as long.
    new = lax.optimization_barrier(jax.tree.map(lambda x: jnp.pad(x, [(size, size)] + [(0, 0)] * (x.ndim - 1)), new))
    new = _each(lambda x, slot_axis: jnp.moveaxis(x, 0, slot_axis - 1), new, _SLOT_AXIS)

    def write(i: jax.Array, pool: XlaPool) -> XlaPool:
        block, first = writes.block[i], writes.token[i]
        token = first + jnp.arange(size)
        mine = (token >= writes.start[i]) & (token < writes.end[i])

        def merge(held: jax.Array, new: jax.Array, slot_axis: int) -> jax.Array:
            one = lax.dynamic_slice_in_dim(new, first + size, size, axis=slot_axis - 1)[None]
            old = lax.dynamic_index_in_dim(held, block)
            here = mine.reshape(-1, *[1] * (held.ndim - 1 - slot_axis))
            return lax.dynamic_update_index_in_dim(held, jnp.where(here, one, old), block, 0)

        return _each(merge, pool, new, _SLOT_AXIS)

    return lax.fori_loop(0, writes.total, write, pool)
