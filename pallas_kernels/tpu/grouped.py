"""Mixtures of experts on TPUs: tiles of an expert's rows are multiplied by its kernels.

Kernels of experts lie [E, in, out] in memory. Those in int8 are widened on the chip.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels.tpu import routing
from pallas_kernels.tpu.chips import of_kind
from pallas_kernels.tpu.layout import COMPILER_PARAMS, LANES, dot, round_up
from pallas_kernels.tpu.routing import Router
from pallas_kernels.tpu.visits import Visits

_STEP = 2**21  # values of kernels in a step of the loop over a block's columns: if they are short, more columns
_LEAST_COLUMNS, _MOST_COLUMNS = 2 * LANES, 2048  # of a step
_MOST_BYTES = 32 * 2**20  # of a kernel's buffers: larger blocks read the rows less often


class Stack(NamedTuple):
    """The kernels of one projection of all experts.

    Attributes:
      values: [E, out, in], of the dtype of x or int8.
      scales: [E, out] of int8 values, or None.
      bias: [E, out], or None.
    """

    values: Any
    scales: Any = None
    bias: Any = None


# The output of an expert's first projections as the input of its last; all float32.
Activation = Callable[..., jax.Array]


def tile_rows(device_kind: str) -> int:
    """Rows of a tile: as many as the matrix units are wide."""
    return 2 * LANES if of_kind(device_kind).is_wide else LANES


def supports(
    tokens: int, per_token: int, hidden: int, inner: int, dtypes: Sequence[np.dtype], device_kind: str
) -> bool:
    """Whether the kernels serve experts of these sizes.

    Args:
      hidden / inner: inputs of the first projections on a device, and of the last.
      dtypes: of x and of the kernels.
    """
    x, values = dtypes
    served = x in (jnp.bfloat16, jnp.float32) and values in (x, jnp.int8)
    fit = blocks(hidden, inner, 2, dtypes, device_kind) and blocks(inner, hidden, 1, dtypes, device_kind)
    return served and fit is not None and routing.supports(tokens, per_token)


def mixture(
    x: Float[jax.Array, "T H"],
    positions: Int32[jax.Array, " T"],
    router: Router,
    first: Int32[jax.Array, " 1"],
    gate: Stack,
    up: Stack,
    down: Stack,
    *,
    per_token: int,
    add_up: bool,
    activation: Activation,
    parts: int = 1,
    dtype: DTypeLike = jnp.float32,
    device_kind: str,
    interpret: Any = False,
) -> Float[jax.Array, "T H"]:
    """The weighted sum of what each token's experts give, of those whose kernels are here.

    Args:
      positions: negative of padding, which gets zeros.
      first: the first expert that is here.
      per_token / add_up: see `routing.route`.
      activation: of (gate, up).
      parts: of each expert, over devices whose results are added up: each adds a part of the bias of `down`.
      dtype: of the result.
    """
    count, tokens, tile = len(gate.values), len(x), tile_rows(device_kind)
    choice = {"per_token": per_token, "add_up": add_up, "count": count, "interpret": interpret}
    multiply = partial(_multiply, device_kind=device_kind, interpret=interpret)
    first_ones = partial(multiply, stacks=(gate, up), activation=activation, name="experts_inner")
    last = partial(multiply, stacks=(down,), activation=_same, parts=parts, name="experts_outer")
    if tokens <= tile:
        few = routing.choose(x, positions, router, first, **choice)
        inner = first_ones(x, visits=few.visits, tile=tokens, rows=(count, tokens))
        return last(inner, visits=few.visits, tile=tokens, rows=(tokens,), weights=few.weights, dtype=dtype)
    routes = routing.route(x, positions, router, first, tile=tile, **choice)
    rows = _rows_of(x, routes.tokens)
    inner = first_ones(rows, visits=routes.visits, tile=tile, rows=(len(rows),))
    y = last(inner, visits=routes.visits, tile=tile, rows=(len(rows),))
    each, y = _rows_of(y, routes.rows), jnp.float32(0)
    for j, weight in enumerate(routes.weights):  # added up in one operation of a TPU
        of_choice = each[j * weight.size : (j + 1) * weight.size].astype(jnp.float32)
        y += weight.reshape(-1, 1) * of_choice
    return y[:tokens].astype(dtype)


def _rows_of(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _same(y: jax.Array) -> jax.Array:
    return y


class _Kernel(NamedTuple):
    experts: int
    outputs: int
    step: int
    activation: Activation
    parts: int
    out_tile: Callable[[Any], Any]

    def __call__(self, array, x, stacks: tuple[Stack, ...], weights, out, sums: Any = None):
        visits, visit = Visits(array, self.experts), pl.program_id(1)
        expert, at = visits.expert(visit), self.out_tile(visits.tile(visit))
        (tile, width), columns = out.shape, self.step
        left = self.outputs - pl.program_id(0) * width  # columns from here on; the last block is filled up

        def product(stack: Stack, lanes):
            y = dot(x[...], stack.values[0, :, lanes].astype(x.dtype))
            if stack.scales is not None:
                y = y * stack.scales[pl.ds(expert, 1), lanes].astype(jnp.float32)
            if stack.bias is None:
                return y
            return y + stack.bias[pl.ds(expert, 1), lanes].astype(jnp.float32) * (1 / self.parts)

        is_first = (visit == 0) | (at != self.out_tile(visits.tile(jnp.maximum(visit - 1, 0))))  # of the tile

        @pl.when((visit >= visits.used) & is_first)
        def _():
            out[...] = jnp.zeros_like(out)

        @pl.when(visit < visits.used)
        def _():
            if weights is None:
                begin, end = visits.rows_of(expert)
                row = at * tile + lax.broadcasted_iota(jnp.int32, (tile, columns), 0)

                def keep(lanes, y):
                    old = jnp.where(is_first, 0, out[:, lanes].astype(jnp.float32))
                    out[:, lanes] = jnp.where((row >= begin) & (row < end), y, old).astype(out.dtype)

            else:
                lane = lax.broadcasted_iota(jnp.int32, (tile, weights.shape[1]), 1)
                weight = jnp.sum(jnp.where(lane == expert, weights[:tile], 0), axis=1, keepdims=True)

                def keep(lanes, y):
                    old = jnp.where(is_first, 0, sums[:, lanes])
                    y = y.astype(x.dtype).astype(jnp.float32)  # not finite for some that are padding
                    sums[:, lanes] = old + jnp.where(weight > 0, weight * y, 0)

            @pl.loop(0, lax.div(jnp.minimum(left, width) + columns - 1, columns))
            def _(i):
                lanes = pl.ds(pl.multiple_of(i * columns, columns), columns)
                keep(lanes, self.activation(*(product(stack, lanes) for stack in stacks)))

            if sums is not None:

                @pl.when(visit == visits.used - 1)
                def _():
                    out[...] = sums[...].astype(out.dtype)


class Blocks(NamedTuple):
    """How a kernel divides its columns.

    Attributes:
      width: of a block, which is read at a time, while the next one is on its way.
      step: columns of a product in the loop over a block; they divide it.
    """

    width: int
    step: int


def blocks(inputs: int, outputs: int, stacks: int, dtypes: Sequence[np.dtype], device_kind: str) -> Blocks | None:
    """The blocks of a product with so many stacks of kernels; None if not even the least fit.

    Each core of a chip has a share of the columns.

    Args:
      dtypes: of x and of the kernels.
    """
    tile, (x, values) = tile_rows(device_kind), (np.dtype(each).itemsize for each in dtypes)
    chip = of_kind(device_kind)
    memory, share = min(_MOST_BYTES, chip.memory * 3 // 4), -(-outputs // chip.cores)
    column = 2 * stacks * inputs * values + 2 * tile * 4  # bytes of kernels and results
    for most in range(min(_MOST_COLUMNS, _STEP // (stacks * inputs)), 0, -_LEAST_COLUMNS):
        step = round_up(-(-share // -(-share // most)), _LEAST_COLUMNS)
        beside = 2 * tile * inputs * x + stacks * step * (inputs * x * (values != x) + 2 * tile * 4)
        if (fit := (memory - beside) // (column * step) * step) > 0:
            return Blocks(round_up(-(-share // -(-share // fit)), step), step)
    return None


@partial(jax.jit, static_argnames=("activation", "tile", "rows", "parts", "dtype", "device_kind", "interpret", "name"))
def _multiply(
    x: jax.Array,
    stacks: tuple[Stack, ...],
    visits: jax.Array,
    weights: jax.Array | None = None,
    *,
    activation: Activation,
    tile: int,
    rows: tuple[int, ...],
    parts: int = 1,
    dtype: DTypeLike | None = None,
    device_kind: str,
    interpret: Any,
    name: str,
) -> jax.Array:
    """`activation` of the products of tiles of x with an expert's kernels each.

    Products are rounded to x's dtype.

    Args:
      x: [R, in], of which one tile follows another, or [tiles, rows of one, in]. If there is one tile, all visits read
        it.
      weights: see `routing.Choices`. With them, the products of a tile are added up by weight, in float32.
      tile: rows of a tile.
      rows: sizes of the result before its columns, as of x.
      parts: by which biases are divided.
      dtype: of the result; that of x by default.

    Returns:
      [*rows, out], with zeros for rows of no expert.
    """
    stacks = tuple(stack._replace(values=stack.values.swapaxes(1, 2)) for stack in stacks)
    count, inputs, outputs = stacks[0].values.shape
    divided = blocks(inputs, outputs, len(stacks), (x.dtype, stacks[0].values.dtype), device_kind)
    assert divided is not None, "`supports` says no"
    width, step = divided
    reader = partial(Visits, experts=count)
    spec = Stack(
        values=pl.BlockSpec((1, inputs, width), lambda n, visit, array: (reader(array).expert(visit), 0, n)),
        scales=pl.BlockSpec((count, width), lambda n, visit, array: (0, n)),
        bias=pl.BlockSpec((count, width), lambda n, visit, array: (0, n)),
    )
    specs = tuple(
        Stack(*(leaf if given is not None else None for leaf, given in zip(spec, stack, strict=True)))
        for stack in stacks
    )

    def of_tiles(sizes: tuple[int, ...], columns: int, at: Callable[[Any], Any]) -> pl.BlockSpec:
        def index(n: Any, visit: Any, array: Any) -> tuple[Any, ...]:
            number = _number(sizes, tile)(reader(array).tile(visit))
            return (number, 0, at(n)) if len(sizes) > 1 else (number, at(n))

        return pl.BlockSpec((*(None for _ in sizes[1:]), tile, columns), index)

    return pl.pallas_call(
        _Kernel(count, outputs, step, activation, parts, _number(rows, tile)),
        out_shape=jax.ShapeDtypeStruct((*rows, outputs), dtype or x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(outputs, width), reader(visits).most),
            in_specs=[
                of_tiles(x.shape[:-1], inputs, lambda n: 0),
                specs,
                None if weights is None else pl.BlockSpec(memory_space=pltpu.VMEM),
            ],
            out_specs=of_tiles(rows, width, lambda n: n),
            scratch_shapes=[] if weights is None else [pltpu.VMEM((tile, width), jnp.float32)],
        ),
        compiler_params=dataclasses.replace(
            COMPILER_PARAMS,
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=of_kind(device_kind).memory * 7 // 8,
        ),
        interpret=interpret,
        name=name,
    )(visits, x, stacks, weights)


def _number(sizes: tuple[int, ...], tile: int) -> Callable[[Any], Any]:
    """Given the number of a visit's tile: the number among those that there are."""
    return (lambda number: number) if math.prod(sizes) > tile else (lambda number: 0)
