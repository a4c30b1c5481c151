"""Ragged attention on TPUs: Mosaic kernels over a pool of blocks that are matmul operands.

One kernel serves leading chunks of length 1 (decodes) and writes their tokens (`decodes`). Two others serve all other
chunks (`writes`, then `prompts`). The work of each kernel is data: a kernel without work costs only its launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from pallas_kernels import int8
from pallas_kernels.api import AttentionBatch, AttentionShape, PartialAttention
from pallas_kernels.tpu import cuts, decodes, prompts, writes
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut, largest_block, slot_bytes
from pallas_kernels.tpu.decode_steps import TOKENS
from pallas_kernels.tpu.layout import (
    BFLOAT16,
    INT8,
    LANES,
    TpuPool,
    heads_of_tile,
    lanes_of,
    operand_dtype,
    result_lanes,
    round_up,
    scale_rows,
    side_by_side,
    slot_tile,
    visited,
)

_MOST_SLOTS = 128  # slots of a block by default
# Bytes of block tables that fit scalar memory: compiled for all five generations; v5e refuses 1 MiB.
_MOST_TABLES = 960 * 1024


class PromptMetadata(NamedTuple):
    """What the kernels for longer chunks read besides; their docstrings describe its use."""

    bounds: jax.Array  # int32[4], or 5 with several slot parts
    offsets: jax.Array  # int32[C + 2]: kernels read one chunk past the last, which is empty
    tile_chunks: jax.Array  # int32[2 * tiles]


class TpuMetadata(NamedTuple):
    """Arrays that all layers share; the kernels' docstrings describe their use."""

    decode_bounds: tuple[jax.Array, ...]  # int32[2 * cores + 1], for each window of the shape; or one more
    kv_lens: jax.Array  # int32[C + 1]
    tables: jax.Array  # int32[C * max_blocks]
    prompts: PromptMetadata | None  # None in a program for decodes only


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuBackend:
    """The TPU backend.

    Attributes:
      cut: tile sizes; None for the best known ones of the shape.
      interpret: `pltpu.InterpretParams` if there is no TPU.
    """

    cut: Cut | None = None
    interpret: Any = False

    @property
    def name(self) -> str:
        return "tpu"

    @property
    def platforms(self) -> frozenset[str] | None:
        return frozenset({"tpu"})

    def supports(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in (np.float32, BFLOAT16):
            return f"queries of {shape.dtype}; it serves float32 and bfloat16"
        if shape.pool_dtype not in (np.float32, BFLOAT16, INT8):
            return f"pool of {shape.pool_dtype}; it serves float32, bfloat16 and int8"
        tile, size = slot_tile(shape.pool_dtype), shape.local_slots
        if size % tile:
            return f"blocks of {size} slots; with a pool of {shape.pool_dtype} it serves multiples of {tile}"
        if max(size, tile) > largest_block(shape):
            return f"blocks of {size} slots; of {slot_bytes(shape)} bytes each it serves at most {largest_block(shape)}"
        if (tables := 4 * shape.max_rows * shape.max_blocks) > _MOST_TABLES:
            return (
                f"block tables of {shape.max_rows} rows x {shape.max_blocks} blocks; scalar memory holds "
                f"{_MOST_TABLES // 1024} KiB of them, not {tables // 1024}: it serves fewer rows or shorter contexts"
            )
        return None

    def default_block_size(self, shape: AttentionShape) -> int:
        size = _MOST_SLOTS
        while size > max(slot_tile(shape.pool_dtype), largest_block(shape)):
            size //= 2
        return size

    def default_pool_dtype(self, dtype: np.dtype, platform: str) -> np.dtype:
        del platform
        return np.dtype(dtype)

    def pool(self, shape: AttentionShape, n_blocks: int) -> TpuPool:
        size, scales = shape.local_slots, None
        if shape.pool_dtype == INT8:
            scales = jax.ShapeDtypeStruct((n_blocks, 2, scale_rows(shape), size), np.float32)
        return TpuPool(jax.ShapeDtypeStruct((n_blocks, 2, size, lanes_of(shape)), shape.pool_dtype), scales)

    def pool_axes(self, shape: AttentionShape) -> TpuPool:
        return TpuPool(
            kv=(None, None, "slots", "heads"),
            scales=(None, None, "heads", "slots") if shape.pool_dtype == INT8 else None,
        )

    def saves_on_decodes(self, n_tokens: int, n_chunks: int) -> bool:
        del n_chunks
        return n_tokens > 1  # a bucket of one token has no longer chunks

    def prepare(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        decodes_only: bool = False,
        part: jax.Array | int = 0,
    ) -> TpuMetadata:
        n_tokens = batch.positions.shape[0]
        cut, longer = self.cut or cuts.cut(shape, n_tokens), n_tokens > 1 and not decodes_only
        with jax.named_scope("attention_prepare"):
            return _prepare(batch, shape, cut, part, longer=longer)

    def attend(
        self,
        q: Float[jax.Array, "T N D"],
        k: Float[jax.Array, "T K D"],
        v: Float[jax.Array, "T K D"],
        pool: TpuPool,
        meta: TpuMetadata,
        shape: AttentionShape,
        *,
        slopes: Float32[jax.Array | np.ndarray, " N"] | None,
        scale: float,
        window: int | None = None,
        sinks: Float[jax.Array, " N"] | None = None,
        first_block: jax.Array | int = 0,
    ) -> tuple[Float[jax.Array, "T N D"] | PartialAttention, TpuPool]:
        n_tokens, n_chunks = q.shape[0], min(q.shape[0], meta.kv_lens.shape[0] - 1)
        cut = self.cut or cuts.cut(shape, n_tokens)
        slopes, sinks = (None if x is None else jnp.asarray(x, jnp.float32) for x in (slopes, sinks))
        first_block = jnp.asarray(first_block, jnp.int32).reshape(1)
        walk = (meta.kv_lens, meta.tables, first_block)
        static: dict[str, Any] = {"shape": shape, "interpret": self.interpret}
        with jax.named_scope("attention_write"):
            tokens, slots = _operands(_together(q, k, v), shape, None if meta.prompts is None else cut.tile)
            if meta.prompts is not None:
                pool = writes.write(slots, pool, meta.prompts.bounds, meta.prompts.offsets, *walk, **static)
        with jax.named_scope("attention_attend"):
            static |= {"scale": scale, "window": window}
            bounds = meta.decode_bounds[shape.windows.index(window)]
            out, pool = decodes.attend(
                tokens, pool, bounds, *walk, slopes, sinks, units=cut.units, slots=cut.unit_slots, **static
            )
            cores = chip(shape).cores
            token, n_decodes = jnp.arange(n_tokens)[:, None], bounds[cores]
            found, rest = _results(_of_cores(out, bounds, cores)[:n_chunks], shape), [0.0, 0.0]
            if meta.prompts is not None:
                of_prompts = prompts.attend(
                    tokens,
                    pool,
                    meta.prompts.bounds,
                    meta.prompts.offsets,
                    *walk,
                    meta.prompts.tile_chunks,
                    slopes,
                    sinks,
                    cut=cut,
                    **static,
                )
                of_prompts = _results(of_prompts[:n_tokens], shape)
                rest = [jnp.where(token < meta.prompts.bounds[1], each, 0.0) for each in of_prompts]
            found = [jnp.pad(each, ((0, n_tokens - n_chunks), (0, 0))) for each in found]
            out, *lse = (jnp.where(token < n_decodes, *each) for each in zip(found, rest, strict=False))
            out = out.astype(q.dtype).reshape(q.shape)
            return (PartialAttention(out, lse[0]) if lse else out), pool


def _prepare(
    batch: AttentionBatch, shape: AttentionShape, cut: Cut, part: jax.Array | int, *, longer: bool
) -> TpuMetadata:
    offsets, kv_lens, n_tokens = batch.query_offsets, batch.kv_lens, batch.positions.shape[0]
    lengths, row = jnp.diff(offsets), jnp.arange(len(kv_lens), dtype=jnp.int32)
    n_decodes = jnp.min(jnp.where(lengths == 1, len(kv_lens), row))
    which = [jnp.int32(part)[None]] if shape.slot_parts > 1 else []

    def decode_bounds(window: int | None) -> jax.Array:
        lengths = visited(kv_lens, window, shape.block_size)
        each, parts = cut.unit_slots * shape.slot_parts, chip(shape).cores  # positions of a unit
        units = jnp.where(row < n_decodes, -(-lengths // each), 0)
        ends, total = jnp.sum(jnp.where(row <= row[:, None], units, 0), axis=1), jnp.sum(units)
        begins = [jnp.sum(parts * ends < part * total, dtype=jnp.int32) for part in range(1, parts)]
        begins = [jnp.int32(0), *(jnp.minimum(begin, n_decodes) for begin in begins), n_decodes]  # rows
        counts = [jnp.sum(jnp.where((row >= low) & (row < high), units, 0)) for low, high in pairwise(begins)]
        return jnp.concatenate([jnp.stack([*begins, *counts]), *which])

    def of_prompts() -> PromptMetadata:
        # The first and the last token of each tile, by turns; all that follows is one operation for an accelerator.
        index = jnp.arange(2 * -(-n_tokens // cut.tile), dtype=jnp.int32)
        begin = index // 2 * cut.tile
        first, last = jnp.maximum(begin, n_decodes), jnp.minimum(begin + cut.tile, offsets[-1]) - 1
        token = jnp.where(index % 2 == 0, first, last)
        tile_chunks = jnp.sum(offsets[1:] <= token[:, None], axis=1, dtype=jnp.int32)
        n_chunks = jnp.sum(lengths > 0, dtype=jnp.int32)
        return PromptMetadata(
            bounds=jnp.concatenate([jnp.stack([n_decodes, offsets[-1], n_decodes, n_chunks]), *which]),
            offsets=jnp.pad(offsets, (0, 1), mode="edge"),
            tile_chunks=jnp.minimum(tile_chunks, len(kv_lens) - 1),
        )

    return TpuMetadata(
        decode_bounds=tuple(decode_bounds(window) for window in shape.windows),
        kv_lens=jnp.pad(kv_lens, (0, 1)),
        tables=batch.block_tables.reshape(-1),
        prompts=of_prompts() if longer else None,
    )


# Arrange queries, keys and values as the kernels read them, and results as the product after them does.


def _together(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[T, K, group + 2, D], as the product of a layer has them.

    XLA sees that nothing changed their places.
    """
    queries = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return jnp.concatenate([queries, jnp.stack([k, v], axis=2)], axis=2)


def _operands(together: jax.Array, shape: AttentionShape, tile: int | None) -> tuple[jax.Array, writes.NewSlots]:
    """What the kernels read: tokens to attend with, and new slots to write.

    Where they can be one array, they are: then it is what the layer's product made, and XLA copies nothing.

    Args:
      tile: of `prompts.attend`; None if there are decodes only.
    """
    n_tokens, scales = len(together), None
    multiple = min(n_tokens, TOKENS) if tile is None else max(tile, slot_tile(shape.pool_dtype))
    tokens = kv = _heads_first(together.astype(operand_dtype(shape)), shape, multiple)
    if shape.pool_dtype != tokens.dtype:
        new = together[:, :, shape.group :]
        if shape.pool_dtype == INT8:
            new, scales = int8.quantize(new)
            scales = jnp.pad(scales.transpose(2, 1, 0), ((0, 0), (0, 0), (0, round_up(n_tokens, LANES) - n_tokens)))
        kv = _heads_first(new.astype(shape.pool_dtype), shape, multiple)
    return tokens, writes.NewSlots(kv, scales)


def _heads_first(x: jax.Array, shape: AttentionShape, multiple: int) -> jax.Array:
    """[T, K, lines, D] as [K, lines, T, D], with T padded to a multiple.

    With heads `side_by_side`, as [1, lines, T, lanes].
    """
    n_tokens, padding = len(x), 0
    if side_by_side(shape):
        x = x.swapaxes(1, 2).reshape(n_tokens, 1, x.shape[2], -1)
        padding = lanes_of(shape) - x.shape[-1]
    more = round_up(n_tokens, multiple) - n_tokens
    return jnp.pad(x.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, more), (0, padding)))


def _of_cores(out: jax.Array, bounds: jax.Array, cores: int) -> jax.Array:
    """Each row from the core that computed it (see `decodes.attend`)."""
    found, *others = jnp.split(out, cores)
    row = jnp.arange(len(found))[:, None]
    for core, other in enumerate(others, 1):
        found = jnp.where(row < bounds[core], found, other)
    return found


def _results(out: jax.Array, shape: AttentionShape) -> list[jax.Array]:
    """Results of kernels [n, tiles * result_lanes] as [n, N * D].

    With several `slot_parts`, the logarithms of the sums [n, N] follow.
    """
    used, out = heads_of_tile(shape) * shape.head_dim, out.reshape(len(out), -1, result_lanes(shape))
    parts = [out[..., :used], out[..., -1:]] if shape.slot_parts > 1 else [out[..., :used]]
    return [part.reshape(len(out), -1) for part in parts]


BACKEND = TpuBackend()
