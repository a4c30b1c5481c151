"""Attention where the slots of every block are split over devices. Traced.

Each device attends to its own slots. That gives an average of their values and the logarithm of the sum of its weights,
from which the devices find their shares of the whole (as the parts of Flash-Decoding, Dao et al., 2023). Queries go to
the devices with keys and values, not these to them ("pass-Q", Yang et al., 2024, arXiv:2411.01783).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.api import PartialAttention

_LOWEST = -1e30  # replaces minus infinity where a difference of two of them must not be NaN


def share(found: PartialAttention, axes: tuple[str, ...]) -> jax.Array:
    """What this device's slots add to the attention to all slots: [T, N, D].

    Args:
      axes: the mesh axes over which slots are split.
    """
    lse = jax.lax.all_gather(found.lse, axes)  # [parts, T, N]
    highest = lse.max(0)
    weight = jnp.exp(found.lse - highest) / jnp.exp(lse - highest).sum(0)
    return (found.out * weight[..., None]).astype(found.out.dtype)


def own_sinks(sinks: jax.Array | None, axes: tuple[str, ...]) -> jax.Array | None:
    """The sinks on the first device, which counts them; none of any weight on the others."""
    return None if sinks is None else jnp.where(jax.lax.axis_index(axes) == 0, sinks, _LOWEST)
