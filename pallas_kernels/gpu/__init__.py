"""Ragged attention for GPUs, in Pallas with Triton: A100 (sm_80), H100 and H200 (sm_90).

A layer is a few kernels on grids of fixed size; programs without work return at once. First, new keys and values are
written to their slots. Then tiles of queries attend, on tensor cores (FlashAttention-2, Dao, 2023). A query that is
computed alone (a decode) is a tile for each KV head and part of its context; the parts are combined at the end
(Flash-Decoding, Dao et al., 2023). Their number depends only on static sizes, and their bounds only on the row's own
length. Longer chunks are tiles of many queries; H100 and H200 have a kernel of their own for them (`hopper`). Softmax
is online (Milakov and Gimelshein, 2018) and to base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from pallas_kernels import int8
from pallas_kernels.api import ONE_SLOT_PART, AttentionBatch, AttentionShape
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.kernels import (
    LEAST_DOT,
    Context,
    GpuPool,
    PartialSums,
    Tiling,
    combine_kernel,
    is_exact,
    power_of_two,
    tile_kernel,
    width,
    write_kernel,
)

# Enough programs to keep every processor reading: about eight on each of an H200's 132.
_PROGRAMS = 1024
# Fewest slots of a part of a context while there are more programs than that, and most slots.
_LEAST_PART, _MOST_PART = 128, 4096
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
      interpret: run the kernels in Pallas's interpreter, which works on a CPU.
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
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 64

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> GpuPool:
        block = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        if shape.pool_dtype == _INT8:
            # Offsets are signed 32-bit numbers in arrays of up to 2**32 bytes.
            numbers = n_blocks * math.prod(block)
            if 2**31 < numbers <= 2**32:
                n_blocks = 2**32 // math.prod(block) + 1
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
    call = partial(_call, interpret=interpret)
    with jax.named_scope("attention_write"):
        new_out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        inputs = (_stored(k, v, shape), meta.slots, context.first_block)
        pool, out = call(partial(write_kernel, shape=shape), (len(q),), 4, 1, inputs, context.pool, new_out)
    with jax.named_scope("attention_attend"):
        inputs = (q, context._replace(pool=pool))
        statics = {"shape": shape, "scale": scale, "window": window, "interpret": interpret}

        decodes, parts = len(meta.decodes), _n_parts(len(meta.decodes), shape, window)
        tiling = _decode_tiling(shape)
        kernel = partial(tile_kernel, tiling=tiling, **statics)
        grid = (decodes, shape.num_kv_heads, parts)
        if parts == 1:
            out, _ = call(kernel, grid, *tiling[2:], (*inputs, meta.decodes), out)
        else:
            sums = (decodes, parts, shape.num_heads)
            acc, scalar = (jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((*sums, shape.head_dim), sums))
            _, made = call(kernel, grid, *tiling[2:], (*inputs, meta.decodes), None, PartialSums(acc, scalar, scalar))
            kernel = partial(combine_kernel, tiling=tiling, shape=shape, window=window)
            out, _ = call(kernel, (decodes, shape.num_heads), 4, 1, (made, context.sinks, meta.decodes), out)

        if meta.prompts is not None and hopper.serves(shape, len(q)):
            out = hopper.attend(*inputs, meta.prompts, out, shape, scale, interpret)
        elif meta.prompts is not None:
            tiling = _prompt_tiling(shape, len(q))
            kernel = partial(tile_kernel, tiling=tiling, **statics)
            grid = (len(meta.prompts), shape.num_kv_heads, 1)
            out, _ = call(kernel, grid, *tiling[2:], (*inputs, meta.prompts), out)
        return out, pool


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    inputs: tuple[Any, ...],
    changed: Any = None,
    new: Any = None,
    *,
    interpret: bool,
) -> tuple[Any, Any]:
    """Run kernel(*inputs, its own view of changed, changed, new) and return (changed, new).

    Args:
      changed: arrays that are updated in place.
      new: shapes of output arrays; their initial contents are arbitrary.
    """
    before = len(jax.tree.leaves(inputs))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), changed)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(shapes, new),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(changed)))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*inputs, changed)


def _stored(k: jax.Array, v: jax.Array, shape: AttentionShape) -> GpuPool:
    """Keys and values in the pool's layout: [T, K, D], and scales [T, K]."""
    if shape.pool_dtype == _INT8:
        (keys, key_scales), (values, value_scales) = int8.quantize(k), int8.quantize(v)
        return GpuPool(keys, values, key_scales, value_scales)
    return GpuPool(k.astype(shape.pool_dtype), v.astype(shape.pool_dtype))
