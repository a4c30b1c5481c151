"""The layout of keys and values for the Mosaic kernels, and the arithmetic they share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.api import AttentionShape

LANES, SUBLANES = 128, 8
# Replaces minus infinity where a difference of two of them must not be NaN.
LOWEST = -1e30
BFLOAT16, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)


class TpuPool(NamedTuple):
    """Keys and values: arrays, their `ShapeDtypeStruct`, or the names of their axes.

    A slot is a row of a matmul operand: its key heads, or its value heads, lie side by side along the lanes. Scales
    belong to int8 (`int8.quantize`), one row per head, and are None otherwise.
    """

    kv: Any  # [n_blocks, 2, block_size, lanes]
    scales: Any = None  # float32[n_blocks, 2, scale_rows, block_size]


# To check that a copy is within its arrays takes a core longer than to start it. The host checks block tables.
COMPILER_PARAMS = pltpu.CompilerParams(disable_bounds_checks=True)
# Of kernels whose grid is the cores of a chip.
ON_CORES = dataclasses.replace(COMPILER_PARAMS, dimension_semantics=("parallel",))


def kept_in_memory(pool: TpuPool, interpret: Any) -> TpuPool:
    """The pool as an operand that stays in the device's memory.

    The compiler would copy one that fits on the chip there and back in every step.
    """
    if interpret:
        return pool
    return jax.tree.map(lambda leaf: pltpu.with_memory_space_constraint(leaf, pltpu.HBM), pool)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def lanes_of(shape: AttentionShape) -> int:
    """Lanes of a slot: all KV heads, and zeros up to a whole lane tile."""
    return round_up(shape.num_kv_heads * shape.head_dim, LANES)


def head_span(shape: AttentionShape) -> int:
    """Lanes of the lane tiles that can hold a whole head at any start."""
    dim = shape.head_dim
    starts = range(0, shape.num_kv_heads * dim, dim)
    widest = max(round_up(start + dim, LANES) - start // LANES * LANES for start in starts)
    return min(widest, lanes_of(shape))


def scale_rows(shape: AttentionShape) -> int:
    """Rows of a block's scales: one per KV head, and zeros up to whole registers."""
    return round_up(shape.num_kv_heads, SUBLANES)


def slot_tile(dtype: np.dtype) -> int:
    """Slots in one memory tile: copies begin and end at multiples of it."""
    return SUBLANES * 4 // dtype.itemsize


def packed_heads(head_dim: int) -> int:
    """Fewest heads that fill whole lane tiles."""
    return LANES // math.gcd(LANES, head_dim)


def heads_of_tile(shape: AttentionShape) -> int:
    """Query heads whose results share a lane tile: as many as fill it, or each alone."""
    if LANES % shape.head_dim or shape.slot_parts > 1:
        return 1
    heads = LANES // shape.head_dim
    return heads if shape.num_heads % heads == 0 else 1


def joint_heads(shape: AttentionShape) -> int:
    """KV heads of which no fewer have results in whole lane tiles."""
    return heads_of_tile(shape) // math.gcd(heads_of_tile(shape), shape.group)


def result_lanes(shape: AttentionShape) -> int:
    """Lanes of such a tile, and of heads wider than one.

    With several `slot_parts`, 128 lanes follow that all have the logarithm of the sum.
    """
    return round_up(shape.head_dim, LANES) + (LANES if shape.slot_parts > 1 else 0)


def side_by_side(shape: AttentionShape) -> bool:
    """Whether lines of new queries, keys and values have all heads.

    They do if a head is no whole lane tiles.
    """
    return shape.num_kv_heads > 1 and shape.head_dim % LANES > 0


def with_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """x [rows, n] with zeros up to `lanes` lanes."""
    missing = lanes - x.shape[1]
    return jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1) if missing else x


def operand_dtype(shape: AttentionShape) -> np.dtype:
    """The dtype of matmul operands: products of bfloat16 and of int8 are exact in bfloat16."""
    return BFLOAT16 if shape.dtype == BFLOAT16 and shape.pool_dtype in (BFLOAT16, INT8) else np.dtype(np.float32)


def dot(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """left [M, K] times right [K, N], or [N, K] transposed, summed in float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=jnp.float32)


def across(x: jax.Array, lanes: int) -> jax.Array:
    """x [rows, 128], equal in all lanes, as [rows, lanes].

    A copy from one lane would cost a permutation a register.
    """
    return jnp.concatenate([x] * -(-lanes // LANES), axis=1)[:, :lanes]


def score_factor(scale: float, shape: AttentionShape) -> float:
    """The factor of products of queries and keys, before `soft_capped`."""
    return scale if shape.soft_cap is None else scale / shape.soft_cap


def soft_capped(scores: jax.Array, shape: AttentionShape) -> jax.Array:
    """Scores before the bias."""
    return scores if shape.soft_cap is None else shape.soft_cap * jnp.tanh(scores)


def positions_of(slots: jax.Array, shape: AttentionShape, first_slot: Any) -> jax.Array:
    """Positions of a device's slots of some blocks in a row, counted from the first block's.

    Args:
      slots: int32, their numbers among the device's.
      first_slot: the first of those of a block that the device holds.
    """
    if shape.slot_parts == 1:
        return slots
    # Vectors have no division of integers; this one is exact for so few slots.
    block = jnp.floor((slots.astype(jnp.float32) + 0.5) / shape.local_slots).astype(jnp.int32)
    return slots + block * (shape.block_size - shape.local_slots) + first_slot


def log_sum(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """The logarithm of `total` times exp(maximum); `LOWEST` for an empty softmax."""
    return jnp.where(total > 0, maximum + jnp.log(jnp.where(total > 0, total, 1.0)), LOWEST)


def visited(kv_len: Any, window: Any, block_size: int) -> Any:
    """Slots from the first block that a row's last query sees up to the query: int32."""
    if window is None:
        return kv_len
    return kv_len - lax.div(jnp.maximum(kv_len - window, 0), block_size) * block_size
