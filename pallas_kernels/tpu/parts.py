"""The parts of a tile and of a step's slots that the prompt kernel multiplies together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.cuts import Part
from pallas_kernels.tpu.prompt_steps import PromptSteps


class TileParts(NamedTuple):
    """Where parts are in the kernel's buffers, and which tokens and heads they hold.

    A tile's rows are the tokens of its first query head, then those of the next. Part i begins at row i * part.rows;
    part j of a step's slots begins at slot j * part.slots.
    """

    steps: PromptSteps
    part: Part

    def rows(self, i):
        """The rows of a part."""
        return pl.ds(pl.multiple_of(i * self.part.rows, self.part.rows), self.part.rows)

    def slots(self, j):
        """The slots of a part."""
        return pl.ds(pl.multiple_of(j * self.part.slots, self.part.slots), self.part.slots)

    def member(self, i, m):
        """Query head m of a part: its number among the KV head's, and its tokens' place in the tile."""
        part, tile = self.part, self.steps.cut.tile
        if part.tokens == tile:
            return i * part.members + m, slice(None)
        return lax.div(i * part.rows, tile), pl.ds(pl.multiple_of(self._first_token(i), part.tokens), part.tokens)

    def each(self, at, chunk, act: Callable[[Any, Any, Any], None]) -> None:
        """Calls act(part, first and last of the chunk's positions in it) for parts that have any."""
        begin, end, last = self.steps.part_of(at, chunk)

        def of_part(i, _):
            low = jnp.maximum(begin, self._first_token(i))
            high = jnp.minimum(end, self._first_token(i) + self.part.tokens)
            pl.when(low < high)(lambda: act(i, last - (end - 1 - low), last - (end - high)))

        lax.fori_loop(0, self.steps.shape.group * self.steps.cut.tile // self.part.rows, of_part, None)

    def positions(self, at, chunk, i) -> jax.Array:
        """Position of each token of a part, -1 outside the chunk: int32[rows, 1]."""
        part = self.part
        begin, end, last = self.steps.part_of(at, chunk)
        token = lax.broadcasted_iota(jnp.int32, (part.members, part.tokens, 1), 1) + self._first_token(i)
        token = token.reshape(part.rows, 1)
        return jnp.where((token >= begin) & (token < end), last - (end - 1 - token), -1)

    def by_row(self, values, head, i) -> Any:
        """Per-head values for the rows of a part: float32[rows, 1], or a scalar for one head."""
        part = self.part
        first = head * self.steps.shape.group + lax.div(i * part.rows, self.steps.cut.tile)
        if part.members == 1:
            return values[first]
        member = lax.broadcasted_iota(jnp.int32, (part.members, part.tokens, 1), 0).reshape(part.rows, 1)
        by_row = jnp.zeros(member.shape, jnp.float32)
        for j in range(part.members):
            by_row = jnp.where(member == j, values[first + j], by_row)
        return by_row

    def scales(self, side, half, head, j) -> jax.Array:
        """The scales of a head's keys (half 0) or values in the slots of a part: float32[1, slots]."""
        buffer, blocks = self.steps.scratch.blocks.scales, self.part.slots // self.steps.shape.local_slots
        return jnp.concatenate([buffer[side, j * blocks + b, half, pl.ds(head, 1)] for b in range(blocks)], axis=1)

    def _first_token(self, i) -> Any:
        """The first token of a part, counted from the tile's."""
        tile = self.steps.cut.tile
        return 0 if self.part.tokens == tile else lax.rem(i * self.part.rows, tile)
