"""Groups of KV heads of which all queries of a decode share one matmul."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import int8
from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.layout import LANES, SUBLANES, lanes_of, packed_heads, round_up, scale_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
    """A group of KV heads of which all queries share one matmul.

    Its rows are zero outside their own head's lanes.

    Row j * heads + h of a group holds query head j of those that share KV head first + h.
    """

    first: int
    heads: int
    start: int  # of the group's lanes
    lanes: int
    rows: int


def head_groups(shape: AttentionShape) -> tuple[HeadGroup, ...]:
    """Groups of as few heads as fill the sublanes of a register, and whole lane tiles."""
    packed, all_heads = packed_heads(shape.head_dim), shape.num_kv_heads
    heads = min(all_heads, packed * math.ceil(max(1, SUBLANES // shape.group) / packed))
    rows = round_up(heads * shape.group, SUBLANES)
    groups = []
    for first in range(0, all_heads, heads):
        start = first * shape.head_dim
        end = lanes_of(shape) if first + heads >= all_heads else start + heads * shape.head_dim
        groups.append(HeadGroup(first=first, heads=heads, start=start, lanes=end - start, rows=rows))
    return tuple(groups)


def by_row(values: Any, place: HeadGroup, shape: AttentionShape) -> jax.Array:
    """Values of query heads [N], in scalar memory, as each row's own: float32[rows, 128]."""
    row = lax.broadcasted_iota(jnp.int32, (place.rows, LANES), 0)
    rows = jnp.zeros(row.shape, jnp.float32)
    for head in range(min(place.heads, shape.num_kv_heads - place.first)):
        for j in range(shape.group):
            value = values[(place.first + head) * shape.group + j]
            rows = jnp.where(row == j * place.heads + head, value, rows)
    return rows


def rounded(token: jax.Array, shape: AttentionShape) -> tuple[jax.Array, jax.Array]:
    """What `int8.quantize` makes of the heads of a token.

    Args:
      token: float32[1, lanes], keys or values.

    Returns:
      (values float32[1, lanes], scales [scale_rows, 1])
    """
    sizes = scale_rows(shape), token.shape[1]
    head, lane = (lax.broadcasted_iota(jnp.int32, sizes, axis) for axis in range(2))
    own = (lane >= head * shape.head_dim) & (lane < (head + 1) * shape.head_dim)
    finite = jnp.abs(token) < jnp.inf
    most = jnp.max(jnp.where(own, jnp.where(finite, jnp.abs(token), jnp.inf), 0.0), axis=1, keepdims=True)
    scales = jnp.where(most < jnp.inf, most * int8.STEP, jnp.nan)
    by_lane = jnp.sum(jnp.where(own & (scales > 0), scales, 0.0), axis=0, keepdims=True)
    values = jnp.round(token / jnp.where(by_lane > 0, by_lane, 1.0))
    return jnp.clip(jnp.where(finite, values, 0.0), -127, 127), scales


def moved(x: jax.Array, source: int, target: int, dim: int) -> jax.Array:
    """`dim` lanes of x [1, lanes] from `source` on, as lanes from `target` on.

    Returns:
      [1, lanes of a head in whole lane tiles].
    """
    first = source // LANES * LANES
    span = x[:, first : round_up(source + dim, LANES)]
    shift = (target - source + first) % span.shape[1]
    return (pltpu.roll(span, shift, 1) if shift else span)[:, : round_up(dim, LANES)]


def scales_by_row(by_head: jax.Array, place: HeadGroup, shape: AttentionShape) -> jax.Array:
    """A group's KV scales [heads, slots] as each row's own: float32[rows, slots]."""
    row = lax.broadcasted_iota(jnp.int32, (place.rows, by_head.shape[1]), 0)
    scales = jnp.zeros(row.shape, jnp.float32)
    for head in range(by_head.shape[0]):
        for j in range(shape.group):
            scales = jnp.where(row == j * place.heads + head, by_head[head : head + 1], scales)
    return scales


def query_lanes(place: HeadGroup, shape: AttentionShape) -> list[jax.Array]:
    """For each query head of a KV head, the lanes that its rows read: bool[rows, lanes]."""
    dim = shape.head_dim
    row = lax.broadcasted_iota(jnp.int32, (place.rows, place.lanes), 0)
    lane = lax.broadcasted_iota(jnp.int32, (place.rows, place.lanes), 1)
    masks = []
    for j in range(shape.group):
        head = row - j * place.heads
        masks.append((head >= 0) & (head < place.heads) & (lane >= head * dim) & (lane < (head + 1) * dim))
    return masks
