"""A model's parameters under a spec: what each device holds, and whether that fits. Nothing here has an array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jax.sharding import PartitionSpec

from sharding.spec import MeshLike, ShardingSpec, pattern

_NAMED = 3  # arrays that an error names


class Array(NamedTuple):
    """A parameter before it exists: its name (layers.3.qkv.kernel), logical axes, shape, and bytes of one number."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int


class Laid(NamedTuple):
    """A parameter laid over the devices of one mesh.

    Attributes:
      local: its shape on each device.
    """

    array: Array
    partition: PartitionSpec
    local: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on each device."""
        return math.prod(self.local) * self.array.itemsize

    @property
    def whole(self) -> bool:
        """Whether every device holds all of it."""
        return self.local == self.array.shape


def lay(
    spec: ShardingSpec, arrays: Iterable[Array], mesh: MeshLike, counts: Mapping[str, int] | None = None
) -> list[Laid]:
    """Lays parameters over a mesh.

    Args:
      counts: see `ShardingSpec.resolve`.

    Raises:
      ValueError: a spec that cannot be, in words (`ShardingSpec.check_names`, `ShardingSpec.resolve`).
    """
    arrays = list(arrays)
    spec.check_names(mesh, {array.name: array.axes for array in arrays})
    laid = []
    for array in arrays:
        partition = spec.resolve(array.axes, array.shape, mesh, name=array.name, counts=counts)
        local = tuple(
            size if target is None else size // mesh.shape[target]
            for size, target in zip(array.shape, partition, strict=True)
        )
        laid.append(Laid(array, partition, local))
    return laid


def check_fits(laid: Iterable[Laid], free: int, device: str) -> None:
    """Refuses weights that are more than a device has room for.

    Args:
      free: bytes of a device that weights may take.
      device: what to call one.

    Raises:
      ValueError: they take more; the message says how much of it is held whole by every device, and what.
    """
    laid = list(laid)
    total = sum(each.nbytes for each in laid)
    if total <= free:
        return
    copies: dict[str, int] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for each in laid:
        if each.whole:
            glob = pattern(each.array.name)
            copies[glob] = copies.get(glob, 0) + each.nbytes
            axes[glob] = each.array.axes
    message = f"the weights take {_gib(total)} of each {device}, which has room for {_gib(free)}"
    if 2 * sum(copies.values()) > total:
        largest = sorted(copies, key=lambda name: copies[name], reverse=True)[:_NAMED]
        named = ", ".join(f"{name} ({_gib(copies[name])}; axes {', '.join(axes[name])})" for name in largest)
        raise ValueError(
            f"{message}; every device holds a copy of {_gib(sum(copies.values()))} of them, above all {named}: "
            "split one of those axes, or use more stages"
        )
    raise ValueError(f"{message}; use more devices (a larger tensor size, or more stages) or a narrower dtype")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
