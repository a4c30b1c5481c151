"""Tile sizes of the TPU kernels, by device and shape.

A table has them, and a rule covers shapes that are not in it. `python -m tests.aot.tune` estimates the table from the
kernels' code. `python -m benchmarks.device.tpu_tune` measures it on a TPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pallas_kernels.api import AttentionShape
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.layout import BFLOAT16, LANES, head_span, lanes_of, operand_dtype, round_up, slot_tile

# A kernel's two buffers for keys and values fit any chip: with its scratch memory it gets 16 MiB.
_LEAST_BUFFER_BYTES, _SCRATCH_BYTES = 7 * 2**20, 9 * 2**20
# The decode kernel's two buffers take a quarter of a chip's memory, up to this.
_MOST_BUFFER_BYTES = 16 * 2**20
# Enough bytes of decodes to be on their way while as many are computed.
_STEP_BYTES = 4 * 2**20
# Keys and values of one head in one step of the prompt kernel; three such steps are in memory.
_HEAD_BYTES = 2**20


class Cut(NamedTuple):
    """Sizes of the kernels' steps.

    Attributes:
      units / unit_slots: pieces of rows in one step of the decode kernel, at most 8, and the slots of each.
      tile / tile_slots: flat tokens in one step of the prompt kernel, and the slots that it visits.
      part_rows / part_slots: most rows and slots of one product of the prompt kernel (`part_of_tile`).
      joint_parts: parts without a mask that follow each other in one block of code, in which the products of one
        overlap with the softmax of another.
    """

    units: int
    unit_slots: int
    tile: int
    tile_slots: int
    part_rows: int
    part_slots: int
    joint_parts: int


class Part(NamedTuple):
    """Sizes of one product of the prompt kernel.

    Attributes:
      members: query heads of a part; 1 where a part is some tokens of one head.
      tokens: tokens of each of them.
      slots: slots of a part, in whole blocks.
    """

    members: int
    tokens: int
    slots: int

    @property
    def rows(self) -> int:
        """Rows of the product."""
        return self.members * self.tokens


class Key(NamedTuple):
    """The key of the table of sizes: the name of the chip, and the layout of a slot."""

    chip: str
    head_dim: int
    group: int
    lanes: int
    pool_dtype: str


# Estimated, not measured: sizes that take at least 3% fewer cycles than the rule's.
TABLE: Mapping[Key, Cut] = {
    Key("v4", 128, 4, 1024, "bfloat16"): Cut(3, 256, 256, 1024, 512, 512, 1),
    Key("v4", 128, 8, 256, "bfloat16"): Cut(8, 256, 128, 1024, 512, 512, 1),
    Key("v4", 64, 8, 512, "bfloat16"): Cut(7, 256, 128, 2048, 512, 512, 1),
    Key("v5e", 128, 4, 1024, "bfloat16"): Cut(4, 256, 512, 1024, 256, 512, 2),
    Key("v5e", 128, 8, 256, "bfloat16"): Cut(8, 256, 256, 1024, 512, 512, 2),
    Key("v5e", 256, 2, 2048, "bfloat16"): Cut(2, 256, 1024, 1024, 256, 512, 2),
    Key("v5e", 64, 8, 512, "bfloat16"): Cut(8, 256, 256, 2048, 512, 512, 2),
    Key("v5p", 128, 1, 4096, "bfloat16"): Cut(1, 256, 512, 1024, 256, 512, 2),
    Key("v5p", 128, 4, 1024, "bfloat16"): Cut(4, 256, 256, 1024, 512, 512, 1),
    Key("v5p", 128, 8, 256, "bfloat16"): Cut(8, 256, 256, 1024, 512, 512, 1),
    Key("v5p", 64, 8, 512, "bfloat16"): Cut(8, 256, 256, 1024, 512, 512, 1),
    Key("v6e", 128, 4, 1024, "bfloat16"): Cut(4, 256, 512, 2048, 512, 512, 4),
    Key("v6e", 128, 8, 256, "bfloat16"): Cut(8, 256, 256, 2048, 512, 512, 4),
    Key("v6e", 256, 2, 2048, "bfloat16"): Cut(2, 256, 1024, 2048, 512, 512, 4),
    Key("v6e", 64, 8, 512, "bfloat16"): Cut(8, 256, 256, 2048, 512, 512, 4),
    Key("tpu7x", 64, 1, 1024, "bfloat16"): Cut(8, 128, 1024, 2048, 512, 512, 4),
    Key("tpu7x", 128, 1, 4096, "bfloat16"): Cut(2, 128, 1024, 2048, 512, 512, 4),
    Key("tpu7x", 128, 1, 896, "bfloat16"): Cut(8, 128, 1024, 2048, 512, 512, 4),
    Key("tpu7x", 128, 4, 1024, "bfloat16"): Cut(8, 128, 512, 1024, 512, 512, 2),
    Key("tpu7x", 128, 8, 256, "bfloat16"): Cut(8, 256, 256, 2048, 512, 512, 4),
    Key("tpu7x", 256, 2, 2048, "bfloat16"): Cut(4, 128, 1024, 1024, 512, 512, 2),
    Key("tpu7x", 64, 8, 512, "bfloat16"): Cut(8, 256, 256, 2048, 512, 512, 4),
}


def key(shape: AttentionShape) -> Key:
    return Key(chip(shape).name, shape.head_dim, shape.group, lanes_of(shape), str(shape.pool_dtype))


def entry(shape: AttentionShape, cut: Cut) -> str:
    """The line of the table that gives a shape these sizes."""
    return f"Key{tuple(key(shape))}: Cut{tuple(cut)},"


def cut(shape: AttentionShape, n_tokens: int) -> Cut:
    """The sizes for a bucket of `n_tokens` tokens."""
    return fitted(TABLE.get(key(shape), by_rule(shape)), shape, n_tokens)


def fitted(wanted: Cut, shape: AttentionShape, n_tokens: int) -> Cut:
    """The same sizes in whole blocks, with tiles that fit the bucket and parts that fit a step."""
    size = shape.local_slots
    tile_slots = max(1, wanted.tile_slots // size) * size
    return wanted._replace(
        unit_slots=max(1, wanted.unit_slots // size) * size,
        tile=min(wanted.tile, round_up(n_tokens, 16 if n_tokens <= LANES else LANES)),
        tile_slots=tile_slots,
        joint_parts=max(1, min(wanted.joint_parts, tile_slots // wanted.part_slots)),
    )


def by_rule(shape: AttentionShape) -> Cut:
    """Sizes by rule.

    Decodes have 4 MiB in a step if that fits: at most eight units of 256 slots, or of 128 where slots are wide. A row's
    last unit is computed whole, so smaller ones waste less on short rows; larger ones have fewer branches. Prompts have
    1,024 rows, or 512 where two cores share the tiles, and 2,048 slots, or fewer where a slot is wide.
    """
    fit = buffer_bytes(shape) // (2 * slot_bytes(shape))  # slots of a step that fit in
    slots = max(shape.local_slots, min(256 if fit >= 512 else 128, fit))
    fit = min(fit, _STEP_BYTES // slot_bytes(shape))
    is_exact, is_wide = operand_dtype(shape) != BFLOAT16, chip(shape).is_wide
    rows = 256 if is_exact else 1024 // chip(shape).cores
    of_head = 2 * head_span(shape) * shape.pool_dtype.itemsize
    return Cut(
        units=max(1, min(8, fit // slots)),
        unit_slots=slots,
        tile=max(16, rows // shape.group // 16 * 16),
        tile_slots=min(2048, _HEAD_BYTES // of_head),
        part_rows=128 if is_exact else 512 if is_wide else 256,
        part_slots=512,
        joint_parts=1 if is_exact else 4 if is_wide else 2,
    )


def part_of_tile(shape: AttentionShape, cut: Cut) -> Part:
    """The largest part within the cut's limits that divides a tile and a step's slots."""
    most, tile, size = max(16, cut.part_rows), cut.tile, shape.local_slots
    tokens = next(n for n in range(min(tile, most) // 16 * 16, 0, -16) if tile % n == 0)
    members = 1
    if tokens == tile:
        members = next(n for n in range(max(1, min(shape.group, most // tile)), 0, -1) if shape.group % n == 0)
    blocks, wanted = cut.tile_slots // size, max(1, cut.part_slots // size)
    return Part(members, tokens, next(n for n in range(min(blocks, wanted), 0, -1) if blocks % n == 0) * size)


def sums_by_product(shape: AttentionShape) -> bool:
    """Whether sums of weights are further lanes of the product with the values.

    On some devices those lanes cost nothing. Scales of values come between the sums and the product.
    """
    has_free_lanes = chip(shape).whole_results and head_span(shape) % (2 * LANES) == LANES
    return has_free_lanes and operand_dtype(shape) == BFLOAT16 and shape.pool_dtype == BFLOAT16


def slot_bytes(shape: AttentionShape) -> int:
    """Bytes of a slot's keys and values."""
    return 2 * lanes_of(shape) * shape.pool_dtype.itemsize


def largest_block(shape: AttentionShape) -> int:
    """Most slots in a block that the kernels can hold; 0 if fewer than one memory tile."""
    tile = slot_tile(shape.pool_dtype)
    return _LEAST_BUFFER_BYTES // (2 * slot_bytes(shape)) // tile * tile


def buffer_bytes(shape: AttentionShape) -> int:
    """Most bytes of the decode kernel's two buffers for keys and values."""
    return max(_LEAST_BUFFER_BYTES, min(_MOST_BUFFER_BYTES, chip(shape).memory // 4))


def memory_of_decodes(units: int, slots: int, shape: AttentionShape) -> int:
    """Bytes of the chip's memory that the decode kernel may use."""
    return max(_LEAST_BUFFER_BYTES, 2 * units * slots * slot_bytes(shape)) + _SCRATCH_BYTES
