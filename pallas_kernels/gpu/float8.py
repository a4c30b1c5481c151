"""Products with float8 kernels on GPUs that have no instructions for float8, in Triton.

XLA's compiler would write the wide kernel to memory there. The kernel of `grouped` widens numbers in registers, from
their bits, and takes the matrix for the only expert.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float8e4m3fn, Float32

from pallas_kernels.gpu import grouped
from pallas_kernels.gpu.triton_call import capability

_HAS_FLOAT8 = 89  # ten times the first compute capability with conversions of float8


def pays(device_kind: str) -> bool:
    """Whether XLA would write the wide kernel to memory."""
    found = capability(device_kind)
    return found is not None and found < _HAS_FLOAT8


def multiply(
    x: Float[jax.Array, "T in"],
    values: Float8e4m3fn[jax.Array, "out in"],
    *,
    device_kind: str,
    interpret: Any = False,
) -> Float32[jax.Array, "T out"]:
    """x times the transpose of a kernel, widened exactly; sums are float32.

    Args:
      device_kind: JAX's name of the GPU that the program is for.
      interpret: run in Triton's interpreter.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)[None]
    sizes = jnp.full(1, len(x), jnp.int32)
    return grouped.multiply_runs(x, bits, sizes, device_kind=device_kind, interpret=interpret)
