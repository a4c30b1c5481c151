"""Attention where the slots of every block are split over devices. Traced.

Each device attends to its own slots. That gives the weighted average of their values and the log of the sum of their
weights (LSE). From all LSEs a device computes the share of its average in the result (as Flash-Decoding does with the
parts of a context, Dao et al., 2023). Queries are sent to the devices that hold keys and values ("pass-Q", Yang et al.,
2024, arXiv:2411.01783).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.api import PartialAttention

_LOWEST = -1e30  # in place of minus infinity, because the difference of two infinities is NaN


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
    """The sinks on the first device, without weight on the others, so that they count once."""
    return None if sinks is None else jnp.where(jax.lax.axis_index(axes) == 0, sinks, _LOWEST)
