"""The Mosaic kernels that choose each token's experts.

They say which expert multiplies which rows. `route` also sorts the choices by expert. XLA would sort, scatter and count
in about twenty operations. The kernel counts instead: a product with a triangle of ones numbers the tokens of an
expert. `choose` is for few tokens: an expert multiplies all of them, those included that did not choose it.
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
from pallas_kernels.tpu.visits import Starts, Visits, earlier, size_of, write

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


class Choices(NamedTuple):
    """What few tokens chose.

    Attributes:
      weights: float32[T in whole lane tiles, experts here in whole lane tiles], 0 for an expert that is not chosen.
      visits: see `Visits`. An expert that is chosen has rows of all T tokens, which are a tile.
    """

    weights: Any
    visits: Any


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


class _Choice(NamedTuple):
    """How tokens choose, 128 at a time.

    A group is an expert that is here, counted from the first, or all of the experts elsewhere.
    """

    per_token: int
    experts: int
    add_up: bool

    @property
    def groups(self) -> int:
        """In whole registers."""
        return round_up(self.experts + 1, SUBLANES)

    @property
    def zeros(self):
        return jnp.zeros((self.groups, LANES), jnp.float32)

    def hits(self, group):
        """float32[groups, 128]: 1 in the line of a token's group."""
        return (_lines(self.groups) == group).astype(jnp.float32)

    def __call__(self, first, positions, x, router: Router):
        """The groups, k times int32[1, 128], and their weights, 0 for experts elsewhere.

        Of equal logits, the first is the largest.
        """
        left = jnp.where(positions < 0, -jnp.inf, self.logits(x, router))
        most = jnp.max(left, axis=0, keepdims=True)
        total = jnp.sum(jnp.exp(left - most), axis=0, keepdims=True)
        groups, shares = [], []
        for _ in range(self.per_token):
            largest = jnp.max(left, axis=0, keepdims=True)
            lines = _lines(len(left))
            expert = jnp.min(jnp.where(left == largest, lines, len(left)), axis=0, keepdims=True)
            left = jnp.where(lines == expert, -jnp.inf, left)
            own = expert - first
            is_here = (own >= 0) & (own < self.experts) & (most > -jnp.inf)
            groups.append(jnp.where(is_here, own, self.experts))
            shares.append(jnp.exp(largest - most))
        if self.add_up:
            total = sum(shares)
        each = zip(groups, shares, strict=True)
        return groups, [jnp.where(group < self.experts, share / total, 0) for group, share in each]

    def logits(self, x, router: Router):
        """float32[E, 128]"""
        logits = dot(router.kernel[...], x, transposed=True)
        if router.bias is None:
            return logits
        line, column = (lax.broadcasted_iota(jnp.int32, (len(logits), len(logits)), axis) for axis in (0, 1))
        return logits + jnp.sum(jnp.where(line == column, router.bias[...], 0), axis=1, keepdims=True)


class _ChooseKernel(NamedTuple):
    """Chooses for 128 tokens a step; the last one makes the visits."""

    choice: _Choice
    tokens: int

    def __call__(self, first, positions, x, router: Router, weights, visits, counts, starts: Starts):
        step, choice = pl.program_id(0), self.choice

        @pl.when(step == 0)
        def _():
            counts[...] = choice.zeros

        of_expert = choice.zeros  # weights
        for group, weight in zip(*choice(first[0], positions[...], x[...], router), strict=True):
            hits = choice.hits(group)
            counts[...] += hits
            of_expert += hits * weight
        missing = weights.shape[1] - choice.groups
        of_expert = jnp.pad(of_expert, ((0, missing), (0, 0))) if missing > 0 else of_expert[: weights.shape[1]]
        weights[...] = of_expert.T

        @pl.when(step == pl.num_programs(0) - 1)
        def _():
            chosen = dot(jnp.ones((SUBLANES, LANES), jnp.float32), counts[...], transposed=True)
            starts.set(jnp.where(chosen > 0, float(self.tokens), 0))
            starts.copy().start()
            starts.copy().wait()
            write(Visits(visits, choice.experts), starts.scalars, self.tokens, clears=False)


class _Scratch(NamedTuple):
    counts: Any  # float32[groups, 128]: how many chose each group, by lane
    chosen: Any  # int32[k, T]: the group of each choice
    rows: Any  # int32[k, T]
    scalar_rows: Any  # the same, in scalar memory
    starts: Starts
    sem: Any


class _RouteKernel(NamedTuple):
    """Chooses for 128 tokens a step, and sorts in the last one."""

    choice: _Choice
    tile: int
    tokens: int

    def __call__(self, first, positions, x, router: Router, rows_and_tokens, weights, visits, scratch: _Scratch):
        step, at, counts = pl.program_id(0), _lane_tile(pl.program_id(0)), self.choice.zeros
        found = zip(*self.choice(first[0], positions[...], x[...], router), strict=True)
        for j, (group, weight) in enumerate(found):
            scratch.chosen[pl.ds(j, 1), at] = group
            weights[j][:, at] = weight
            counts += self.choice.hits(group)
        scratch.counts[...] = jnp.where(step == 0, 0, scratch.counts[...]) + counts

        @pl.when(step == pl.num_programs(0) - 1)
        def _():
            self.sort(rows_and_tokens, visits, scratch)

    def sort(self, rows_and_tokens, visits, scratch: _Scratch):
        # Counts are whole numbers: a product of bfloat16 would round those over 256.
        counts, ones, groups = scratch.counts[...], jnp.ones((LANES, LANES), jnp.float32), self.choice.groups
        begin = dot(earlier(groups, groups).T, dot(counts, ones))
        scratch.starts.set(dot(ones[:SUBLANES], counts, transposed=True))
        scratch.starts.copy().start()
        lax.fori_loop(0, scratch.rows.shape[1] // LANES, partial(self.place, scratch), begin)
        rows = pltpu.make_async_copy(scratch.rows, scratch.scalar_rows, scratch.sem)
        rows.start()
        scratch.starts.copy().wait()
        write(Visits(visits, self.choice.experts), scratch.starts.scalars, self.tile, clears=True)
        rows.wait()
        self.write_choices(scratch.scalar_rows, rows_and_tokens)

    def place(self, scratch: _Scratch, i, begin):
        """Numbers the choices of 128 tokens.

        Returns the first row of each group for the tokens after them.
        """
        at, per_token = _lane_tile(i), self.choice.per_token
        hits = [self.choice.hits(scratch.chosen[pl.ds(j, 1), at]) for j in range(per_token)]
        # Exact: a token chooses an expert once, and few elsewhere.
        each = sum(hits, start=self.choice.zeros).astype(jnp.bfloat16)
        row = begin + dot(each, earlier(LANES, LANES).astype(jnp.bfloat16))
        for j, hit in enumerate(hits):
            scratch.rows[pl.ds(j, 1), at] = jnp.sum(hit * row, axis=0, keepdims=True).astype(jnp.int32)
            row = row + hit
        return begin + dot(each, jnp.ones((LANES, LANES), jnp.bfloat16))

    def write_choices(self, rows, rows_and_tokens):
        tokens, middle = rows.shape[1], rows_and_tokens.shape[0] // 2
        for j in range(self.choice.per_token):

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
    tokens, choice = len(x), _Choice(per_token, count, add_up)
    padded, lines = round_up(tokens, LANES), round_up(per_token, SUBLANES)
    choices = per_token * padded
    return _call(
        "experts_route",
        _RouteKernel(choice, tile, tokens),
        (x, positions, router, first),
        out_shape=Routes(
            rows_and_tokens=_like(2 * choices),
            weights=(_like(1, padded, dtype=jnp.float32),) * per_token,
            visits=_like(size_of(-(-choices // tile) + count - 1, count)),
        ),
        out_specs=Routes(rows_and_tokens=_SCALARS, weights=(_VECTORS,) * per_token, visits=_SCALARS),
        scratch_shapes=[
            _Scratch(
                counts=pltpu.VMEM((choice.groups, LANES), jnp.float32),
                chosen=pltpu.VMEM((lines, padded), jnp.int32),
                rows=pltpu.VMEM((lines, padded), jnp.int32),
                scalar_rows=pltpu.SMEM((lines, padded), jnp.int32),
                starts=Starts.scratch(count),
                sem=pltpu.SemaphoreType.DMA(()),
            )
        ],
        interpret=interpret,
    )


@partial(jax.jit, static_argnames=("per_token", "count", "add_up", "interpret"))
def choose(
    x: jax.Array,
    positions: jax.Array,
    router: Router,
    first: jax.Array,
    *,
    per_token: int,
    count: int,
    add_up: bool,
    interpret: Any = False,
) -> Choices:
    """Chooses the experts with the largest logits; see `route`."""
    choice, lanes = _Choice(per_token, count, add_up), round_up(count, LANES)
    return _call(
        "experts_choose",
        _ChooseKernel(choice, len(x)),
        (x, positions, router, first),
        out_shape=Choices(
            weights=_like(round_up(len(x), LANES), lanes, dtype=jnp.float32), visits=_like(size_of(count, count))
        ),
        out_specs=Choices(weights=pl.BlockSpec((LANES, lanes), lambda step: (step, 0)), visits=_SCALARS),
        scratch_shapes=[pltpu.VMEM((choice.groups, LANES), jnp.float32), Starts.scratch(count)],
        interpret=interpret,
    )


_SCALARS, _VECTORS = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM))


def _like(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _call(name: str, kernel: Any, given: tuple[jax.Array, jax.Array, Router, jax.Array], **settings: Any) -> Any:
    """Calls a kernel with (x, positions, router, first), 128 tokens a step."""
    x, positions, router, first = given
    padded = round_up(len(x), LANES)
    positions = jnp.pad(positions, (0, padded - len(x)), constant_values=-1)
    router = router._replace(bias=None if router.bias is None else router.bias[None])
    return pl.pallas_call(
        kernel,
        grid=(padded // LANES,),
        in_specs=(
            _SCALARS,
            pl.BlockSpec((1, LANES), lambda step: (0, step)),
            pl.BlockSpec((LANES, x.shape[1]), lambda step: (step, 0)),
            jax.tree.map(lambda _: _VECTORS, router),
        ),
        compiler_params=COMPILER_PARAMS,
        name=name,
        **settings,
    )(first, positions[None], x, router)
