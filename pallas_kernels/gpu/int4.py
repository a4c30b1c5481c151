"""Products with int4 kernels in groups of inputs, in Triton.

Kernels are widened and scaled in registers. XLA's compiler for GPUs would write the wide kernel to memory: it takes one
array into a product's operand, but not values with their scales. The two numbers of a byte are neighbouring inputs, so
a program multiplies the inputs at even places of x by the low halves, and those at odd places by the high halves.
Where there are few tiles, each goes over a part of the inputs, and the parts are added up.
"""

from __future__ import annotations

import operator
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Float32, Int8

from pallas_kernels.gpu.grouped import precision
from pallas_kernels.gpu.triton_call import operands, triton_call

_SMALLEST = 128  # inputs of a step, where groups and the steps of a tiling do not divide


class Int4Tiling(NamedTuple):
    """The work of a program.

    Attributes:
      rows / columns: of its part of the product.
      depth: inputs that a step of its loop multiplies.
      warps / stages: of threads; steps whose operands are read ahead.
      programs: how many programs at least the inputs are split for.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int


# By rows of a tile. Up to 32 rows a product is bound by reading the kernel, which takes many programs on the way; with
# more, by tensor cores, and a processor has one or two programs.
_TILINGS = {
    8: Int4Tiling(8, 64, 128, 4, 4, 512),
    16: Int4Tiling(16, 64, 128, 4, 4, 512),
    32: Int4Tiling(32, 64, 128, 4, 4, 512),
    64: Int4Tiling(64, 128, 128, 8, 3, 256),
    128: Int4Tiling(128, 128, 128, 8, 3, 128),
}
_EXACT_TILING = Int4Tiling(16, 64, 64, 4, 2, 256)  # registers hold two parts of each operand
_LEAST_STEPS, _MOST_PARTS = 4, 8  # of a part; of the inputs


def serves(group: int) -> bool:
    """Whether groups of so many inputs are whole steps: 32, 64 and multiples of 128."""
    return group % 128 == 0 or group in (32, 64)


def int4_tiling(rows: int, group: int, dtype: jnp.dtype) -> Int4Tiling:
    """The tiling for so many rows of a dtype and groups of so many inputs."""
    least = min((tile for tile in _TILINGS if tile >= rows), default=max(_TILINGS))
    tiling = _EXACT_TILING if dtype == jnp.float32 else _TILINGS[least]
    divides = tiling.depth % group == 0 or group % tiling.depth == 0
    return tiling if divides else tiling._replace(depth=_SMALLEST)


def steps_of_part(tiling: Int4Tiling, rows: int, outputs: int, inputs: int) -> int:
    """The steps of a part of the inputs, so that there are enough programs.

    They depend on static sizes alone, so a row's sum has the same order whatever the other rows are.
    """
    tiles, steps = -(-rows // tiling.rows) * -(-outputs // tiling.columns), -(-inputs // tiling.depth)
    parts = min(-(-tiling.programs // tiles), steps // _LEAST_STEPS, _MOST_PARTS)
    return -(-steps // max(parts, 1))


def multiply(
    x: Float[jax.Array, "T in"],
    values: jax.Array,
    scales: Float[jax.Array, "out groups"],
    zeros: Int8[jax.Array, "out groups"] | None,
    *,
    device_kind: str,
    interpret: bool = False,
) -> Float32[jax.Array, "T out"]:
    """x times the transpose of (values - zeros) * scales, for int4 values [out, in].

    The wide kernel is rounded once, to the dtype of x, which is that of the scales (float32 in the interpreter). Sums
    are float32; products of float32 x are exact to 21 bits.

    Args:
      device_kind: JAX's name of the GPU that the program is for.
      interpret: run in Triton's interpreter.
    """
    tiling = int4_tiling(len(x), x.shape[1] // scales.shape[1], x.dtype)
    return _multiply(x, values, scales, zeros, tiling, device_kind, interpret)


@partial(jax.jit, static_argnums=(4, 5, 6))  # traced once for all layers of a program
def _multiply(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    tiling: Int4Tiling,
    device_kind: str,
    interpret: bool,
) -> jax.Array:
    from pallas_kernels.gpu.product_kernels import int4_kernel  # which imports Triton

    (rows, inputs), outputs = x.shape, len(values)
    steps = steps_of_part(tiling, rows, outputs, inputs)
    grid = -(-rows // tiling.rows), -(-outputs // tiling.columns), -(-inputs // (tiling.depth * steps))
    even, odd = jnp.unstack(x.reshape(rows, -1, 2), axis=2)
    pairs = lax.bitcast_convert_type(values.reshape(outputs, -1, 2), jnp.uint8)
    parts = triton_call(
        int4_kernel,
        grid,
        {"even": even, "odd": odd, "pairs": pairs, "scales": scales, "zeros": zeros},
        new={"y": jax.ShapeDtypeStruct((grid[2], rows, outputs), jnp.float32)},
        constants={
            "N_ROWS": rows,
            "OUTPUTS": outputs,
            "INPUTS": inputs,
            "GROUP": inputs // scales.shape[1],
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "DEPTH": tiling.depth,
            "STEPS": steps,
            "PACKED": x.dtype == jnp.bfloat16 and not interpret,
            "OPERANDS": operands(x.dtype, interpret),
            "PRECISION": precision(x.dtype),
        },
        warps=tiling.warps,
        stages=tiling.stages,
        device_kind=device_kind,
        interpret=interpret,
    )["y"]
    return reduce(operator.add, parts)  # in this order
