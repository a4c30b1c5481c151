"""Programs that copy blocks out of a pool and back, with a checksum. Traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.runner import kv_cache

COUNT = 8  # blocks of one launch


class HostBlock(NamedTuple):
    """A block of one stage outside the pool.

    Attributes:
      data: a tree like the pool's, with the stage's layers of the cache group as first axis.
      checksum: array uint32[2].
    """

    data: Any
    checksum: Any


def store(pool: Any, blocks: jax.Array, *, first_blocks: Sequence[int]) -> tuple[HostBlock, ...]:
    """Copies of blocks of one cache group.

    Args:
      blocks: int32[COUNT].
      first_blocks: first block of each of its layers along the first axis of every leaf, ascending.
    """
    with jax.named_scope("store_blocks"):
        first = jnp.array(first_blocks, jnp.int32)

        def copy(block: jax.Array) -> HostBlock:
            data = kv_cache.read_blocks(pool, first + block)
            return HostBlock(data, checksum(data))

        return tuple(copy(blocks[index]) for index in range(COUNT))


def load(
    pool: Any, blocks: jax.Array, held: Sequence[HostBlock], *, first_blocks: Sequence[int], in_turn: bool
) -> tuple[Any, jax.Array]:
    """Writes blocks of one cache group into the pool, which is donated.

    A repeated entry does nothing more. Args: as of `store`, and of `kv_cache.write_blocks`.

    Returns:
      The pool, and whether each block still has its checksum, bool[COUNT].
    """
    with jax.named_scope("load_blocks"):
        first = jnp.array(first_blocks, jnp.int32)
        for index, each in enumerate(held):
            pool = kv_cache.write_blocks(pool, first + blocks[index], each.data, in_turn=in_turn)
        return pool, jnp.stack([(checksum(each.data) == each.checksum).all() for each in held])


def checksum(data: Any) -> jax.Array:
    """Two sums of all values' bits times odd numbers by their places: uint32[2].

    No change of a single value goes unnoticed, and others with a chance of 2**-64. It is no protection against
    somebody who can write to the host's memory.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(data)):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.full(leaf.shape, number * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
        for axis, size in enumerate(leaf.shape):  # not flat, so that every device sums up its own part
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        weights = [_mixed(place * jnp.uint32(2) + jnp.uint32(turn)) | jnp.uint32(1) for turn in range(2)]
        total += jnp.stack([(bits * weight).sum(dtype=jnp.uint32) for weight in weights])
    return total


def _mixed(values: jax.Array) -> jax.Array:
    """Spreads a number over all bits (the finaliser of MurmurHash3)."""
    values = (values ^ (values >> 16)) * jnp.uint32(0x85EBCA6B)
    values = (values ^ (values >> 13)) * jnp.uint32(0xC2B2AE35)
    return values ^ (values >> 16)
