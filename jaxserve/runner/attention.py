"""Chooses an attention backend and calls it for each layer.

On a mesh, each device runs the kernel on its own heads (`shard_map`). The compiler divides everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models import Model
from jaxserve.models.schema import ModelConfig
from jaxserve.runner import kv_cache
from pallas_kernels import api
from sharding.spec import ShardingSpec, shown


def select(
    config: ModelConfig,
    mesh: Mesh,
    spec: ShardingSpec,
    *,
    name: str,
    dtype: np.dtype,
    pool_dtype: np.dtype | None,
    block_size: int | None,
    max_context: int,
    max_rows: int,
    platform: str,
) -> tuple[api.Backend, api.AttentionShape, str]:
    """Chooses the backend and the block size for a model.

    Args:
      pool_dtype: of keys and values; None for the backend's default.

    Returns:
      (backend, shape, reason): the attention shape of one device, and a sentence that explains the choice.

    Raises:
      ValueError: the heads do not divide over the mesh, or the named backend (or every backend) does not support this
        model, block size or pool; the message gives the reason.
    """
    counts = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    split = {
        axis: spec.resolve((axis,), (count,), mesh, name="attention", section="pool") for axis, count in counts.items()
    }
    if split["heads"] != split["kv_heads"]:
        raise ValueError(
            f"attention: 'heads' is on {_named(split['heads'])} and 'kv_heads' on {_named(split['kv_heads'])}; query "
            "heads and the KV heads that they read must be on the same devices"
        )
    parts = kv_cache.head_parts(mesh, spec)

    def shape_with(pool_dtype: np.dtype) -> api.AttentionShape:
        return api.AttentionShape(
            num_heads=config.num_heads // parts,
            num_kv_heads=config.num_kv_heads // parts,
            head_dim=config.head_dim,
            dtype=dtype,
            pool_dtype=pool_dtype,
            alibi=config.alibi,
            soft_cap=config.soft_cap,
            sinks=config.sinks,
            windows=config.distinct_windows,
            max_rows=max_rows,
            device_kind=mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else "",
        )

    backend = api.select(name, shape_with(pool_dtype or dtype), platform).backend
    shape = shape_with(pool_dtype or backend.default_pool_dtype(dtype, platform))
    shape = shape.with_blocks(block_size or backend.default_block_size(shape), max_context)
    backend, reason = api.select(name, shape, platform)
    return backend, shape, reason


def _named(split: PartitionSpec) -> str:
    return "none" if split[0] is None else repr(shown(split[0]))


def make_attend(
    model: Model,
    backend: api.Backend,
    shape: api.AttentionShape,
    mesh: Mesh,
    spec: ShardingSpec,
    meta: Any,
    layer: int,
    first_block: jax.Array | int,
) -> Callable:
    """Makes `attend(q, k, v, pool, sinks=None) -> (out, pool)` for one layer of one iteration.

    Args:
      meta: result of `backend.prepare`.
      first_block: index of the layer's first block in the pool.
    """
    slopes, scale, window = model.alibi_slopes, model.config.attention_scale(layer), model.config.window(layer)

    def attend_here(q, k, v, pool, meta, slopes, sinks, first_block):
        return backend.attend(
            q,
            k,
            v,
            pool,
            meta,
            shape,
            slopes=slopes,
            scale=scale,
            window=window,
            sinks=sinks,
            first_block=first_block,
        )

    if mesh.size == 1:
        return lambda q, k, v, pool, sinks=None: attend_here(q, k, v, pool, meta, slopes, sinks, first_block)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        def split(axes: tuple[str | None, ...]) -> Any:
            """The PartitionSpec of an array with as many heads as the model."""
            return spec.resolve(axes, (mesh.size,) * len(axes), mesh, name="attention", section="pool")

        heads, of_heads, whole = split((None, "heads", None)), split(("heads",)), split(())
        pool_heads = jax.tree.map(split, backend.pool_axes(shape), is_leaf=kv_cache.is_axes)
        everywhere = jax.shard_map(
            attend_here,
            mesh=mesh,
            in_specs=(heads, heads, heads, pool_heads, whole, of_heads, of_heads, whole),
            out_specs=(heads, pool_heads),
            check_vma=False,  # backends start loops from constants, which the check would require them to cast
        )
        return everywhere(q, k, v, pool, meta, slopes, sinks, first_block)

    return attend
