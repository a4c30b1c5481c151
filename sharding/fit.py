"""Checks that a model's weights fit on devices under a spec, before any array exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sharding.parameter_names import pattern

_NAMED = 3  # most parameters that an error names


class PlacedParameter(Protocol):
    """A parameter with its size on each device.

    Attributes:
      name: full name, such as layers.3.qkv.kernel.
      axes: logical name of each axis.
      nbytes: bytes on each device.
      whole: whether each device holds a full copy.
    """

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def whole(self) -> bool: ...


def check_weights(parameters: Iterable[PlacedParameter], free: int, device: str) -> None:
    """Raise ValueError if the weights do not fit on a device.

    Args:
      free: bytes of a device that are available for weights.
      device: name of the device in messages.

    Raises:
      ValueError: they do not fit. If most of it is replicated on every device, the message names the parameters.
    """
    placed = list(parameters)
    total = sum(each.nbytes for each in placed)
    if total <= free:
        return
    copies: dict[str, int] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for each in placed:
        if each.whole:
            glob = pattern(each.name)
            copies[glob] = copies.get(glob, 0) + each.nbytes
            axes[glob] = each.axes
    message = f"the weights take {_size(total)} of each {device}, which can hold {_size(free)}"
    if 2 * sum(copies.values()) > total:
        largest = sorted(copies, key=lambda name: copies[name], reverse=True)[:_NAMED]
        named = ", ".join(f"{name} ({_size(copies[name])}; axes {', '.join(axes[name])})" for name in largest)
        raise ValueError(
            f"{message}; every device holds a copy of {_size(sum(copies.values()))} of them, above all {named}: "
            "split one of those axes, or use more stages"
        )
    raise ValueError(f"{message}; use more devices (a larger tensor size, or more stages) or a narrower dtype")


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
