"""Ragged attention in plain JAX that XLA compiles well for CPUs; it runs on every platform.

Chunks of length 1 (decodes) and longer ones (prompts) have separate loops over lists of actual work. A group of decode
rows visits the blocks of its longest context; a query tile of a prompt visits the blocks up to its last position. In a
layer with a sliding window, each decode row starts at the first block that it sees, and a tile at the first that one of
its queries sees. Trip counts are data, so the cost depends on the visible context, not on block tables or the pool.
Softmax is online (Milakov and Gimelshein, 2018): a fully masked block leaves maximum, sum and accumulator unchanged, to
the bit. It starts from the head's sink, if there is one.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from pallas_kernels.api import AttentionBatch, AttentionShape, PartialAttention
from pallas_kernels.xla.attention import attend_decodes, attend_prompts
from pallas_kernels.xla.pool import BFLOAT16, INT8, XlaPool, stored, write_decodes, write_prompts
from pallas_kernels.xla.work import XlaMetadata, of_layer, prepare


class XlaBackend:
    name = "xla"
    platforms = None

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in (np.float32, BFLOAT16):
            return f"queries of {shape.dtype}; it serves float32 and bfloat16"
        if shape.pool_dtype not in (np.float32, BFLOAT16, INT8):
            return f"pool of {shape.pool_dtype}; it serves float32, bfloat16 and int8"
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        del shape
        return 64

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> XlaPool:
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.local_slots
        dtype = np.uint16 if shape.pool_dtype == BFLOAT16 else shape.pool_dtype
        scales = jax.ShapeDtypeStruct((n_blocks, heads, size), np.float32) if dtype == INT8 else None
        return XlaPool(
            keys=jax.ShapeDtypeStruct((n_blocks, heads, dim, size), dtype),
            values=jax.ShapeDtypeStruct((n_blocks, heads, size, dim), dtype),
            key_scales=scales,
            value_scales=scales,
        )

    def pool_axes(self, shape: AttentionShape) -> XlaPool:
        keys, values = (None, "heads", None, "slots"), (None, "heads", "slots", None)
        scales = values[:3] if shape.pool_dtype == INT8 else None
        return XlaPool(keys=keys, values=values, key_scales=scales, value_scales=scales)

    def saves_on_decodes(self, n_tokens: int, n_chunks: int) -> bool:
        del n_tokens, n_chunks
        return False  # loops over chunks that are not there take no step

    def prepare(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        decodes_only: bool = False,
        part: jax.Array | int = 0,
    ) -> XlaMetadata:
        del decodes_only
        with jax.named_scope("attention_prepare"):
            return prepare(batch, shape, part)

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: XlaPool,
        meta: XlaMetadata,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        window: int | None = None,
        sinks: Float[jax.Array, " N"] | None = None,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"] | PartialAttention, XlaPool]:
        window = effective_window(window, shape)
        return _attend(q, k, v, pool, of_layer(meta, first_block), slopes, sinks, shape, scale, window)


def effective_window(window: int | None, shape: AttentionShape) -> int | None:
    """The window, or None if no context is longer."""
    assert window in shape.windows
    return None if window is None or window >= shape.max_blocks * shape.block_size else window


@partial(jax.jit, static_argnames=("shape", "scale", "window"))  # traced once for all layers of a kind
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: XlaPool,
    meta: XlaMetadata,
    slopes: jax.Array | None,
    sinks: jax.Array | None,
    shape: AttentionShape,
    scale: float,
    window: int | None,
) -> tuple[jax.Array | PartialAttention, XlaPool]:
    prompts = q.shape[0] > 1  # a bucket of one token has no longer chunks
    with jax.named_scope("attention_write"):
        new = stored(k, v, shape)
        pool = write_decodes(new, pool, meta.decodes)
        if prompts:
            pool = write_prompts(new, pool, meta.writes)
    with jax.named_scope("attention_attend"):
        slopes, sinks = (
            None if x is None else x.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group, 1)
            for x in (slopes, sinks)
        )
        queries = q.astype(jnp.float32).reshape(-1, shape.num_kv_heads, shape.group, shape.head_dim)  # [T, K, G, D]
        given = (pool, meta, shape, slopes, sinks, scale, window)
        lse = jnp.zeros((*queries.shape[:3], 1), jnp.float32) if shape.slot_parts > 1 else None
        found = attend_decodes(queries, PartialAttention(jnp.zeros(queries.shape, jnp.float32), lse), *given)
        if prompts:
            found = attend_prompts(queries, found, *given)
        out = found.out.reshape(q.shape).astype(q.dtype)
        return (out if lse is None else PartialAttention(out, found.lse.reshape(q.shape[:2]))), pool


BACKEND = XlaBackend()
