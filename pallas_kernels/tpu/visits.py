"""Which expert multiplies which rows: a table that kernels write and read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.layout import LANES, SUBLANES, dot, round_up


class Visits(NamedTuple):
    """Reads int32[2 * V + experts + 2]: which expert multiplies which tile of rows.

    An expert visits the tiles that have rows of it, one expert after another. V is how many visits there can be. Those
    not used go on with the tiles that have no rows, so that they are cleared, or stay at the last one (see `write`).
    The experts' first rows follow, the end of the rows, and the number of visits that are used.
    """

    array: Any
    experts: int

    @property
    def most(self) -> int:
        return (self.array.shape[0] - self.experts - 2) // 2

    @property
    def used(self):
        return self.array[2 * self.most + self.experts + 1]

    def expert(self, visit):
        return self.array[visit]

    def tile(self, visit):
        return self.array[self.most + visit]

    def rows_of(self, expert):
        """The first row of an expert, and one past the last."""
        return self.array[2 * self.most + expert], self.array[2 * self.most + expert + 1]


def size_of(most: int, count: int) -> int:
    """The size of the array of at most so many visits of `count` experts."""
    return 2 * most + count + 2


class Starts(NamedTuple):
    """Where the experts' rows begin, and where the last one's end.

    int32[8, 128 or more], all lines equal.
    """

    vector: Any
    scalars: Any  # the same, in scalar memory
    sem: Any

    @classmethod
    def scratch(cls, count: int) -> Starts:
        sizes = SUBLANES, round_up(count + 2, LANES)
        return cls(pltpu.VMEM(sizes, jnp.int32), pltpu.SMEM(sizes, jnp.int32), pltpu.SemaphoreType.DMA(()))

    def copy(self):
        return pltpu.make_async_copy(self.vector, self.scalars, self.sem)

    def set(self, rows) -> None:
        """Adds up how many rows each has: float32[8, experts and more], all lines equal."""
        self.vector[...] = dot(rows, earlier(rows.shape[1], self.vector.shape[1])).astype(jnp.int32)


def write(visits: Visits, starts, tile: int, *, clears: bool) -> None:
    """Writes the visits of tiles of so many rows each.

    Args:
      starts: `Starts.scalars`.
      clears: whether visits that are not used go on to tiles without rows.
    """
    array, experts = visits.array, visits.experts

    def of_expert(expert, visit):
        begin, end = starts[0, expert], starts[0, expert + 1]
        array[2 * visits.most + expert] = begin

        def of_tile(at, visit):
            array[visit], array[visits.most + visit] = expert, at
            return visit + 1

        first = lax.div(begin, tile)
        return lax.fori_loop(first, jnp.where(end > begin, lax.div(end - 1, tile) + 1, first), of_tile, visit)

    used = lax.fori_loop(0, experts, of_expert, jnp.int32(0))
    end = starts[0, experts]
    array[2 * visits.most + experts] = end
    array[2 * visits.most + experts + 1] = used
    last = jnp.where(used > 0, array[jnp.maximum(used - 1, 0)], 0)
    last_tile = visits.most - experts if clears else jnp.maximum(used - 1, 0)

    @pl.loop(used, visits.most)
    def _(visit):
        array[visit] = last
        array[visits.most + visit] = jnp.minimum(lax.div(end + tile - 1, tile) + visit - used, last_tile)


def earlier(rows: int, columns: int):
    """float32[rows, columns]: 1 where the row's number is less than the column's."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    return (row < column).astype(jnp.float32)
