"""Attention as the models see it; the only caller of pallas_kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.models.schema import ModelConfig
from pallas_kernels import api


def select(
    config: ModelConfig, *, name: str, dtype: np.dtype, block_size: int | None, max_context: int, platform: str
) -> tuple[api.Backend, api.AttentionShape, str]:
    """Picks the backend and the block size for a model.

    Returns:
      (backend, shape, reason): the reason says in words why this backend.

    Raises:
      ValueError: the named backend, or every backend, refuses this model or block size; the message has the reason.
    """

    def shape_in(pool_dtype: np.dtype) -> api.AttentionShape:
        return api.AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            pool_dtype=pool_dtype,
            alibi=config.alibi,
        )

    backend = api.select(name, shape_in(dtype), platform).backend
    shape = shape_in(backend.default_pool_dtype(dtype, platform))
    shape = shape.with_blocks(block_size or backend.default_block_size(shape), max_context)
    backend, reason = api.select(name, shape, platform)
    return backend, shape, reason


def make_attend(
    config: ModelConfig,
    backend: api.Backend,
    shape: api.AttentionShape,
    meta: Any,
    layer: int,
    first_block: jax.Array | int,
) -> Callable:
    """`attend(q, k, v, pool) -> (out, pool)` for one layer of one iteration.

    Args:
      first_block: where the layer's blocks begin in the pool.
    """
    slopes, scale = config.alibi_slopes, config.attention_scale(layer)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any) -> tuple[jax.Array, Any]:
        return backend.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=scale, first_block=first_block)

    return attend
