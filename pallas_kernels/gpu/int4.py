"""Products with int4 kernels in groups of inputs, in Pallas with Triton.

Kernels are widened in registers. XLA's compiler for GPUs would write the wide kernel to memory: it takes one array into
a product's operand, but not values with their scales. The two numbers of a byte are neighbouring inputs, so a program
multiplies the inputs at even places of x by the low halves, and those at odd places by the high halves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int8

from pallas_kernels.gpu.grouped import RunsTiling, load_part

_LARGEST = 128  # inputs of a group that a step multiplies


def serves(group: int) -> bool:
    """Whether groups of so many inputs are whole steps: 32, 64 and multiples of 128."""
    return group % _LARGEST == 0 or group in (32, 64)


def multiply(
    x: Float[jax.Array, "T in"],
    values: jax.Array,
    scales: Float[jax.Array, "out groups"],
    zeros: Int8[jax.Array, "out groups"] | None,
    *,
    interpret: bool = False,
) -> Float32[jax.Array, "T out"]:
    """x times the transpose of (values - zeros) * scales, for int4 values [out, in].

    Scales are applied to the float32 sums of groups, so the widened kernel is exact.

    Args:
      interpret: run in Pallas's interpreter.
    """
    rows, inputs = x.shape
    group = inputs // scales.shape[1]
    # Sums of a group are held beside those of all, so tiles are smaller than those of wide kernels.
    tiling = RunsTiling(16 if rows <= 16 else 64, 64, min(group, _LARGEST), 4, 3)
    if x.dtype == jnp.float32:
        tiling = RunsTiling(16, 32, 32, 4, 2)
    pairs = lax.bitcast_convert_type(values.reshape(len(values), -1, 2), jnp.uint8)
    even, odd = jnp.unstack(x.reshape(rows, -1, 2), axis=2)
    arrays = (even, odd, pairs, scales, *(() if zeros is None else (zeros,)))
    return pl.pallas_call(
        partial(int4_kernel, tiling=tiling, group=group),
        grid=(pl.cdiv(rows, tiling.rows), pl.cdiv(len(values), tiling.columns)),
        out_shape=jax.ShapeDtypeStruct((rows, len(values)), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
    )(*arrays)


def int4_kernel(even: Any, odd: Any, pairs: Any, scales: Any, *rest: Any, tiling: RunsTiling, group: int):
    """Multiply a tile of rows by some rows of the kernel."""
    *zeros, y = rest
    (n_rows, n_pairs), outputs, half = even.shape, pairs.shape[0], tiling.depth // 2
    rows = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows)
    columns = pl.program_id(1) * tiling.columns + jnp.arange(tiling.columns)
    precision = lax.Precision.HIGHEST if even.dtype == jnp.float32 else None

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        at, of = i * half + jnp.arange(half), jnp.full_like(columns, i * tiling.depth // group)
        both = load_part(pairs, (), columns, outputs, at, n_pairs).astype(jnp.int32)
        sums = jnp.zeros_like(acc)
        for x, numbers in ((even, both & 15), (odd, both >> 4)):
            wide = (numbers ^ 8) - 8  # of four bits with a sign
            if zeros:
                points = plgpu.load(zeros[0].at[columns, of], mask=columns < outputs, other=0)
                wide -= points.astype(jnp.int32)[:, None]
            left, axes = load_part(x, (), rows, n_rows, at, n_pairs), (((1,), (1,)), ((), ()))
            sums += lax.dot_general(
                left, wide.astype(left.dtype), axes, precision=precision, preferred_element_type=jnp.float32
            )
        scale = plgpu.load(scales.at[columns, of], mask=columns < outputs, other=0)
        return acc + sums * scale.astype(jnp.float32)[None, :]

    empty = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    acc = lax.fori_loop(0, n_pairs // half, step, empty)
    at = jnp.broadcast_arrays(rows[:, None], columns[None, :])
    plgpu.store(y.at[at[0], at[1]], acc, mask=(at[0] < n_rows) & (at[1] < outputs))
