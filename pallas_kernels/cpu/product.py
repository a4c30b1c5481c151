"""Native matrix products for CPUs.

A product of few rows takes as long as reading the kernel. A product of many rows is faster than XLA's in bfloat16, and
in float32 with AVX-512 while memory bandwidth is the limit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int8, Int32

from pallas_kernels.cpu import build

_LANES = 16  # most rows that are packed together for the product of many rows
_FEW_OF_RUN = 4  # most rows of a run, on average, for which `product.cc` is faster
_INT8_ROWS = {"bfloat16": 64, "float32": 128}  # most rows for which the product by int8 is faster than XLA's

# (x [T, in], kernel [out, in]) -> float32[T, out], in place of XLA's product; None if XLA's is faster for that many
# rows.
NativeProduct = Callable[[jax.Array, jax.Array], jax.Array | None]


def native(dtype: np.dtype) -> NativeProduct | None:
    """The native product of this dtype, or None. It runs on one device only."""
    if dtype.name not in ("bfloat16", "float32") or build.refusal() is not None:
        return None
    return multiply


def multiply_quantized(
    x: Float[jax.Array, "T in"],
    values: jax.Array,
    scales: Float[jax.Array, "out ..."],
    zeros: Int8[jax.Array, "out groups"] | None = None,
) -> Float32[jax.Array, "T out"] | None:
    """x times the transpose of (values - zeros) * scales; None if there is no such product.

    It is there on CPUs with AVX512-VNNI, for int4 with groups of a multiple of 32 inputs, and for up to 64 rows of
    bfloat16 or 128 of float32 by int8 with a scale per row. x is rounded: for int4 to 8 bits of the largest entry in
    a group, for int8 to 15 of a row's.
    """
    if not build.level().endswith("bf16") or build.refusal() is not None:
        return None
    y = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), jnp.float32)
    if values.dtype == jnp.int8 and scales.ndim == 1 and len(x) <= _INT8_ROWS[x.dtype.name]:
        return jax.ffi.ffi_call(build.PRODUCT_INT8, y)(x, values) * scales.astype(jnp.float32)
    if values.dtype == jnp.int4 and scales.ndim == 2 and values.shape[1] // scales.shape[1] % 32 == 0:
        zeros = jnp.zeros(0, jnp.int8) if zeros is None else zeros
        return jax.ffi.ffi_call(build.PRODUCT_INT4, y)(x, values, scales.astype(x.dtype), zeros)
    return None


def limits(dtype: np.dtype) -> tuple[int, int | None]:
    """Most rows for which `product.cc` and the product of many rows are fastest (None: any).

    Measured on a CPU of the same kind as this one.
    """
    level = build.level()
    if dtype.name == "bfloat16":
        return (8 if level.endswith("bf16") else 16), None
    return (10, 128) if level.startswith("x86-64-v4") else (15, 0)


def multiply_runs(
    x: Float[jax.Array, "R in"], kernels: Float[jax.Array, "G out in"], sizes: Int32[jax.Array, " G"]
) -> Float32[jax.Array, "R out"]:
    """Multiplies runs of sizes[g] rows of x by kernels[g] transposed; later rows are zeros.

    Both are bfloat16 or both are float32. The way depends on shapes, not on sizes, so that a row's result is bitwise
    the same whatever the others.
    """
    (rows, depth), (groups, outputs, _) = x.shape, kernels.shape
    y = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    if x.dtype == jnp.bfloat16 and build.level().endswith("bf16") and rows > _FEW_OF_RUN * groups:
        in_lanes = -(-rows // _LANES) * _LANES + _LANES * min(groups, rows)
        packed = jax.ShapeDtypeStruct((in_lanes, -(-depth // 2) * 2), jnp.bfloat16)
        return jax.ffi.ffi_call(build.PRODUCT_RUNS_MANY, (y, packed))(x, kernels, sizes)[0]
    return jax.ffi.ffi_call(build.PRODUCT_RUNS, y)(x, kernels, sizes)


def multiply(x: Float[jax.Array, "T in"], kernel: Float[jax.Array, "out in"]) -> Float32[jax.Array, "T out"] | None:
    """x times the transposed kernel, both bfloat16 or both float32 (see NativeProduct)."""
    (rows, depth), outputs = x.shape, kernel.shape[0]
    few, many = limits(x.dtype)
    y = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    if rows <= few:
        return jax.ffi.ffi_call(build.PRODUCT, y)(x, kernel)
    if many is not None and rows > many:
        return None
    in_lanes = -(-rows // _LANES) * _LANES
    packed = jax.ShapeDtypeStruct((in_lanes, depth), jnp.float32)
    if x.dtype == jnp.float32:
        return jax.ffi.ffi_call(build.PRODUCT_FLOAT, (y, packed))(x, kernel)[0]
    if build.level().endswith("bf16"):
        packed = jax.ShapeDtypeStruct((in_lanes, -(-depth // 2) * 2), jnp.bfloat16)
    return jax.ffi.ffi_call(build.PRODUCT_MANY, (y, packed))(x, kernel)[0]
