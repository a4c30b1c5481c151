"""Transfers arrays between the devices of pipeline stages within one process.

Links between hosts have the same interface: `multihost.links`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from jaxserve.runner.lowering import StagePrograms


class Link(Protocol):
    """Transfers arrays from one stage to another.

    Attributes:
      in_line: whether a transfer runs in order with the programs of both stages, so that later programs wait for it.
    """

    in_line: bool

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Enqueues a transfer; returns before it is done.

        Args:
          x: the array on every device of the source; None on a host without such devices.
          what: shape and dtype.

        Returns:
          The array on every device of the target; None on a host without such devices.
        """
        ...


class DevicePut:
    """Copies between devices of one process."""

    in_line = False

    def __init__(self, target: StagePrograms) -> None:
        self._everywhere = target.everywhere

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        del what
        return jax.device_put(x, self._everywhere)


def links_within(stages: Sequence[StagePrograms]) -> list[Link]:
    """The links from each stage to the next, and from the last to the first."""
    return [DevicePut(target) for target in (*stages[1:], stages[0])]
