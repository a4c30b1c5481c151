"""Int8 keys and values, with one scale for each slot and head.

A token's rounding depends only on itself (per-token symmetric quantization, as in Xiao et al., SmoothQuant, 2023,
section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int8

STEP = np.float32(1 / 127)  # a factor, because compilers may or may not turn a division by 127 into one


def quantize(x: Float[jax.Array, "*N D"]) -> tuple[Int8[jax.Array, "*N D"], Float32[jax.Array, "*N"]]:
    """Round vectors to int8.

    Returns:
      (values, scales): x is about values * scales; the largest entry of a vector becomes 127. A vector of zeros has
      scale 0, one with an entry that is not finite has a scale of NaN.
    """
    x = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=-1)
    scales = jnp.where(jnp.isfinite(most), most * STEP, jnp.nan)
    values = jnp.round(x / jnp.where(scales > 0, scales, 1)[..., None])
    return jnp.nan_to_num(values).astype(jnp.int8), scales
