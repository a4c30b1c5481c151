"""Quantizes weights to int8 with one scale per row, that is, per output of a projection.

Vector-wise quantization of LLM.int8() (arXiv:2208.07339, section 2.1); activations are not quantized.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.typing import DTypeLike

from jaxserve.models.products import Quantized

_STEP = np.float32(1 / 127)


def is_quantized(name: str) -> bool:
    """Whether a parameter of this name is quantized.

    True for matrices that multiply hidden states and for the token table, which may be half of a small model. False for
    norms, biases and learned positions, and for routers, whose choices depend on small differences.
    """
    return name.endswith(("kernel", "tokens.table")) and not name.endswith("router.kernel")


def quantize(matrix: np.ndarray | jax.Array, dtype: DTypeLike, numpy: ModuleType = jnp) -> Quantized:
    """Quantizes a matrix [out, in], or a stack of them, row by row.

    A step is 1/127 of the row's largest entry.

    Args:
      dtype: dtype of the scales; values are rounded with the scales in this dtype.
      numpy: `numpy` or `jax.numpy`.
    """
    wide = matrix.astype(np.float32)
    scales = (numpy.abs(wide).max(axis=-1) * _STEP).astype(dtype)
    steps = scales.astype(np.float32)
    values = numpy.round(wide / numpy.where(steps > 0, steps, 1)[..., None])
    return Quantized(numpy.clip(numpy.nan_to_num(values), -127, 127).astype(np.int8), scales)


def on_devices(matrix: jax.Array, wanted: Quantized) -> Quantized:
    """Quantizes a matrix on its devices; the result has the shardings and layouts of `wanted`."""
    return _quantize_into(wanted.scales.dtype, wanted.values.format, wanted.scales.format)(matrix)


@cache
def _quantize_into(dtype: np.dtype, values: Format, scales: Format):
    return jax.jit(partial(quantize, dtype=dtype), out_shardings=Quantized(values, scales))
