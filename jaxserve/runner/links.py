"""Transfers arrays between the devices of pipeline stages within one process.

Links between hosts have the same interface: `multihost.links`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from jaxserve.runner.lowering import StagePrograms


class Link(Protocol):
    """The way from one stage to another.

    Attributes:
      in_line: whether a transfer takes its place among the programs of both stages, so that what is launched after it
        waits for what it carries.
    """

    in_line: bool

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        """Enqueues a transfer; returns before it is done.

        Args:
          x: on every device of the stage it comes from; None on a host that has none of them.
          what: its shape and dtype.

        Returns:
          It on every device of the other stage; None on a host that has none of those.
        """
        ...


class DevicePut:
    """A copy from device to device that one process can reach."""

    in_line = False

    def __init__(self, target: StagePrograms) -> None:
        self._everywhere = target.everywhere

    def send(self, x: jax.Array | None, what: jax.ShapeDtypeStruct) -> jax.Array | None:
        del what
        return jax.device_put(x, self._everywhere)


def links_within(stages: Sequence[StagePrograms]) -> list[Link]:
    """From each stage to the next, and from the last to the first."""
    return [DevicePut(target) for target in (*stages[1:], stages[0])]
