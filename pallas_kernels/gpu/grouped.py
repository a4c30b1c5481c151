"""Products of runs of rows with a kernel each, for experts, in Pallas with Triton.

A program multiplies a tile of an expert's rows by a part of its kernel. How many tiles there can be is static; a table
says which rows each has. Programs beyond the last tile return at once, and the kernel of an expert without rows is not
read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int8, Int32

_OFFSETS = 2**31  # Triton's offsets are signed 32-bit numbers in arrays of up to 2**32 bytes


class RunsTiling(NamedTuple):
    """The work of a program.

    Attributes:
      rows / columns: of its part of the product.
      depth: inputs that a step of its loop multiplies.
      warps / stages: of threads; steps whose operands are read ahead.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By rows of a tile. The least of a tensor core is 16: such a product is bound by reading the kernel, of which a program
# has three steps on the way. Larger tiles read the kernel less often.
_TILINGS = {
    16: RunsTiling(16, 64, 64, 4, 4),
    64: RunsTiling(64, 128, 64, 4, 3),
    128: RunsTiling(128, 128, 64, 8, 3),
}
# Without tensor cores threads hold whole rows of the operands, so tiles are smaller.
_EXACT_TILINGS = {16: RunsTiling(16, 32, 32, 4, 2), 64: RunsTiling(64, 64, 32, 8, 2)}


def tile_rows(dtype: Any) -> tuple[int, ...]:
    """Tile sizes for rows of a dtype: the least for an expert's mean rows, or the largest."""
    return tuple(_tilings(dtype))


def _tilings(dtype: Any) -> dict[int, RunsTiling]:
    return _EXACT_TILINGS if jnp.dtype(dtype) == jnp.float32 else _TILINGS


def runs_tiling(rows: int, experts: int, dtype: Any) -> RunsTiling:
    """The tiling for so many rows of a dtype over so many experts."""
    tilings = _tilings(dtype)
    return tilings[min((tile for tile in tilings if tile * experts >= rows), default=max(tilings))]


def multiply_runs(
    x: Float[jax.Array, "R in"],
    kernels: Float[jax.Array, "G out in"] | Int8[jax.Array, "G out in"],
    sizes: Int32[jax.Array, " G"],
    *,
    interpret: bool = False,
) -> Float32[jax.Array, "R out"]:
    """Multiplies runs of sizes[g] rows of x by kernels[g] transposed; later rows hold anything.

    Kernels have the dtype of x, or int8 values, which are widened in registers. Sums are float32, of float32 products
    for float32 x (no TF32), in an order that does not depend on the sizes.

    Args:
      interpret: run in Pallas's interpreter.

    Raises:
      ValueError: int8 kernels are too large for the offsets of the compiler.
    """
    if kernels.dtype == jnp.int8 and _OFFSETS < kernels.size <= 2 * _OFFSETS:
        raise ValueError(
            f"int8 kernels of {kernels.size:,} numbers on one device; up to {_OFFSETS:,} are served: split the experts "
            "over more devices, or leave their weights wide"
        )
    return _multiply(x, kernels, sizes, runs_tiling(len(x), len(sizes), x.dtype), interpret)


@partial(jax.jit, static_argnums=(3, 4))  # traced once for all layers of a program
def _multiply(x: jax.Array, kernels: jax.Array, sizes: jax.Array, tiling: RunsTiling, interpret: bool) -> jax.Array:
    tiles, outputs = _tiles(sizes, len(x), tiling.rows), kernels.shape[1]
    return pl.pallas_call(
        partial(runs_kernel, tiling=tiling),
        # Tiles of one expert run side by side, so that they read each part of its kernel from memory once.
        grid=(len(tiles), pl.cdiv(outputs, tiling.columns)),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(x, kernels, tiles)


def _tiles(sizes: Int32[jax.Array, " G"], rows: int, tile: int) -> Int32[jax.Array, "n 3"]:
    """The tiles of all experts, as many as there can be: expert, first row, end of the rows."""
    groups = len(sizes)
    most = (rows + min(groups, rows) * (tile - 1)) // tile
    ends, counts = jnp.cumsum(sizes), -(-sizes // tile)
    last = jnp.cumsum(counts)
    place = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(last <= place[:, None], axis=1, dtype=jnp.int32), groups - 1)
    start = ends[group] - sizes[group] + (place - last[group] + counts[group]) * tile
    end = jnp.where(place < last[-1], jnp.minimum(start + tile, ends[group]), start)
    return jnp.stack([group, start, end], axis=1).astype(jnp.int32)


def runs_kernel(x: Any, kernels: Any, tiles: Any, y: Any, *, tiling: RunsTiling):
    """Multiply the rows of a tile by some rows of its expert's kernel."""
    tile, part = pl.program_id(0), pl.program_id(1)
    expert, start, end = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
    outputs, inputs = kernels.shape[1:]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    @pl.when(start < end)
    def _multiply() -> None:
        rows = start + jnp.arange(tiling.rows)
        columns = part * tiling.columns + jnp.arange(tiling.columns)

        def step(i: jax.Array, acc: jax.Array) -> jax.Array:
            depth = i * tiling.depth + jnp.arange(tiling.depth)
            left = load_part(x, (), rows, end, depth, inputs)
            right = load_part(kernels, (expert,), columns, outputs, depth, inputs).astype(x.dtype)
            axes = (((1,), (1,)), ((), ()))
            return acc + lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)

        empty = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
        acc = lax.fori_loop(0, pl.cdiv(inputs, tiling.depth), step, empty)
        at = jnp.broadcast_arrays(rows[:, None], columns[None, :])
        plgpu.store(y.at[at[0], at[1]], acc, mask=(at[0] < end) & (at[1] < outputs))


def load_part(
    ref: Any, first: tuple[Any, ...], rows: jax.Array, n_rows: Any, depth: jax.Array, n_depth: int
) -> jax.Array:
    """Rows of a matrix at some depths; zeros beyond the end of either."""
    rows, depth = jnp.broadcast_arrays(rows[:, None], depth[None, :])
    inside = rows < n_rows
    if n_depth % depth.shape[1]:
        inside &= depth < n_depth
    return plgpu.load(ref.at[*first, rows, depth], mask=inside, other=0)
