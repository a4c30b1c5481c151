"""Plan and result of one iteration, as values to print, log, send and replay. No jax."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.sampling_params import SamplingParams


class SamplerVariant(enum.IntEnum):
    """The sampler program that a plan needs: that of its most demanding row."""

    PLAIN = 0  # greedy decoding and temperature only
    TRUNCATED = 1  # some row has top_k, top_p or min_p
    FULL = 2  # some row has typical_p, penalties or a bias, or wants alternatives reported
    CONSTRAINED = 3  # some row has a grammar: as FULL, and takes a mask of the tokens that each row may have


class Chunk(NamedTuple):
    """The part of one request that one iteration computes; a decode has length 1.

    Attributes:
      row: the request's row.
      start: position of the chunk's first token.
      length: tokens in the chunk.
      samples: after how many of the chunk's last tokens a next token is chosen, which then stands at the position
        after it. 0 or 1, or all of 1 + k tokens: a decode with k drafted tokens behind it.
    """

    row: int
    start: int
    length: int
    samples: int


class TableChange(NamedTuple):
    """Entry `column` of a row's block table becomes `block`.

    With several cache groups (`scheduler.cache_groups`) their entries alternate: entry i is of group i % groups.
    """

    row: int
    column: int
    block: int


class PooledRange(NamedTuple):
    """Flat tokens first..end - 1 of one chunk; an embedding sums their hidden states."""

    first: int
    end: int


class BlockCopy(NamedTuple):
    """A copy of a block's content to another block, in every layer of a cache group.

    The groups alternate as in block tables.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The device state of a request that gets a row; a separate launch writes it beforehand.

    Attributes:
      tokens: every token known so far (the prompt, and what was generated before a preemption).
      prompt_length: how many of them are the prompt.
      blocks: the row's first block-table entries: blocks found in the prefix cache, or taken over from another row.
      endings: tokens that end the request, where these are barred until min_tokens were generated.
    """

    row: int
    request_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    blocks: tuple[int, ...]
    sampling: SamplingParams
    endings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """One iteration: its bucket, its chunks, and the changes to rows that come before.

    Attributes:
      sequence: 0, 1, 2, ... in launch order.
      bucket: tokens the compiled program carries; sum of chunk lengths is at most this.
      admissions: rows taken by requests in this plan.
      chunks: decodes first, then drafted or prompt chunks; at most one a row.
      table_changes: blocks newly given to rows of this plan (at most `max_table_changes(bucket, ...)` a cache group).
      sampler: the sampler this plan needs; None when no chunk samples.
      scoring: whether some chunk's tokens are scored for prompt_logprobs.
      block_copies: made before the iteration; at most one an admission and cache group, and no target is a source.
      pooled: ranges of prompts whose embeddings are made; at most one a chunk.
      drafts: the drafted tokens of the chunks that have some, in their order; written to the rows before the iteration.
    """

    sequence: int
    bucket: int
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    table_changes: tuple[TableChange, ...]
    sampler: SamplerVariant | None
    scoring: bool
    drafts: tuple[int, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    pooled: tuple[PooledRange, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.chunks)

    @property
    def num_decodes(self) -> int:
        """Number of decodes (chunks of one token that sample)."""
        return sum(chunk.length == chunk.samples for chunk in self.chunks)

    @property
    def is_decodes(self) -> bool:
        """Whether no chunk is longer than one token."""
        return all(chunk.length == 1 for chunk in self.chunks)

    @property
    def num_points(self) -> int:
        """Entries that a result must have: those of every chunk up to the last that samples."""
        last = len(self.chunks)
        while last and not self.chunks[last - 1].samples:
            last -= 1
        return sum([chunk.samples or 1 for chunk in self.chunks[:last]])


class GrammarEnd(NamedTuple):
    """The end of a constrained text, after the token just sampled.

    Attributes:
      problem: why the text cannot go on; None if it is complete.
      field: what the caller called the grammar.
    """

    problem: str | None
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationResult:
    """The device's result of one plan, as host arrays.

    Of S entries each chunk has one, or as many as it samples tokens, in the order of chunks: without drafts entry c
    belongs to `plan.chunks[c]`. There are at least `plan.num_points`.

    Attributes:
      tokens: int32[S] chosen tokens (meaningless where the chunk does not sample).
      logprobs: float32[S] their logprobs under the model.
      top_ids / top_logprobs: int32 / float32 [S, MAX_LOGPROBS], with SamplerVariant.FULL and above only.
      score_logprobs: float32[bucket], with plan.scoring only: entry t is the logprob of the token after flat token t.
      score_top_ids / score_top_logprobs: [bucket, MAX_LOGPROBS], likewise.
      pooled: float32[max_rows, hidden_size], with plan.pooled only: entry i is the sum over its range i.
      grammar_ends: of the entries whose token is their grammar's last; None where there are none.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    score_logprobs: np.ndarray | None = None
    score_top_ids: np.ndarray | None = None
    score_top_logprobs: np.ndarray | None = None
    pooled: np.ndarray | None = None
    grammar_ends: Mapping[int, GrammarEnd] | None = None


def max_chunks(bucket: int, max_rows: int) -> int:
    """Chunks one plan can hold: each has at least one token."""
    return min(bucket, max_rows)


def max_points(max_rows: int, draft_tokens: int) -> int:
    """Tokens one plan can choose: one a row, or all of one row with a whole draft."""
    return max(max_rows, 1 + draft_tokens)


def max_table_changes(bucket: int, max_rows: int, block_size: int) -> int:
    """Most blocks that one plan's tokens touch first: whole blocks, and a ragged one a chunk."""
    return bucket // block_size + max_chunks(bucket, max_rows)
