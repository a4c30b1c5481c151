"""Chooses an attention backend and calls it for each layer.

On a mesh, each device runs the kernel on its own heads (`shard_map`), on the rows of its own part of the pool if that
is split by rows, and on its own slots of every block if they are split. The compiler divides everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models import Model
from jaxserve.models.schema import ModelConfig
from jaxserve.runner import kv_cache, row_parts, slot_parts
from pallas_kernels import api
from sharding.spec import ShardingSpec, partition, shown


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
    # An error names rows, heads and slots that are on the same devices.
    kv_cache.split_of((None, "heads", "slots"), (mesh.size, config.num_heads, mesh.size), mesh, spec)
    slots = kv_cache.slot_axes(mesh, spec)
    n_slot_parts = kv_cache.slot_parts(mesh, spec)
    if block_size is not None and block_size % n_slot_parts:
        raise ValueError(
            f"block_size is {block_size}; with slots of the pool on {shown(slots)} it must be a multiple of "
            f"{n_slot_parts}"
        )

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
            slot_parts=n_slot_parts,
            max_rows=max_rows,
            device_kind=mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else "",
        )

    backend = api.select(name, shape_with(pool_dtype or dtype), platform).backend
    shape = shape_with(pool_dtype or backend.default_pool_dtype(dtype, platform))
    shape = shape.with_blocks(block_size or backend.default_block_size(shape) * n_slot_parts, max_context)
    backend, reason = api.select(name, shape, platform)
    return backend, shape, reason


def _named(split: PartitionSpec) -> str:
    return "none" if split[0] is None else repr(shown(split[0]))


def prepare(
    backend: api.Backend,
    shape: api.AttentionShape,
    mesh: Mesh,
    spec: ShardingSpec,
    batch: api.AttentionBatch,
    *,
    blocks: int,
    decodes_only: bool,
) -> Any:
    """What the layers of a cache group share (`Backend.prepare`), for `make_attend`.

    If the pool's rows or slots are split, each part prepares for its own.

    Args:
      blocks: of the cache group in each part.
    """
    here = partial(backend.prepare, shape=shape, decodes_only=decodes_only)
    rows, slots = kv_cache.row_axes(mesh, spec), kv_cache.slot_axes(mesh, spec)
    if not rows and not slots:
        return here(batch)

    def prepare_here(batch: api.AttentionBatch) -> Any:
        moves = (None, None)
        if rows:
            batch, *moves = row_parts.of_part(batch, jax.lax.axis_index(rows), blocks, shape.block_size)
        made = here(batch, part=jax.lax.axis_index(slots)) if slots else here(batch)
        return jax.tree.map(lambda leaf: leaf[None], (made, *moves))  # [1, ...] of [parts, ...]

    by_part = partition((*rows, *slots))
    return jax.shard_map(prepare_here, mesh=mesh, in_specs=partition(), out_specs=by_part, check_vma=False)(batch)


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
      meta: result of `prepare`.
      first_block: index of the layer's first block in the pool.
    """
    slopes, scale, window = model.alibi_slopes, model.config.attention_scale(layer), model.config.window(layer)

    def attend_here(q, k, v, pool, meta, slopes, sinks, first_block) -> tuple[Any, Any]:
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

    rows, slots = kv_cache.row_axes(mesh, spec), kv_cache.slot_axes(mesh, spec)
    parts, by_head = (*rows, *slots), kv_cache.over(mesh, kv_cache.head_target(mesh, spec))
    given, scattered = kv_cache.attended(mesh, spec, f"layers.{layer}.out.kernel")

    def attend_part(q, k, v, pool, meta, slopes, sinks, first_block):
        """Attends to the rows and slots of this device's part, and adds up the parts' results."""
        own, tokens, places = jax.tree.map(lambda leaf: leaf[0], meta)
        if rows:
            q, k, v = q[tokens], k[tokens], v[tokens]
        if slots:
            sinks = slot_parts.own_sinks(sinks, slots)
        out, pool = attend_here(q, k, v, pool, own, slopes, sinks, first_block)
        if slots:
            out = slot_parts.share(out, slots)
        if rows:
            out = out.at[places].get(mode="fill", fill_value=0)  # [T, N, D]; other parts have the other tokens
        if scattered is None:
            return jax.lax.psum(out, parts), pool
        # Parts get an axis of their own, as TPUs turn a scatter that cuts within an array's tiles into an all-reduce.
        count = kv_cache.row_parts(mesh, spec) * kv_cache.slot_parts(mesh, spec)
        sizes = (count, len(out) // count, -1) if scattered == 0 else (len(out), count, -1)
        share = jax.lax.psum_scatter(out.reshape(sizes), parts, scatter_dimension=scattered)
        return share.reshape(len(share), -1, out.shape[-1]), pool

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, sinks: jax.Array | None = None) -> tuple[Any, Any]:
        def split_pool(axes: tuple[str | None, ...]) -> PartitionSpec:
            return kv_cache.split_of(axes, (mesh.size,) * len(axes), mesh, spec)

        heads, of_heads, whole = partition(None, by_head, None), partition(by_head), partition()
        pool_heads = jax.tree.map(split_pool, backend.pool_axes(shape), is_leaf=kv_cache.is_axes)
        by_part = partition(parts) if parts else whole
        everywhere = jax.shard_map(
            attend_part if parts else attend_here,
            mesh=mesh,
            in_specs=(heads, heads, heads, pool_heads, by_part, of_heads, of_heads, whole),
            out_specs=(given, pool_heads),
            check_vma=False,  # backends start loops from constants, which the check would require them to cast
        )
        return everywhere(q, k, v, pool, meta, slopes, sinks, first_block)

    return attend
