"""The device pool of keys and values: how large it can be, its allocation, copies of its blocks. The layout is the
backend's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int32

from pallas_kernels.api import AttentionShape, Backend
from sharding.spec import ShardingSpec

# What is left alone on a device: the runtime's own buffers, fragmentation, other programs on a CPU.
ACCELERATOR_SHARE = 0.92
_CPU_SHARE = 0.25
_GPU_POOL_SHARE = 0.99  # of what jax has set aside on a GPU, which leaves the runtime its part already


def is_axes(node: Any) -> bool:
    """Whether a node of `Backend.pool_axes` is a leaf: a plain tuple, where a pool may be a named one."""
    return type(node) is tuple


def block_bytes(backend: Backend, shape: AttentionShape, num_layers: int) -> int:
    """Bytes that one block takes on each device, in so many layers."""
    leaves = jax.tree.leaves(backend.pool(shape, num_layers))
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def head_parts(mesh: Mesh, spec: ShardingSpec) -> int:
    """Into how many parts a spec splits the pool's heads, one part a device."""
    (axis,) = spec.resolve(("heads",), (mesh.size,), mesh, name="the pool", section="pool")
    return 1 if axis is None else mesh.shape[axis]


def pool(backend: Backend, shape: AttentionShape, n_blocks: int, mesh: Mesh, spec: ShardingSpec) -> Any:
    """A pool on all devices of a mesh: what the backend asks for on each, their heads one after another.

    Args:
      n_blocks: of all layers that share it.

    Returns:
      A pytree of `ShapeDtypeStruct`, each with its sharding.
    """
    parts = head_parts(mesh, spec)

    def whole(axes: tuple[str | None, ...], part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sizes = tuple(size * (parts if axis == "heads" else 1) for axis, size in zip(axes, part.shape, strict=True))
        split = spec.resolve(axes, sizes, mesh, name="the pool", section="pool")
        return jax.ShapeDtypeStruct(sizes, part.dtype, sharding=NamedSharding(mesh, split))

    return jax.tree.map(whole, backend.pool_axes(shape), backend.pool(shape, n_blocks), is_leaf=is_axes)


def allocate(described: Any) -> Any:
    """The zeroed arrays that `pool` describes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), described)


def copy_blocks(pool: Any, copies: Int32[jax.Array, "R 2"], *, n_blocks: int, layers: int) -> Any:
    """A pool in which some blocks hold what others do, in every layer. Traced; the pool is donated, and nothing of its
    size is made beside it: one pair after another, as each is a small part of it.

    Args:
      copies: source and target of each pair, -1 where there are no more. No target is a source.
      n_blocks: of each layer, one layer's after another's along the first axis of every leaf.
    """
    first = jnp.arange(layers, dtype=jnp.int32) * n_blocks

    def copy(pair: jax.Array, pool: Any) -> Any:
        source, target = copies[pair, 0] + first, copies[pair, 1] + first

        def in_leaf(leaf: jax.Array) -> jax.Array:
            blocks = leaf.at[source].get(mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)
            at = leaf.at[target]
            return at.set(blocks, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)

        return jax.tree.map(in_leaf, pool)

    with jax.named_scope("copy_blocks"):
        return jax.lax.fori_loop(0, (copies[:, 1] >= 0).sum(), copy, pool)


def free_bytes(device: Any) -> int:
    """Bytes of the memory of a device (one of `jax.devices()`) that may still be taken."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        share = _GPU_POOL_SHARE if device.platform == "gpu" else ACCELERATOR_SHARE
        return int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
    return int(_available() * _CPU_SHARE)


def weight_room(device: Any, devices: int) -> int:
    """Bytes that weights may take of each of so many devices like this; virtual ones share the memory of their CPU."""
    return _available() // devices if device.platform == "cpu" else free_bytes(device)


def _available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def fitting_blocks(free: int, temporaries: int, bytes_a_block: int, wanted: int) -> int:
    """How many blocks to allocate when none were asked for.

    Args:
      free: bytes that may be taken (`free_bytes`).
      temporaries: bytes that the largest compiled program needs beside its arguments.
      wanted: blocks beyond which more would only serve as prefix cache; no more are taken.

    Raises:
      ValueError: not even one block fits.
    """
    n_blocks = min(wanted, (free - temporaries) // bytes_a_block)
    if n_blocks < 1:
        raise ValueError(
            f"no room for keys and values: {free / 2**20:.0f} MiB are free, the compiled programs need "
            f"{temporaries / 2**20:.0f} MiB beside the weights and one block {bytes_a_block / 2**20:.1f} MiB; "
            "use a smaller model, fewer rows, smaller buckets or a larger device"
        )
    return _coarse(n_blocks) if n_blocks < wanted else n_blocks


def _coarse(count: int) -> int:
    """Rounded down to four binary digits: the next start, with a little more or less memory free, finds its programs
    in the compilation cache."""
    step = 1 << max(count.bit_length() - 4, 0)
    return count // step * step
