"""A layer of attention: the calls of its kernels. It imports Triton."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import int8
from pallas_kernels.api import AttentionShape
from pallas_kernels.gpu import cuts, hopper
from pallas_kernels.gpu.kernels import combine_kernel, tile_kernel, write_kernel
from pallas_kernels.gpu.layout import Context, GpuMetadata, GpuPool
from pallas_kernels.gpu.triton_call import operands, processors, triton_call

_WRITTEN_AT_ONCE = 4096  # numbers of a tile that a program writes
_PARTS_AT_ONCE = 16  # that a program combines


@partial(jax.jit, static_argnames=("shape", "scale", "window", "interpret"))  # traced once for all layers of a program
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    meta: GpuMetadata,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    interpret: bool,
) -> tuple[jax.Array, GpuPool]:
    with jax.named_scope("attention_write"):
        pool, out = _write(q, _stored(k, v, shape), meta.slots, context, shape, interpret)
    with jax.named_scope("attention_attend"):
        context = context._replace(pool=pool)
        attend = partial(_tiles, q, context, shape=shape, scale=scale, window=window, interpret=interpret)
        split = cuts.decode_split(len(meta.decodes), shape, window)
        out = attend(meta.decodes, out, tiling=cuts.decode_tiling(shape), split=split)
        if meta.prompts is not None and hopper.serves(shape, len(q)):
            out = hopper.attend(q, context, meta.prompts, out, shape, scale, interpret)
        elif meta.prompts is not None:
            split, tiling = cuts.prompt_split(len(q), shape, window), cuts.prompt_tiling(shape, len(q))
            out = attend(meta.prompts, out, tiling=tiling, split=split, tokens=meta.prompt_tokens)
        return out, pool


def _write(
    q: jax.Array, new: GpuPool, slots: jax.Array, context: Context, shape: AttentionShape, interpret: bool
) -> tuple[GpuPool, jax.Array]:
    """The pool with the tokens' keys and values in it, and outputs, zeros for padding."""
    wide = cuts.width(shape)
    at_once = min(cuts.power_of_two(shape.num_heads), max(_WRITTEN_AT_ONCE // wide, 1))
    inputs = {f"new_{name}": x for name, x in new._asdict().items()}
    made = triton_call(
        write_kernel,
        (len(q),),
        inputs | {"slots": slots, "first_block": context.first_block},
        changed=context.pool._asdict(),
        new={"out": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        constants={
            "HEADS": shape.num_heads,
            "KV_HEADS": shape.num_kv_heads,
            "DIM": shape.head_dim,
            "BLOCK": shape.block_size,
            "WIDTH": wide,
            "AT_ONCE": at_once,
        },
        warps=4,
        stages=1,
        device_kind=shape.device_kind,
        interpret=interpret,
    )
    out = made.pop("out")
    return GpuPool(**made), out


def _tiles(
    q: jax.Array,
    context: Context,
    items: jax.Array,
    out: jax.Array,
    *,
    tiling: cuts.Tiling,
    split: cuts.Split,
    tokens: jax.Array | None = None,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """`out` with the rows of the items written.

    Args:
      tokens: where items have several queries, `GpuMetadata.prompt_tokens`.
    """
    given = {"device_kind": shape.device_kind, "interpret": interpret}
    sizes = {
        "HEADS": shape.num_heads,
        "DIM": shape.head_dim,
        "WIDTH": cuts.width(shape),
        "SLOTS": tiling.slots,
        "PART": split.part,
        "MOST_PARTS": split.most_parts,
        "WINDOW": window,
    }
    combined = items if tokens is None else tokens
    dims = (len(combined), split.most_parts, shape.num_heads)
    acc, scalar = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*dims, shape.head_dim), dims))
    one = split.most_parts == 1
    resident = processors(shape.device_kind) * tiling.resident
    made = triton_call(
        tile_kernel,
        (min(resident, len(items) * shape.num_kv_heads * split.most_parts),),
        {
            "q": q,
            **context.pool._asdict(),
            "tables": context.tables,
            "first_block": context.first_block,
            "slopes": context.slopes,
            "sinks": context.sinks,
            "items": items,
        },
        changed={"out": out if one else None},
        new={
            "part_acc": None if one else acc,
            "part_maximum": None if one else scalar,
            "part_total": None if one else scalar,
        },
        constants=sizes
        | {
            "ITEMS": len(items),
            "INDICES": cuts.power_of_two(len(items)),
            "KV_HEADS": shape.num_kv_heads,
            "BLOCK": shape.block_size,
            "MAX_BLOCKS": shape.max_blocks,
            "ROWS": tiling.rows,
            "OF_TOKENS": tokens is not None,
            "SCALE": scale,
            "SOFT_CAP": shape.soft_cap,
            "OPERANDS": operands(jnp.float32 if cuts.is_exact(shape) else jnp.bfloat16, interpret),
        },
        warps=tiling.warps,
        stages=tiling.stages,
        resident=tiling.resident,
        **given,
    )
    if one:
        return made["out"]
    parts = cuts.power_of_two(split.most_parts)
    return triton_call(
        combine_kernel,
        (len(combined), shape.num_heads),
        {**made, "sinks": context.sinks, "items": combined},
        changed={"out": out},
        constants=sizes | {"INDICES": parts, "AT_ONCE": min(parts, _PARTS_AT_ONCE)},
        warps=4,
        stages=1,
        **given,
    )["out"]


def _stored(k: jax.Array, v: jax.Array, shape: AttentionShape) -> GpuPool:
    """Keys and values in the pool's layout: [T, K, D], and scales [T, K]."""
    if shape.pool_dtype == jnp.int8:
        (keys, key_scales), (values, value_scales) = int8.quantize(k), int8.quantize(v)
        return GpuPool(keys, values, key_scales, value_scales)
    return GpuPool(k.astype(shape.pool_dtype), v.astype(shape.pool_dtype))
