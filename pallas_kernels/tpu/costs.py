"""Estimates of the kernels' work for XLA, which cannot see into them.

XLA decides with them what runs beside a kernel. They are for a full bucket at half the longest context.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.cuts import slot_bytes


def of_decodes(shape: AttentionShape, rows: int, window: int | None) -> pl.CostEstimate:
    """The work of rows that decode a token each."""
    slots = _slots(shape, window)
    return _attention(shape, queries=rows, slots=slots, read=rows * slots)


def of_prompts(shape: AttentionShape, tokens: int, tile: int, window: int | None) -> pl.CostEstimate:
    """The work of the tokens of a bucket, of which each tile reads its slots once."""
    slots = _slots(shape, window)
    return _attention(shape, queries=tokens, slots=slots, read=-(-tokens // tile) * slots)


def of_writes(shape: AttentionShape, tokens: int) -> pl.CostEstimate:
    """The work of writing the tokens of a bucket."""
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * tokens * slot_bytes(shape))


def _slots(shape: AttentionShape, window: int | None) -> int:
    """Slots of a row that a token sees, on this device."""
    longest = shape.max_blocks * shape.block_size
    return -(-min(longest // 2, window or longest) // shape.slot_parts)


def _attention(shape: AttentionShape, *, queries: int, slots: int, read: int) -> pl.CostEstimate:
    scores = queries * shape.num_heads * slots
    rows = 2 * queries * shape.num_heads * shape.head_dim * 4  # float32 queries and results
    return pl.CostEstimate(
        flops=4 * scores * shape.head_dim, transcendentals=scores, bytes_accessed=read * slot_bytes(shape) + rows
    )
