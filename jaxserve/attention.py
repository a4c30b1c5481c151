"""Attention as the models see it; the only caller of pallas_kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.layers import ModelConfig
from pallas_kernels import api


def select(
    config: ModelConfig, *, name: str, dtype: jnp.dtype, block_size: int | None, max_context: int, platform: str
):
    """Picks the backend and the block size for a model.

    Returns:
      (backend, shape, reason): the reason says in words why `auto` picked this backend.

    Raises:
      ValueError: the named backend, or no backend, serves this shape or block size.
    """
    pool_dtype = jnp.float32 if platform == "cpu" else dtype  # a bfloat16 pool is 4 times slower on a CPU

    def shape_with(size: int) -> api.AttentionShape:
        return api.AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=size,
            max_blocks=-(-max_context // size),
            dtype=jnp.dtype(dtype),
            pool_dtype=jnp.dtype(pool_dtype),
            alibi=config.alibi,
        )

    selection = api.select(name, shape_with(block_size or 16), platform)
    if block_size is None:
        selected_size = selection.backend.default_block_size(shape_with(16))
        return selection.backend, shape_with(selected_size), selection.reason
    return selection.backend, shape_with(block_size), selection.reason


def make_attend(
    config: ModelConfig, backend: api.Backend, shape: api.AttentionShape, meta: Any, layer: int
) -> Callable:
    """`attend(q, k, v, pool) -> (out, pool)` for one layer of one iteration."""
    slopes = config.alibi_slopes
    slopes = None if slopes is None else jnp.asarray(np.asarray(slopes, np.float32))
    scale = config.attention_scale(layer)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any) -> tuple[jax.Array, Any]:
        with jax.named_scope("attention"):
            return backend.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=scale)

    return attend
