"""The product of few bfloat16 rows with a large kernel, native. It takes as long as reading the kernel
does; XLA's takes twice that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float32

from pallas_kernels.cpu import build


class FewRows(NamedTuple):
    """A product for few rows.

    Attributes:
      most: rows that it is faster for.
      multiply: (x [T, in], kernel [out, in]) -> float32[T, out].
    """

    most: int
    multiply: Callable[[jax.Array, jax.Array], jax.Array]


def few_rows(dtype: np.dtype) -> FewRows | None:
    """The native product of this dtype, where there is one; on one device, since the compiler cannot divide it."""
    if dtype != jnp.bfloat16 or build.refusal() is not None:
        return None
    return FewRows(8 if build.level().endswith("bf16") else 4, multiply)


def multiply(x: BFloat16[jax.Array, "T in"], kernel: BFloat16[jax.Array, "out in"]) -> Float32[jax.Array, "T out"]:
    """x times the kernel, transposed; T is at most 8."""
    like = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(build.PRODUCT, like)(x, kernel)
