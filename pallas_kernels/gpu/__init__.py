"""Ragged attention for GPUs, in Triton: A100 (sm_80), H100 and H200 (sm_90).

A layer is a few kernels on grids of fixed size. First, new keys and values are written to their slots. Then tiles of
queries attend, on tensor cores (FlashAttention-2, Dao, 2023). A query that is computed alone (a decode) is a tile for
each KV head and part of its context; the parts are combined at the end (Flash-Decoding, Dao et al., 2023). The parts
of a context depend on static sizes and its own length, so results do not depend on other rows. A grid has as many
programs as the GPU runs at once. They divide the parts of all contexts among themselves, so no long row is left to a
few of them. Longer chunks are tiles of many queries; H100 and H200 have a kernel of their own for them (`hopper`).
Softmax is online (Milakov and Gimelshein, 2018) and to base 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32

from pallas_kernels.api import ONE_SLOT_PART, AttentionBatch, AttentionShape
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.cuts import is_exact, prompt_tiling
from pallas_kernels.gpu.layout import Context, GpuMetadata, GpuPool
from pallas_kernels.gpu.triton_call import capability, missing

_BFLOAT16, _INT8 = np.dtype(jnp.bfloat16), np.dtype(np.int8)
_DTYPES = (np.dtype(np.float32), _BFLOAT16)


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
        if shape.pool_dtype == _INT8 and shape.head_dim % 2:
            return f"head_dim {shape.head_dim} with an int8 pool; it serves even ones"
        if shape.head_dim > 256:
            return f"head_dim {shape.head_dim}; it serves up to 256"
        most = 64 if is_exact(shape) else 128
        if shape.group > most:
            return f"{shape.group} query heads of {shape.dtype} to a KV head; it serves up to {most}"
        if shape.device_kind and capability(shape.device_kind) is None and not self.interpret:
            return f"device {shape.device_kind!r}; it serves A100, H100 and H200"
        return missing() if jax.default_backend() == "gpu" else None  # plans are for other machines

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
                return GpuMetadata(slots, decodes, None, None, batch.block_tables)
            single = jnp.diff(batch.query_offsets) == 1
            decodes = _items(batch.query_offsets[:-1], single, batch.kv_lens - 1, jnp.arange(n_chunks))
            if decodes_only:
                return GpuMetadata(slots, decodes, None, None, batch.block_tables)
            prompts, tokens = _prompt_items(batch, shape), _prompt_tokens(batch, shape)
            return GpuMetadata(slots, decodes, prompts, tokens, batch.block_tables)

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
        from pallas_kernels.gpu import layer  # which imports Triton

        first = jnp.asarray(first_block, jnp.int32).reshape(1)
        slopes, sinks = (None if x is None else jnp.asarray(x, jnp.float32) for x in (slopes, sinks))
        context = Context(pool, meta.tables, first, slopes, sinks)
        return layer.attend(q, k, v, context, meta, shape, scale, window, self.interpret)


BACKEND = GpuBackend()


# Lists of work, made once per iteration.


def _items(start: jax.Array, count: jax.Array, last: jax.Array, chunk: jax.Array) -> Int32[jax.Array, "n 4"]:
    return jnp.stack([x.astype(jnp.int32) for x in (start, count, last, chunk)], axis=1)


def _prompt_items(batch: AttentionBatch, shape: AttentionShape) -> Int32[jax.Array, "n 4"]:
    """Tiles of all chunks longer than one; later ones first, because their contexts are longer."""
    n_tokens, n_chunks = batch.positions.shape[0], batch.kv_lens.shape[0]
    size = _tile_size(shape, n_tokens)
    lengths = jnp.diff(batch.query_offsets)
    counts = jnp.where(lengths > 1, -(-lengths // size), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    place = ends[-1] - 1 - jnp.arange(n_tokens // size + min(n_chunks, n_tokens // 2), dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum(ends <= place[:, None], axis=1, dtype=jnp.int32), n_chunks - 1)
    start = batch.query_offsets[chunk] + (place - (ends - counts)[chunk]) * size
    end = jnp.minimum(start + size, batch.query_offsets[chunk + 1])
    last = batch.kv_lens[chunk] - 1 - (batch.query_offsets[chunk + 1] - end)
    items = _items(start, jnp.where(place >= 0, end - start, 0), last, chunk)
    return items[jnp.argsort(jnp.where(place >= 0, -last, 1))] if hopper.serves(shape, n_tokens) else items


def _prompt_tokens(batch: AttentionBatch, shape: AttentionShape) -> Int32[jax.Array, "T 4"]:
    """Each token, and its tile's number of queries (0: in no tile), last position and chunk."""
    token, chunk = jnp.arange(batch.positions.shape[0]), batch.token_chunk
    first, behind = batch.query_offsets[chunk], batch.query_offsets[chunk + 1]
    size = _tile_size(shape, len(token))
    start = token - (token - first) % size
    end = jnp.minimum(start + size, behind)
    tiled = (behind - first > 1) & (token < batch.query_offsets[-1])
    return _items(token, jnp.where(tiled, end - start, 0), batch.kv_lens[chunk] - 1 - (behind - end), chunk)


def _tile_size(shape: AttentionShape, n_tokens: int) -> int:
    """The most tokens of a chunk that one program computes together."""
    return hopper.QUERIES if hopper.serves(shape, n_tokens) else prompt_tiling(shape, n_tokens).rows // shape.group
