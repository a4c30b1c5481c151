"""Packs a plan into one int32 array, and unpacks it on the device.

Tokens, block tables and sampling parameters of the rows stay on the device (`RowState`), so a plan is a few integers
per chunk. One packed array costs 34 us per launch; six host arrays cost 155 us. A plan carries no tokens: the device
reads them from the row's history, to which the sampler has written the newest one. So an iteration can be launched
before the host knows the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxserve.iteration import Admission, Chunk, IterationPlan, max_chunks, max_points, max_table_changes
from jaxserve.sampling import sampler
from jaxserve.scheduler.cache_groups import CacheGroups
from pallas_kernels.api import AttentionBatch

_CHUNK_FIELDS = 4  # row, start, length, samples
_CHANGE_FIELDS = 3  # row, index, block
_DRAFT_FIELDS = 3  # row, position, token


class RowState(NamedTuple):
    """The state of each row on the devices of a stage.

    Attributes:
      history: int32[rows, max_context] tokens by position; first and last stage only.
      tables: int32[rows, entries] block tables.
      sampling: per-row sampling parameters; last stage only.
    """

    history: jax.Array | None
    tables: jax.Array
    sampling: sampler.RowSampling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The sizes that fix the packed form of a plan.

    Attributes:
      groups: the cache groups, whose entries alternate in block tables.
      draft_tokens: most tokens drafted for one row; 0 without speculation.
      fewest_tokens: that the device computes with; smaller buckets are filled up.
    """

    bucket: int
    max_rows: int
    n_rows: int
    groups: CacheGroups
    draft_tokens: int = 0
    fewest_tokens: int = 1

    @property
    def tokens(self) -> int:
        """Flat tokens on the device."""
        return max(self.bucket, self.fewest_tokens)

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.groups.block_size

    @property
    def max_context(self) -> int:
        """Most tokens of a row."""
        return self.groups.max_context

    @property
    def entries(self) -> int:
        """Entries of a row's block table."""
        return self.groups.count * -(-self.max_context // self.block_size)

    @property
    def chunks(self) -> int:
        """Chunks that fit into the packed form."""
        return max_chunks(self.bucket, self.max_rows)

    @property
    def points(self) -> int:
        """Positions that can be sampled (S): one per chunk, or more with drafted tokens."""
        return max_chunks(self.bucket, max_points(self.max_rows, self.draft_tokens))

    @property
    def drafts(self) -> int:
        """Drafted tokens that fit into a plan of any bucket: one less than the sample positions."""
        return max_points(self.max_rows, self.draft_tokens) - 1

    @property
    def changes(self) -> int:
        """Block-table changes that fit into the packed form."""
        return self.groups.count * max_table_changes(self.bucket, self.max_rows, self.block_size)

    @property
    def size(self) -> int:
        """Length of the packed array."""
        return self.chunks * _CHUNK_FIELDS + self.changes * _CHANGE_FIELDS


class BatchView(NamedTuple):
    """One iteration as the device sees it.

    T tokens (`BatchLayout.tokens`), S sample positions.

    Attributes:
      attention: lengths, tables and positions for the attention backend.
      tokens: int32[T], arbitrary for padding; None in a stage without token histories.
      next_tokens: int32[T] the known token after each, for prompt scoring; None likewise.
      last: int32[S] index of the flat token before each sample position.
      points: int32[S, 3] the sample positions; see `SamplePoints`.
    """

    attention: AttentionBatch
    tokens: jax.Array | None
    next_tokens: jax.Array | None
    last: jax.Array
    points: jax.Array


class PackedPlan(NamedTuple):
    """A plan in the device's form: the iteration, and the writes to rows that come before it.

    Attributes:
      drafts: int32[layout.drafts, 3] row, position and token of each drafted token; None without drafts.
      copies: int32[groups * layout.max_rows, 2] source and target block of each copy, padded with -1; None without
        copies.
    """

    iteration: np.ndarray
    admissions: tuple[np.ndarray, ...]
    drafts: np.ndarray | None = None
    copies: np.ndarray | None = None


def pack(plan: IterationPlan, layout: BatchLayout, n_blocks: int) -> PackedPlan:
    """Packs a plan: chunks and table changes, admissions, drafts and block copies.

    Unused entries are chunks of length 0, and changes and drafts of a row that does not exist; the device drops them.

    Args:
      n_blocks: blocks of the first cache group. Devices do not check block numbers, so they are checked here.
    """
    packed = np.zeros(layout.size, np.int32)
    chunks, changes = _split(packed, layout)
    chunks[:, : len(plan.chunks)] = _table(plan.chunks, _CHUNK_FIELDS).T
    changes[0] = layout.n_rows
    if plan.table_changes:
        changes[:, : len(plan.table_changes)] = _table(plan.table_changes, _CHANGE_FIELDS).T
    _check_tables(plan, changes[:, : len(plan.table_changes)].T, layout, n_blocks)
    admissions = tuple(pack_admission(admission, layout) for admission in plan.admissions)
    drafts = pack_drafts(plan.chunks, plan.drafts, layout) if plan.drafts else None
    copies = pack_copies(plan, layout, n_blocks) if plan.block_copies else None
    return PackedPlan(packed, admissions, drafts, copies)


def pack_copies(plan: IterationPlan, layout: BatchLayout, n_blocks: int) -> np.ndarray:
    """Packs block copies into int32[groups * layout.max_rows, 2]."""
    count = layout.groups.count
    packed = np.full((count * layout.max_rows, 2), -1, np.int32)
    packed[: len(plan.block_copies)] = np.array(plan.block_copies, np.int32)
    for group, blocks in enumerate(layout.groups.blocks(n_blocks)):
        copies = packed[group : len(plan.block_copies) : count]
        sources, targets = set(copies[:, 0].tolist()), set(copies[:, 1].tolist())
        if copies.min() < 0 or copies.max() >= blocks or sources & targets or len(targets) < len(copies):
            raise AssertionError(f"plan {plan.sequence} copies blocks {copies.tolist()}; there are {blocks}")
    return packed


def pack_drafts(chunks: Sequence[Chunk], tokens: Sequence[int], layout: BatchLayout) -> np.ndarray:
    """Packs the tokens drafted for these chunks into int32[layout.drafts, 3]."""
    packed = np.zeros((layout.drafts, _DRAFT_FIELDS), np.int32)
    packed[:, 0] = layout.n_rows
    places = [(chunk.row, chunk.start + index) for chunk in chunks for index in range(1, chunk.samples)]
    packed[: len(places)] = [(*place, token) for place, token in zip(places, tokens, strict=True)]
    return packed


def _check_tables(plan: IterationPlan, changes: np.ndarray, layout: BatchLayout, n_blocks: int) -> None:
    """Raises AssertionError if a plan puts a block into a table that does not exist."""
    there = f"there are {layout.n_rows} rows of {layout.entries} entries and {n_blocks} blocks"
    wild = ((changes < 0) | (changes >= (layout.n_rows, layout.entries, n_blocks))).any(axis=1)
    blocks, count = (n_blocks,), layout.groups.count
    if count > 1:
        blocks = layout.groups.blocks(n_blocks)
        there = f"{there}, of which the groups have {blocks}"
        wild |= changes[:, 2] >= np.array(blocks)[changes[:, 1] % count]
    if wild.any():
        row, column, block = changes[wild.argmax()].tolist()
        raise AssertionError(f"plan {plan.sequence} sets entry {column} of row {row} to block {block}; {there}")
    for admission in plan.admissions:
        for entry, block in enumerate(admission.blocks):
            if not 0 <= block < blocks[entry % count]:
                raise AssertionError(f"plan {plan.sequence} gives row {admission.row} block {block}; {there}")


def _table(rows: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """Like np.array of short tuples, in a third of the time."""
    return np.fromiter(chain.from_iterable(rows), np.int32, width * len(rows)).reshape(-1, width)


def _split(packed, layout: BatchLayout):
    """[fields, chunks] and [fields, changes]: a field is consecutive, as a device reads it."""
    cut = layout.chunks * _CHUNK_FIELDS
    return packed[:cut].reshape(_CHUNK_FIELDS, layout.chunks), packed[cut:].reshape(_CHANGE_FIELDS, layout.changes)


def unpack(
    packed: Int32[jax.Array, " {layout.size}"],
    layout: BatchLayout,
    tables: Int32[jax.Array, "rows entries"],
    history: Int32[jax.Array, "rows max_context"] | None,
) -> tuple[BatchView, Int32[jax.Array, "rows entries"]]:
    """Unpacks a plan into the view, with all groups' block tables, and the new tables. Traced."""
    # As vectors: to take them out of a matrix is an operation each for an accelerator.
    fields = jnp.split(packed, [layout.chunks * (i + 1) for i in range(_CHUNK_FIELDS)])
    chunks, (row, column, block) = fields[:_CHUNK_FIELDS], jnp.split(fields[-1], _CHANGE_FIELDS)
    rows, starts, lengths, _ = chunks
    tables = tables.at[row, column].set(block, mode="drop")
    # By comparing all with all: a scan, a binary search and look-ups are several operations each for an accelerator.
    flat, index = jnp.arange(layout.tokens, dtype=jnp.int32), jnp.arange(layout.chunks + 1, dtype=jnp.int32)
    offsets = jnp.sum(jnp.where(index[:-1] < index[:, None], lengths, 0), axis=1, dtype=jnp.int32)
    is_later = offsets[1:] <= flat[:, None]  # [T, C]
    is_in = ~is_later & (offsets[:-1] <= flat[:, None])
    token_chunk = jnp.minimum(jnp.sum(is_later, axis=1, dtype=jnp.int32), layout.chunks - 1)
    base = jnp.sum(jnp.where(is_in, starts - offsets[:-1], 0), axis=1, dtype=jnp.int32)
    token_rows = jnp.sum(jnp.where(is_in, rows, 0), axis=1, dtype=jnp.int32)
    positions = jnp.where(flat < offsets[-1], base + flat, 0)
    batch = AttentionBatch(
        query_offsets=offsets,
        kv_lens=jnp.where(lengths > 0, starts + lengths, 0),
        block_tables=tables.at[rows].get(mode="promise_in_bounds"),
        token_chunk=token_chunk,
        positions=positions,
    )
    last, points = _points(chunks, offsets, layout)
    tokens = next_tokens = None
    if history is not None:
        following = jnp.minimum(positions + 1, layout.max_context - 1)
        tokens, next_tokens = (
            history.at[token_rows, at].get(mode="promise_in_bounds") for at in (positions, following)
        )
    return BatchView(batch, tokens, next_tokens, last, points), tables


def of_group(batch: AttentionBatch, group: int, groups: CacheGroups) -> AttentionBatch:
    """The attention batch with the block tables of one cache group. Traced."""
    if groups.count == 1:
        return batch
    return batch._replace(block_tables=batch.block_tables[:, group :: groups.count])


class SamplePoints(NamedTuple):
    """Where sampled tokens go: S entries, one for each sample of a chunk or a chunk without any.

    Attributes:
      rows: int32[S].
      positions: int32[S] position of the sampled token.
      samples: bool[S] whether a token is sampled.
    """

    rows: jax.Array
    positions: jax.Array
    samples: jax.Array


def sample_points(points: Int32[jax.Array, "S 3"]) -> SamplePoints:
    """`BatchView.points` with named fields. Traced."""
    return SamplePoints(points[:, 0], points[:, 1], points[:, 2] != 0)


def _points(
    chunks: Sequence[Int32[jax.Array, " C"]], offsets: Int32[jax.Array, " C+1"], layout: BatchLayout
) -> tuple[Int32[jax.Array, " S"], Int32[jax.Array, "S 3"]]:
    """The flat token before each sample position; row, position, whether it is sampled. Traced."""
    rows, starts, lengths, samples = chunks
    ends = starts + lengths
    last = jnp.maximum(offsets[1:] - 1, 0)
    if not layout.draft_tokens:  # one sample position per chunk
        return last, jnp.stack([rows, ends, samples], axis=1)
    upto = jnp.cumsum(jnp.maximum(samples, 1), dtype=jnp.int32)  # [C] sample positions up to each chunk
    index = jnp.arange(layout.points, dtype=jnp.int32)
    chunk = jnp.searchsorted(upto, index, side="right", method="compare_all")
    chunk = jnp.minimum(chunk, layout.chunks - 1).astype(jnp.int32)
    after = upto[chunk] - 1 - index  # sample positions of the chunk after this one
    chosen = (samples[chunk] > 0) & (index < upto[-1])
    points = jnp.stack([rows[chunk], ends[chunk] - after, chosen.astype(jnp.int32)], axis=1)
    return jnp.maximum(last[chunk] - after, 0), points


def empty_state(layout: BatchLayout, *, is_first: bool, is_last: bool) -> RowState:
    """The initial row state of a stage, as NumPy arrays."""
    history: Any = np.zeros((layout.n_rows, layout.max_context), np.int32)
    tables: Any = np.zeros((layout.n_rows, layout.entries), np.int32)
    return RowState(
        history if is_first or is_last else None, tables, sampler.empty_rows(layout.n_rows) if is_last else None
    )


def pack_admission(admission: Admission, layout: BatchLayout) -> np.ndarray:
    """Packs an admission into one int32 array: row, block table, history, sampling bits."""
    values = sampler.encode(admission.sampling, admission.prompt_length, admission.endings)
    head = np.zeros(1 + layout.entries + layout.max_context, np.int32)
    head[0] = admission.row
    head[1 : 1 + len(admission.blocks)] = admission.blocks
    tokens = 1 + layout.entries
    head[tokens : tokens + len(admission.tokens)] = admission.tokens
    return np.concatenate([head, *(np.asarray(v).reshape(-1).view(np.int32) for v in values)])


def admission_size(layout: BatchLayout) -> int:
    """Length of a packed admission."""
    sampling = sampler.empty_rows(1)
    return 1 + layout.entries + layout.max_context + sum(leaf.size for leaf in jax.tree.leaves(sampling))


def admit(state: RowState, packed: Int32[jax.Array, " size"], layout: BatchLayout) -> RowState:
    """Writes a packed admission into its row. Traced; the state is donated."""
    row, blocks, tokens, sampling = jnp.split(packed, np.cumsum([1, layout.entries, layout.max_context]))
    row = row[0]
    tables = state.tables.at[row].set(blocks)
    history = None if state.history is None else state.history.at[row].set(tokens)
    if state.sampling is None:
        return RowState(history, tables, None)
    fields = []
    for field in state.sampling:
        size = int(np.prod(field.shape[1:]))
        value = jax.lax.bitcast_convert_type(sampling[:size], field.dtype).reshape(field.shape[1:])
        fields.append(field.at[row].set(value))
        sampling = sampling[size:]
    return RowState(history, tables, sampler.RowSampling(*fields))


def write_tokens(
    history: Int32[jax.Array, "rows max_context"], points: Int32[jax.Array, "S 3"], tokens: Int32[jax.Array, " S"]
) -> Int32[jax.Array, "rows max_context"]:
    """Writes sampled tokens into the rows' histories. Traced.

    After drafts, the first token that differs from its draft is the row's newest; later ones will be overwritten.
    """
    where = sample_points(points)
    written = jnp.where(where.samples, where.rows, history.shape[0])  # no such row: dropped
    return history.at[written, where.positions].set(tokens, mode="drop")


def write_drafts(
    history: Int32[jax.Array, "rows max_context"], drafts: Int32[jax.Array, "D 3"]
) -> Int32[jax.Array, "rows max_context"]:
    """Writes drafted tokens (`PackedPlan.drafts`) into the rows' histories. Traced."""
    return history.at[drafts[:, 0], drafts[:, 1]].set(drafts[:, 2], mode="drop")


def pooled_owners(plan: IterationPlan, most: int) -> np.ndarray:  # int32[bucket]
    """The entry of `plan.pooled` that each flat token belongs to; `most` for none."""
    owners = np.full(plan.bucket, most, np.int32)
    for index, (first, end) in enumerate(plan.pooled):
        owners[first:end] = index
    return owners
