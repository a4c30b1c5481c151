"""Products with a large kernel, native. Of few rows one takes as long as reading the kernel does; of many rows in
bfloat16 it is nearer to the CPU's own pace than XLA's, with an instruction for bfloat16 or without."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Float32

from pallas_kernels.cpu import build

# Rows for which `product.cc` is the fastest, with an instruction for bfloat16 and without.
_FEW = {"bfloat16": (8, 16), "float32": (16, 15)}
_LANES = 16  # rows are packed in as many, or in fewer, for the product of many


# (x [T, in], kernel [out, in]) -> float32[T, out], in the place of XLA's product; None of so many rows that XLA's is
# faster.
NativeProduct = Callable[[jax.Array, jax.Array], jax.Array | None]


def native(dtype: np.dtype) -> NativeProduct | None:
    """The native product of this dtype, where there is one; on one device, since the compiler cannot divide it."""
    if dtype.name not in _FEW or build.refusal() is not None:
        return None
    return multiply


def multiply(x: Float[jax.Array, "T in"], kernel: Float[jax.Array, "out in"]) -> Float32[jax.Array, "T out"] | None:
    """x times the kernel, transposed, both in bfloat16 or both in float32 (see NativeProduct)."""
    (rows, _), outputs = x.shape, kernel.shape[0]
    in_pairs = build.level().endswith("bf16")
    if rows <= _FEW[x.dtype.name][0 if in_pairs else 1]:
        return jax.ffi.ffi_call(build.PRODUCT, jax.ShapeDtypeStruct((rows, outputs), jnp.float32))(x, kernel)
    return _multiply_many(x, kernel, in_pairs=in_pairs) if x.dtype == jnp.bfloat16 else None


def _multiply_many(
    x: BFloat16[jax.Array, "T in"], kernel: BFloat16[jax.Array, "out in"], *, in_pairs: bool
) -> Float32[jax.Array, "T out"]:
    rows, depth = x.shape
    y = jax.ShapeDtypeStruct((rows, kernel.shape[0]), jnp.float32)
    in_lanes = -(-rows // _LANES) * _LANES
    packed = jax.ShapeDtypeStruct((in_lanes, depth), jnp.float32)
    if in_pairs:
        packed = jax.ShapeDtypeStruct((in_lanes, -(-depth // 2) * 2), jnp.bfloat16)
    return jax.ffi.ffi_call(build.PRODUCT_MANY, (y, packed))(x, kernel)[0]
