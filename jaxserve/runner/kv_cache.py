"""The device pool of keys and values: its size, allocation and block copies.

The attention backend decides its layout.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from pallas_kernels.api import AttentionShape, Backend
from sharding.spec import ShardingSpec, Target, names, partition, parts

# Shares of a device's memory that may be used; the rest is for the runtime, fragmentation and other programs.
ACCELERATOR_SHARE = 0.92
_CPU_SHARE = 0.25
_GPU_POOL_SHARE = 0.99  # of the memory that jax has reserved on a GPU, which already leaves the runtime its part


def is_axes(node: Any) -> bool:
    """Whether a node is a leaf of `Backend.pool_axes`: a plain tuple; pools may be named ones."""
    return type(node) is tuple


def pool_bytes(backend: Backend, shape: AttentionShape, n_blocks: int) -> int:
    """Bytes that a pool of so many blocks, of all layers that share it, takes on each device."""
    leaves = jax.tree.leaves(backend.pool(shape, n_blocks))
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def head_target(mesh: Mesh, spec: ShardingSpec) -> Target:
    """The mesh axes that a spec splits the pool's heads over."""
    return spec.resolve(("heads",), (mesh.size,), mesh, name="the pool", section="pool")[0]


def head_parts(mesh: Mesh, spec: ShardingSpec) -> int:
    """Number of devices that a spec splits the pool's heads over."""
    return parts(head_target(mesh, spec), mesh.shape)


def row_axes(mesh: Mesh, spec: ShardingSpec) -> tuple[str, ...]:
    """The mesh axes of more than one device that a spec splits the pool's rows over."""
    return over(mesh, spec.pool.get("rows"))


def over(mesh: Mesh, target: Target) -> tuple[str, ...]:
    """The mesh axes of a rule that have more than one device."""
    return tuple(axis for axis in names(target) if mesh.shape[axis] > 1)


def row_parts(mesh: Mesh, spec: ShardingSpec) -> int:
    """Number of parts that a spec splits the pool's rows into."""
    return parts(row_axes(mesh, spec), mesh.shape)


def slot_axes(mesh: Mesh, spec: ShardingSpec) -> tuple[str, ...]:
    """The mesh axes of several devices that a spec splits the slots of blocks over."""
    return over(mesh, spec.pool.get("slots"))


def slot_parts(mesh: Mesh, spec: ShardingSpec) -> int:
    """Number of parts that a spec splits the slots of every block into."""
    return parts(slot_axes(mesh, spec), mesh.shape)


def attended(mesh: Mesh, spec: ShardingSpec, following: str) -> tuple[PartitionSpec, int | None]:
    """How the result of attention [T, N, D] is split, and the axis of its reduce-scatter.

    If the pool's rows or slots are split, each part has partial sums of the result. They are scattered by heads or by
    tokens if what follows is split over the same mesh axes. Otherwise there is an all-reduce, and the axis is None.

    Args:
      following: the parameter that is multiplied next.
    """
    heads, split = over(mesh, head_target(mesh, spec)), (*row_axes(mesh, spec), *slot_axes(mesh, spec))
    if split and over(mesh, spec.rules_for(following).get("heads")) == (*heads, *split):
        return partition(None, (*heads, *split), None), 1
    if split and over(mesh, spec.activations.get("tokens")) == split:
        return partition(split, heads, None), 0
    return partition(None, heads, None), None


def split_of(axes: tuple[str | None, ...], sizes: tuple[int, ...], mesh: Mesh, spec: ShardingSpec) -> PartitionSpec:
    """The PartitionSpec of a leaf; its first axis has one part of the rows after another."""
    axes = ("rows", *axes[1:]) if row_axes(mesh, spec) else axes
    if not slot_axes(mesh, spec):
        axes = tuple(None if axis == "slots" else axis for axis in axes)
    return spec.resolve(axes, sizes, mesh, name="the pool", section="pool")


def pool(backend: Backend, shape: AttentionShape, n_blocks: int, mesh: Mesh, spec: ShardingSpec) -> Any:
    """The pool on all devices of a mesh, with heads, rows and slots sharded by the spec.

    Args:
      n_blocks: of all layers that share it, in each part of the rows.

    Returns:
      A pytree of `ShapeDtypeStruct`, each with its sharding.
    """
    times = {"heads": head_parts(mesh, spec), "slots": slot_parts(mesh, spec)}

    def whole(axes: tuple[str | None, ...], part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sizes = tuple(size * times.get(axis or "", 1) for axis, size in zip(axes, part.shape, strict=True))
        sizes = (sizes[0] * row_parts(mesh, spec), *sizes[1:])
        split = split_of(axes, sizes, mesh, spec)
        return jax.ShapeDtypeStruct(sizes, part.dtype, sharding=NamedSharding(mesh, split))

    return jax.tree.map(whole, backend.pool_axes(shape), backend.pool(shape, n_blocks), is_leaf=is_axes)


def allocate(described: Any) -> Any:
    """The zeroed arrays that `pool` describes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), described)


def copy_blocks(
    pool: Any, copies: Int32[jax.Array, "R 2"], *, first_blocks: Sequence[Sequence[int]], in_turn: bool = False
) -> Any:
    """Copies blocks in every layer of their cache group. Traced; the pool is donated.

    Pairs are copied one after another, so that no second pool is allocated.

    Args:
      copies: source and target block of each pair, one of each group in turn, padded with -1. No target is a source.
      first_blocks: of each group, the first block of each of its layers along the first axis of every leaf, ascending.
      in_turn: as of `write_blocks`.
    """
    groups = [jnp.array(first, jnp.int32) for first in first_blocks]

    def copy(turn: jax.Array, pool: Any) -> Any:
        for group, first in enumerate(groups):
            pool = copy_pair(turn * len(groups) + group, first, pool) if len(first) else pool
        return pool

    def copy_pair(pair: jax.Array, first: jax.Array, pool: Any) -> Any:
        source, target = copies[pair, 0] + first, copies[pair, 1] + first
        return write_blocks(pool, target, read_blocks(pool, source), in_turn=in_turn)

    with jax.named_scope("copy_blocks"):
        return jax.lax.fori_loop(0, (copies[:: len(groups), 1] >= 0).sum(), copy, pool)


def read_blocks(pool: Any, places: Int32[jax.Array, " L"]) -> Any:
    """Blocks [L, ...] of a pool, at ascending places along the first axis of every leaf. Traced."""
    return jax.tree.map(
        lambda leaf: leaf.at[places].get(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True), pool
    )


def write_blocks(pool: Any, places: Int32[jax.Array, " L"], blocks: Any, *, in_turn: bool) -> Any:
    """Writes blocks [L, ...] to ascending places along the first axis of every leaf. Traced.

    Args:
      in_turn: one after the other. TPUs scatter to int8 in another arrangement, of a second pool as large.
    """

    def at_once(leaf: jax.Array, part: jax.Array) -> jax.Array:
        return leaf.at[places].set(part, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)

    def one(index: jax.Array, pool: Any) -> Any:
        return jax.tree.map(
            lambda leaf, part: jax.lax.dynamic_update_index_in_dim(leaf, part[index], places[index], 0), pool, blocks
        )

    return jax.lax.fori_loop(0, len(places), one, pool) if in_turn else jax.tree.map(at_once, pool, blocks)


def free_bytes(device: Any) -> int:
    """Bytes of a device's memory that may still be allocated."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = _GPU_POOL_SHARE if device.platform == "gpu" else ACCELERATOR_SHARE
        return int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
    return int(_available() * _CPU_SHARE)


def free_weight_bytes(device: Any, devices: int) -> int:
    """Bytes available for weights on each device; virtual devices share their CPU's memory."""
    return _available() // devices if device.platform == "cpu" else free_bytes(device)


def _available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def most_blocks(pool_bytes: Callable[[int], int], free: int, wanted: int = 2**31 - 1) -> int:
    """Most blocks, up to `wanted`, whose bytes fit in `free`; -1 if `free` is negative."""
    return bisect_right(range(wanted + 1), free, key=pool_bytes) - 1


def fitting_blocks(free: int, temporaries: int, pool_bytes: Callable[[int], int], wanted: int) -> int:
    """Number of blocks of the first cache group to allocate by default.

    Args:
      free: bytes that may be taken (`free_bytes`).
      temporaries: bytes that the largest compiled program needs beside its arguments.
      pool_bytes: bytes of the pools with so many blocks.
      wanted: blocks beyond which more would only serve as prefix cache; no more are taken.

    Raises:
      ValueError: not even one block fits.
    """
    n_blocks = most_blocks(pool_bytes, free - temporaries, wanted)
    if n_blocks < 1:
        raise ValueError(
            f"no memory left for keys and values: {free / 2**20:.0f} MiB are free, the compiled programs need "
            f"{temporaries / 2**20:.0f} MiB beside the weights and one block {pool_bytes(1) / 2**20:.1f} MiB; "
            "use a smaller model, fewer rows, smaller buckets or a larger device"
        )
    return _coarse(n_blocks) if n_blocks < wanted else n_blocks


def _coarse(count: int) -> int:
    """Rounds down to four binary digits.

    So the next start, with slightly more or less free memory, finds its programs in the compilation cache.
    """
    step = 1 << max(count.bit_length() - 4, 0)
    return count // step * step
