"""Products with a large kernel in bfloat16, native. Of few rows one takes as long as reading the kernel does, half of
what XLA's takes; of many rows it is nearer to the CPU's own pace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float32

from pallas_kernels.cpu import build

_FEW = 8  # rows that `product.cc` takes
_LANES = 16  # rows are packed in as many for `product_many.cc`


class NativeProduct(NamedTuple):
    """A product that takes the place of XLA's.

    Attributes:
      most: rows that it is faster for.
      multiply: (x [T, in], kernel [out, in]) -> float32[T, out].
    """

    most: int
    multiply: Callable[[jax.Array, jax.Array], jax.Array]


def native(dtype: np.dtype) -> NativeProduct | None:
    """The native product of this dtype, where there is one; on one device, since the compiler cannot divide it."""
    if dtype != jnp.bfloat16 or build.refusal() is not None:
        return None
    return NativeProduct(sys.maxsize if build.level().endswith("bf16") else _FEW // 2, multiply)


def multiply(x: BFloat16[jax.Array, "T in"], kernel: BFloat16[jax.Array, "out in"]) -> Float32[jax.Array, "T out"]:
    """x times the kernel, transposed. T is at most 8 where the CPU has no instruction for bfloat16."""
    (rows, depth), outputs = x.shape, kernel.shape[0]
    y = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    if rows <= _FEW:
        return jax.ffi.ffi_call(build.PRODUCT, y)(x, kernel)
    packed = jax.ShapeDtypeStruct((-(-rows // _LANES) * _LANES, -(-depth // 2) * 2), jnp.bfloat16)
    return jax.ffi.ffi_call(build.PRODUCT_MANY, (y, packed))(x, kernel)[0]
