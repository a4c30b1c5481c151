"""Ragged attention for GPUs, in Triton: A100 (sm_80), H100 and H200 (sm_90).

A layer is a few kernels on grids of fixed size; programs without work return at once. First, new keys and values are
written to their slots. Then tiles of queries attend, on tensor cores (FlashAttention-2, Dao, 2023). A query that is
computed alone (a decode) is a tile for each KV head and part of its context; the parts are combined at the end
(Flash-Decoding, Dao et al., 2023). Their number depends only on static sizes, and their bounds only on the row's own
length. Longer chunks are tiles of many queries; H100 and H200 have a kernel of their own for them (`hopper`). Softmax
is online (Milakov and Gimelshein, 2018) and to base 2.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32

from pallas_kernels import int8
from pallas_kernels.api import ONE_SLOT_PART, AttentionBatch, AttentionShape
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.layout import LEAST_DOT, Context, GpuPool, Tiling, is_exact, power_of_two, width
from pallas_kernels.gpu.triton_call import capability, triton_call

# Enough programs to keep every processor reading: about eight on each of an H200's 132.
_PROGRAMS = 1024
# Fewest slots of a part of a context while there are more programs than that, and most slots.
_LEAST_PART, _MOST_PART = 128, 4096
_WRITTEN_AT_ONCE = 4096  # numbers of a tile that a program writes
_BFLOAT16, _INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)
_DTYPES = (np.dtype(np.float32), _BFLOAT16)


class GpuMetadata(NamedTuple):
    """The work of an iteration, which all layers share.

    Attributes:
      slots: int32[T, 2]. Block and slot in it that each token is written to; block -1 for padding.
      decodes / prompts: int32[n, 4]. Queries that one program computes together: first flat token, number (0 for
        none), position of the last, chunk.
      tables: int32[C, max_blocks].
    """

    slots: jax.Array
    decodes: jax.Array
    prompts: jax.Array | None
    tables: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBackend:
    """The GPU backend.

    Attributes:
      interpret: run the kernels in interpreters, which work on a CPU.
    """

    interpret: bool = False
    name = "gpu"
    platforms = frozenset({"gpu"})

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.slot_parts > 1:
            return ONE_SLOT_PART
        if shape.dtype not in _DTYPES:
            return f"queries of {shape.dtype}; it serves float32 and bfloat16"
        if shape.pool_dtype not in (*_DTYPES, _INT8):
            return f"pool of {shape.pool_dtype}; it serves float32, bfloat16 and int8"
        if shape.head_dim > 256:
            return f"head_dim {shape.head_dim}; it serves up to 256"
        most = 64 if is_exact(shape) else 128
        if shape.group > most:
            return f"{shape.group} query heads of {shape.dtype} to a KV head; it serves up to {most}"
        return None if self.interpret else _missing(shape.device_kind)

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 64

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> GpuPool:
        block = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        held = jax.ShapeDtypeStruct((n_blocks, *block), shape.pool_dtype)
        scales = jax.ShapeDtypeStruct((n_blocks, *block[:2]), np.float32) if shape.pool_dtype == _INT8 else None
        return GpuPool(held, held, scales, scales)

    def pool_axes(self, shape: AttentionShape) -> GpuPool:
        axes = (None, "heads", None, None)
        scales = axes[:3] if shape.pool_dtype == _INT8 else None
        return GpuPool(axes, axes, scales, scales)

    def saves_on_decodes(self, n_tokens: int, n_chunks: int) -> bool:
        return n_tokens > n_chunks

    def prepare(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        decodes_only: bool = False,
        part: jax.Array | int = 0,
    ) -> GpuMetadata:
        del part
        with jax.named_scope("attention_prepare"):
            n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
            in_use = jnp.arange(n_tokens) < batch.query_offsets[-1]
            column = jnp.minimum(batch.positions // shape.block_size, shape.max_blocks - 1)
            block = jnp.where(in_use, batch.block_tables[batch.token_chunk, column], -1)
            slots = jnp.stack([block, batch.positions % shape.block_size], axis=1)
            if n_tokens <= n_chunks:  # tiles would save no programs, so each token is computed alone
                decodes = _items(jnp.arange(n_tokens), in_use, batch.positions, batch.token_chunk)
                return GpuMetadata(slots, decodes, None, batch.block_tables)
            single = jnp.diff(batch.query_offsets) == 1
            decodes = _items(batch.query_offsets[:-1], single, batch.kv_lens - 1, jnp.arange(n_chunks))
            prompts = None if decodes_only else _prompt_items(batch, shape)
            return GpuMetadata(slots, decodes, prompts, batch.block_tables)

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: GpuPool,
        meta: GpuMetadata,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        window: int | None = None,
        sinks: Float[jax.Array, " N"] | None = None,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"], GpuPool]:
        first = jnp.asarray(first_block, jnp.int32).reshape(1)
        slopes, sinks = (None if x is None else jnp.asarray(x, jnp.float32) for x in (slopes, sinks))
        context = Context(pool, meta.tables, first, slopes, sinks)
        return _attend(q, k, v, context, meta, shape, scale, window, self.interpret)


BACKEND = GpuBackend()


def _missing(device_kind: str) -> str | None:
    """What the kernels need and do not have."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}; its kernels need jax 0.11"
    if importlib.util.find_spec("triton") is None:
        return "no Triton (pip install triton)"
    if capability(device_kind) is None:
        return f"device {device_kind!r}; it serves A100, H100 and H200"
    return None


# Lists of work, made once per iteration.


def _items(start: jax.Array, count: jax.Array, last: jax.Array, chunk: jax.Array) -> Int32[jax.Array, "n 4"]:
    return jnp.stack([x.astype(jnp.int32) for x in (start, count, last, chunk)], axis=1)


def _prompt_items(batch: AttentionBatch, shape: AttentionShape) -> Int32[jax.Array, "n 4"]:
    """Tiles of all chunks longer than one; later ones first, because their contexts are longer."""
    n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
    on_hopper = hopper.serves(shape, n_tokens)
    size = hopper.QUERIES if on_hopper else _prompt_tiling(shape, n_tokens).rows // shape.group
    lengths = jnp.diff(batch.query_offsets)
    counts = jnp.where(lengths > 1, -(-lengths // size), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    place = ends[-1] - 1 - jnp.arange(n_tokens // size + min(n_chunks, n_tokens // 2), dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum(ends <= place[:, None], axis=1, dtype=jnp.int32), n_chunks - 1)
    start = batch.query_offsets[chunk] + (place - (ends - counts)[chunk]) * size
    end = jnp.minimum(start + size, batch.query_offsets[chunk + 1])
    last = batch.kv_lens[chunk] - 1 - (batch.query_offsets[chunk + 1] - end)
    items = _items(start, jnp.where(place >= 0, end - start, 0), last, chunk)
    return items[jnp.argsort(jnp.where(place >= 0, -last, 1))] if on_hopper else items


# Static choices.


def _prompt_tiling(shape: AttentionShape, n_tokens: int) -> Tiling:
    wide = width(shape)
    if is_exact(shape):  # registers hold two parts of each operand: 64 rows would not fit
        most, slots, warps, stages = (32, 32, 8, 2) if wide <= 128 else (16, 16, 8, 2)
    else:
        most, slots, warps, stages = 128, 64 if wide <= 128 else 32, 8, 2
    rows = max(min(max(most, power_of_two(shape.group)), power_of_two(n_tokens * shape.group)), LEAST_DOT)
    return Tiling(rows, slots, warps if rows >= most else 4, stages)


def _decode_tiling(shape: AttentionShape) -> Tiling:
    """The tiling for the query heads of one token that share a KV head."""
    rows, wide = max(power_of_two(shape.group), LEAST_DOT), width(shape) > 128
    if is_exact(shape):
        return Tiling(rows, 16 if wide else 32, 8, 2)
    return Tiling(rows, 32 if wide else 64, 4 if rows <= 64 else 8, 3)


def _n_parts(items: int, shape: AttentionShape, window: int | None = None) -> int:
    """The number of parts that contexts of decodes, as far as they are visible, are split into."""
    context = shape.max_blocks * shape.block_size
    if window is not None:
        context = min(context, window)
    wanted = min(_PROGRAMS // (items * shape.num_kv_heads), context // _LEAST_PART)
    return power_of_two(max(wanted, -(-context // _MOST_PART), 1))


# A layer.


@partial(jax.jit, static_argnames=("shape", "scale", "window", "interpret"))  # traced once for all layers of a program
def _attend(
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
        parts = _n_parts(len(meta.decodes), shape, window)
        out = attend(meta.decodes, out, tiling=_decode_tiling(shape), parts=parts)
        if meta.prompts is not None and hopper.serves(shape, len(q)):
            out = hopper.attend(q, context, meta.prompts, out, shape, scale, interpret)
        elif meta.prompts is not None:
            out = attend(meta.prompts, out, tiling=_prompt_tiling(shape, len(q)), parts=1)
        return out, pool


def _write(
    q: jax.Array, new: GpuPool, slots: jax.Array, context: Context, shape: AttentionShape, interpret: bool
) -> tuple[GpuPool, jax.Array]:
    """The pool with the tokens' keys and values in it, and outputs, of which those of padding are zeros."""
    from pallas_kernels.gpu.kernels import write_kernel  # which imports Triton

    wide = width(shape)
    at_once = min(power_of_two(shape.num_heads), max(_WRITTEN_AT_ONCE // wide, 1))
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
    tiling: Tiling,
    parts: int,
    shape: AttentionShape,
    scale: float,
    window: int | None,
    interpret: bool,
) -> jax.Array:
    """`out` with the rows of the items written; their contexts are read in so many parts."""
    from pallas_kernels.gpu.kernels import combine_kernel, tile_kernel, tl  # which import Triton

    given = {"device_kind": shape.device_kind, "interpret": interpret}
    sizes = {
        "HEADS": shape.num_heads,
        "DIM": shape.head_dim,
        "WIDTH": width(shape),
        "SLOTS": tiling.slots,
        "WINDOW": window,
    }
    dims = (len(items), parts, shape.num_heads)
    acc, scalar = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*dims, shape.head_dim), dims))
    one = parts == 1
    made = triton_call(
        tile_kernel,
        (len(items), shape.num_kv_heads, parts),
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
            "KV_HEADS": shape.num_kv_heads,
            "BLOCK": shape.block_size,
            "MAX_BLOCKS": shape.max_blocks,
            "ROWS": tiling.rows,
            "SCALE": scale,
            "SOFT_CAP": shape.soft_cap,
            # The interpreter holds bfloat16 as integers.
            "OPERANDS": tl.float32 if interpret or is_exact(shape) else tl.bfloat16,
        },
        warps=tiling.warps,
        stages=tiling.stages,
        **given,
    )
    if one:
        return made["out"]
    return triton_call(
        combine_kernel,
        (len(items), shape.num_heads),
        {**made, "sinks": context.sinks, "items": items},
        changed={"out": out},
        constants=sizes | {"PARTS": parts},
        warps=4,
        stages=1,
        **given,
    )["out"]


def _stored(k: jax.Array, v: jax.Array, shape: AttentionShape) -> GpuPool:
    """Keys and values in the pool's layout: [T, K, D], and scales [T, K]."""
    if shape.pool_dtype == _INT8:
        (keys, key_scales), (values, value_scales) = int8.quantize(k), int8.quantize(v)
        return GpuPool(keys, values, key_scales, value_scales)
    return GpuPool(k.astype(shape.pool_dtype), v.astype(shape.pool_dtype))
