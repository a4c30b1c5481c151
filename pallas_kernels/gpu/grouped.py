"""Products of runs of rows with a kernel each, for experts, in Triton.

A program multiplies a tile of an expert's rows by a part of its kernel. How many tiles there can be is static; a table
says which rows each has. Programs beyond the last tile return at once, and the kernel of an expert without rows is not
read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int8, Int32, UInt8

from pallas_kernels.gpu.triton_call import operands, triton_call


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


# By rows of a tile. With 16 a product is bound by reading the kernel, of which a program has three steps on the way.
# Larger tiles read the kernel less often.
_TILINGS = {
    16: RunsTiling(16, 64, 128, 4, 4),
    64: RunsTiling(64, 128, 64, 4, 3),
    128: RunsTiling(128, 128, 64, 8, 3),
}
_EXACT_TILINGS = {16: RunsTiling(16, 64, 32, 4, 3), 64: RunsTiling(64, 64, 32, 8, 2)}  # two parts of each operand


def tile_rows(dtype: Any) -> tuple[int, ...]:
    """Tile sizes for rows of a dtype: the least for an expert's mean rows, or the largest."""
    return tuple(_tilings(dtype))


def _tilings(dtype: Any) -> dict[int, RunsTiling]:
    return _EXACT_TILINGS if jnp.dtype(dtype) == jnp.float32 else _TILINGS


def runs_tiling(rows: int, experts: int, dtype: Any) -> RunsTiling:
    """The tiling for so many rows of a dtype over so many experts."""
    tilings = _tilings(dtype)
    return tilings[min((tile for tile in tilings if tile * experts >= rows), default=max(tilings))]


def precision(dtype: Any) -> str:
    """How tensor cores multiply: float32 in three products of TF32, which has 11 bits."""
    return "tf32x3" if jnp.dtype(dtype) == jnp.float32 else "ieee"


def multiply_runs(
    x: Float[jax.Array, "R in"],
    kernels: Float[jax.Array, "G out in"] | Int8[jax.Array, "G out in"] | UInt8[jax.Array, "G out in"],
    sizes: Int32[jax.Array, " G"],
    *,
    device_kind: str,
    interpret: bool = False,
) -> Float32[jax.Array, "R out"]:
    """Multiplies runs of sizes[g] rows of x by kernels[g] transposed; later rows hold anything.

    Kernels have the dtype of x, or int8 values or the bits of float8_e4m3fn, which are widened in registers. Sums are
    float32, in an order that does not depend on the sizes; products of float32 x are exact to 21 bits.

    Args:
      device_kind: JAX's name of the GPU that the program is for.
      interpret: run in Triton's interpreter.
    """
    return _multiply(x, kernels, sizes, runs_tiling(len(x), len(sizes), x.dtype), device_kind, interpret)


@partial(jax.jit, static_argnums=(3, 4, 5))  # traced once for all layers of a program
def _multiply(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, tiling: RunsTiling, device_kind: str, interpret: bool
) -> jax.Array:
    from pallas_kernels.gpu.product_kernels import runs_kernel  # which imports Triton

    tiles, (_, outputs, inputs) = _tiles(sizes, len(x), tiling.rows), kernels.shape
    return triton_call(
        runs_kernel,
        # Tiles of one expert run side by side, so that they read each part of its kernel from memory once.
        (len(tiles), -(-outputs // tiling.columns)),
        {"x": x, "kernels": kernels, "tiles": tiles},
        new={"y": jax.ShapeDtypeStruct((len(x), outputs), jnp.float32)},
        constants={
            "OUTPUTS": outputs,
            "INPUTS": inputs,
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "DEPTH": tiling.depth,
            "OPERANDS": operands(x.dtype, interpret),
            "PRECISION": precision(x.dtype),
        },
        warps=tiling.warps,
        stages=tiling.stages,
        device_kind=device_kind,
        interpret=interpret,
    )["y"]


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
