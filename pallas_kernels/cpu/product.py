"""Products with a large kernel in bfloat16, native. Of few rows one takes as long as reading the kernel does, half of
what XLA's takes; of many rows it is nearer to the CPU's own pace, with its instruction for bfloat16 or without."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float32

from pallas_kernels.cpu import build

_FEW, _FEW_WIDENED = 8, 16  # rows for which `product.cc` is faster; the second without an instruction for bfloat16
_LANES = 16  # rows are packed in as many, or in fewer, for the product of many


# (x [T, in], kernel [out, in]) -> float32[T, out], in the place of XLA's product.
NativeProduct = Callable[[jax.Array, jax.Array], jax.Array]


def native(dtype: np.dtype) -> NativeProduct | None:
    """The native product of this dtype, where there is one; on one device, since the compiler cannot divide it."""
    if dtype != jnp.bfloat16 or build.refusal() is not None:
        return None
    return multiply


def multiply(x: BFloat16[jax.Array, "T in"], kernel: BFloat16[jax.Array, "out in"]) -> Float32[jax.Array, "T out"]:
    """x times the kernel, transposed."""
    (rows, depth), outputs = x.shape, kernel.shape[0]
    y = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    in_pairs = build.level().endswith("bf16")
    if rows <= (_FEW if in_pairs else _FEW_WIDENED):
        return jax.ffi.ffi_call(build.PRODUCT, y)(x, kernel)
    in_lanes = -(-rows // _LANES) * _LANES
    packed = jax.ShapeDtypeStruct((in_lanes, depth), jnp.float32)
    if in_pairs:
        packed = jax.ShapeDtypeStruct((in_lanes, -(-depth // 2) * 2), jnp.bfloat16)
    return jax.ffi.ffi_call(build.PRODUCT_MANY, (y, packed))(x, kernel)[0]
