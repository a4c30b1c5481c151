"""The Mosaic kernel that chooses each token's experts and sorts the choices by expert.

XLA would sort, scatter and count in about twenty operations. The kernel counts instead: a product with a triangle of
ones numbers the tokens of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.layout import COMPILER_PARAMS, LANES, SUBLANES, dot, round_up

_MOST_CHOICES = 2**16  # whose rows and tokens fit scalar memory, which is 1 MiB on all generations
_AT_ONCE = 8  # choices that a turn of the loop over them writes


class Routes(NamedTuple):
    """Where choices are, sorted by expert.

    There are R = k * T of them, the tokens' first ones first. Rows of experts that are not here come last. Tokens come
    in whole lane tiles: those added choose nothing.

    Attributes:
      rows_and_tokens: int32[2 * R], the row of each choice, then the token of each row. XLA clamps indices of both in
        one operation if they are in one array.
      weights: k times float32[1, T], 0 for an expert that is not here.
      visits: see `Visits`.
    """

    rows_and_tokens: Any
    weights: Any
    visits: Any

    @property
    def rows(self):
        return self.rows_and_tokens[: len(self.rows_and_tokens) // 2]

    @property
    def tokens(self):
        return self.rows_and_tokens[len(self.rows_and_tokens) // 2 :]


class Visits(NamedTuple):
    """Reads int32[2 * V + experts + 2]: which expert multiplies which tile of rows.

    An expert visits the tiles that have rows of it, one expert after another. V is how many visits there can be. Those
    not used go on with the tiles that have no rows, which are cleared, and stay at the last one. The experts' first
    rows follow, the end of the rows, and the number of visits that are used.
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


def visits_size(rows: int, tile: int, count: int) -> int:
    """The size of the array of visits. Every expert but the first can begin within a tile."""
    return 2 * (-(-rows // tile) + count - 1) + count + 2


def supports(tokens: int, per_token: int) -> bool:
    """Whether scalar memory holds the choices of so many tokens."""
    return per_token * round_up(tokens, LANES) <= _MOST_CHOICES


class Router(NamedTuple):
    """What a layer chooses experts with.

    Attributes:
      kernel: [E, H]; E are all experts, of which some are here.
      bias: float32[E], or None.
    """

    kernel: Any
    bias: Any = None


class _Scratch(NamedTuple):
    counts: Any  # float32[groups, 128]: how many chose each group, by lane
    chosen: Any  # int32[k, T]: the expert of each choice, counted from the first here; `experts` for one elsewhere
    rows: Any  # int32[k, T]
    scalar_rows: Any  # the same, in scalar memory
    starts: Any  # int32[8, experts and two]: their first rows; all lines are equal
    scalar_starts: Any
    sems: Any  # [2]


class _RouteKernel(NamedTuple):
    """Chooses for 128 tokens a step, and sorts in the last one."""

    per_token: int
    experts: int
    tile: int
    tokens: int
    add_up: bool

    def __call__(self, first, positions, x, router: Router, rows_and_tokens, weights, visits, scratch: _Scratch):
        step, steps = pl.program_id(0), pl.num_programs(0)

        @pl.when(step == 0)
        def _():
            scratch.counts[...] = self.zeros

        logits = jnp.where(positions[...] < 0, -jnp.inf, self.logits(x[...], router))
        scratch.counts[...] += self.choose(first[0], logits, _lane_tile(step), weights, scratch)

        @pl.when(step == steps - 1)
        def _():
            self.sort(rows_and_tokens, visits, scratch)

    def logits(self, x, router: Router):
        """float32[E, 128]"""
        logits = dot(router.kernel[...], x, transposed=True)
        if router.bias is None:
            return logits
        line, column = (lax.broadcasted_iota(jnp.int32, (len(logits), len(logits)), axis) for axis in (0, 1))
        return logits + jnp.sum(jnp.where(line == column, router.bias[...], 0), axis=1, keepdims=True)

    def sort(self, rows_and_tokens, visits, scratch: _Scratch):
        # Counts are whole numbers: a product of bfloat16 would round those over 256.
        counts, ones = scratch.counts[...], jnp.ones((LANES, LANES), jnp.float32)
        begin = dot(_earlier(self.groups, self.groups).T, dot(counts, ones))
        line = dot(dot(ones[:SUBLANES], counts, transposed=True), _earlier(self.groups, scratch.starts.shape[1]))
        scratch.starts[...] = line.astype(jnp.int32)
        copies = [
            pltpu.make_async_copy(scratch.starts, scratch.scalar_starts, scratch.sems.at[0]),
            pltpu.make_async_copy(scratch.rows, scratch.scalar_rows, scratch.sems.at[1]),
        ]
        copies[0].start()
        lax.fori_loop(0, scratch.rows.shape[1] // LANES, partial(self.place, scratch), begin)
        copies[1].start()
        copies[0].wait()
        self.write_visits(scratch.scalar_starts, visits)
        copies[1].wait()
        self.write_choices(scratch.scalar_rows, rows_and_tokens)

    @property
    def groups(self) -> int:
        """The experts here, and a group of the choices elsewhere; in whole registers."""
        return round_up(self.experts + 1, SUBLANES)

    @property
    def zeros(self):
        return jnp.zeros((self.groups, LANES), jnp.float32)

    def hits(self, group):
        """float32[groups, 128]: 1 in the line of a token's group."""
        return (_lines(self.groups) == group).astype(jnp.float32)

    def choose(self, first, left, at, weights, scratch: _Scratch):
        """Chooses for 128 tokens; of equal logits, the first.

        Returns how many chose each group, by lane.
        """
        counts = self.zeros
        most = jnp.max(left, axis=0, keepdims=True)
        total = jnp.sum(jnp.exp(left - most), axis=0, keepdims=True)
        shares, are_here = [], []
        for j in range(self.per_token):
            largest = jnp.max(left, axis=0, keepdims=True)
            lines = _lines(len(left))
            expert = jnp.min(jnp.where(left == largest, lines, len(left)), axis=0, keepdims=True)
            left = jnp.where(lines == expert, -jnp.inf, left)
            own = expert - first
            is_here = (own >= 0) & (own < self.experts) & (most > -jnp.inf)
            group = jnp.where(is_here, own, self.experts)
            scratch.chosen[pl.ds(j, 1), at] = group
            counts = counts + self.hits(group)
            shares.append(jnp.exp(largest - most))
            are_here.append(is_here)
        if self.add_up:
            total = sum(shares)
        for j, (share, is_here) in enumerate(zip(shares, are_here, strict=True)):
            weights[j][:, at] = jnp.where(is_here, share / total, 0)
        return counts

    def place(self, scratch: _Scratch, i, begin):
        """Numbers the choices of 128 tokens.

        Returns the first row of each group for the tokens after them.
        """
        at = _lane_tile(i)
        hits = [self.hits(scratch.chosen[pl.ds(j, 1), at]) for j in range(self.per_token)]
        each = sum(hits, start=self.zeros).astype(
            jnp.bfloat16
        )  # exact: a token chooses an expert once, and few elsewhere
        row = begin + dot(each, _earlier(LANES, LANES).astype(jnp.bfloat16))
        for j, hit in enumerate(hits):
            scratch.rows[pl.ds(j, 1), at] = jnp.sum(hit * row, axis=0, keepdims=True).astype(jnp.int32)
            row = row + hit
        return begin + dot(each, jnp.ones((LANES, LANES), jnp.bfloat16))

    def write_visits(self, starts, array):
        visits = Visits(array, self.experts)

        def of_expert(expert, visit):
            begin, end = starts[0, expert], starts[0, expert + 1]
            array[2 * visits.most + expert] = begin

            def write(tile, visit):
                array[visit], array[visits.most + visit] = expert, tile
                return visit + 1

            first = lax.div(begin, self.tile)
            return lax.fori_loop(first, jnp.where(end > begin, lax.div(end - 1, self.tile) + 1, first), write, visit)

        used = lax.fori_loop(0, self.experts, of_expert, jnp.int32(0))
        end = starts[0, self.experts]
        array[2 * visits.most + self.experts] = end
        array[2 * visits.most + self.experts + 1] = used
        last = jnp.where(used > 0, array[jnp.maximum(used - 1, 0)], 0)

        @pl.loop(used, visits.most)
        def _(visit):
            tile = lax.div(end + self.tile - 1, self.tile) + visit - used
            array[visit], array[visits.most + visit] = last, jnp.minimum(tile, visits.most - self.experts)

    def write_choices(self, rows, rows_and_tokens):
        tokens, middle = rows.shape[1], rows_and_tokens.shape[0] // 2
        for j in range(self.per_token):

            @pl.loop(0, tokens // _AT_ONCE)
            def _(i, j=j):
                for token in (i * _AT_ONCE + n for n in range(_AT_ONCE)):
                    row = rows[j, token]
                    rows_and_tokens[j * tokens + token] = row
                    rows_and_tokens[middle + row] = (
                        token if tokens == self.tokens else jnp.minimum(token, self.tokens - 1)
                    )


def _lane_tile(i):
    return pl.ds(pl.multiple_of(i * LANES, LANES), LANES)


def _lines(count: int):
    return lax.broadcasted_iota(jnp.int32, (count, LANES), 0)


def _earlier(rows: int, columns: int):
    """float32[rows, columns]: 1 where the row's number is less than the column's."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    return (row < column).astype(jnp.float32)


@partial(jax.jit, static_argnames=("per_token", "count", "tile", "add_up", "interpret"))
def route(
    x: jax.Array,
    positions: jax.Array,
    router: Router,
    first: jax.Array,
    *,
    per_token: int,
    count: int,
    tile: int,
    add_up: bool,
    interpret: Any = False,
) -> Routes:
    """Chooses the experts with the largest logits, and sorts the choices by expert.

    Args:
      x: [T, H].
      positions: int32[T]; a token of a negative one is padding, and chooses no expert.
      first: int32[1], the first expert that is here.
      per_token: experts of a token.
      count: experts that are here.
      tile: rows of a tile.
      add_up: whether a token's weights add up to 1, or are parts of the softmax of all logits.
    """
    tokens, hidden = x.shape
    padded = round_up(tokens, LANES)
    choices, lines, columns = per_token * padded, round_up(per_token, SUBLANES), round_up(count + 2, LANES)
    positions = jnp.pad(positions, (0, padded - tokens), constant_values=-1)
    router = router._replace(bias=None if router.bias is None else router.bias[None])
    kernel = _RouteKernel(per_token, count, tile, tokens, add_up)

    def like(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    scalars, vectors = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    return pl.pallas_call(
        kernel,
        grid=(padded // LANES,),
        out_shape=Routes(
            rows_and_tokens=like(2 * choices),
            weights=(like(1, padded, dtype=jnp.float32),) * per_token,
            visits=like(visits_size(choices, tile, count)),
        ),
        in_specs=(
            scalars,
            pl.BlockSpec((1, LANES), lambda step: (0, step)),
            pl.BlockSpec((LANES, hidden), lambda step: (step, 0)),
            jax.tree.map(lambda _: vectors, router),
        ),
        out_specs=Routes(rows_and_tokens=scalars, weights=(vectors,) * per_token, visits=scalars),
        scratch_shapes=[
            _Scratch(
                counts=pltpu.VMEM((kernel.groups, LANES), jnp.float32),
                chosen=pltpu.VMEM((lines, padded), jnp.int32),
                rows=pltpu.VMEM((lines, padded), jnp.int32),
                scalar_rows=pltpu.SMEM((lines, padded), jnp.int32),
                starts=pltpu.VMEM((SUBLANES, columns), jnp.int32),
                scalar_starts=pltpu.SMEM((SUBLANES, columns), jnp.int32),
                sems=pltpu.SemaphoreType.DMA((2,)),
            )
        ],
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        name="experts_route",
    )(first, positions[None], x, router)
