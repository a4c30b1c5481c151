"""A plan under construction."""

from __future__ import annotations

from typing import Any

from jaxserve.iteration import Admission, BlockCopy, Chunk, IterationPlan, PooledRange, SamplerVariant, TableChange
from jaxserve.scheduler.state import RequestState


class PlanBuilder:
    """Collects the contents of the next plan.

    Attributes:
      states / chunks: the request and the chunk of each entry.
      prompts / prompt_tokens: requests that wait for a share of the bucket, and the tokens left to compute for them.
      changes / admissions / copies / drafts / pooled: as in `IterationPlan`.
    """

    __slots__ = ("admissions", "changes", "chunks", "copies", "drafts", "pooled", "prompt_tokens", "prompts", "states")

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self.chunks: list[Chunk] = []
        self.prompts: list[RequestState] = []
        self.prompt_tokens = 0
        self.changes: list[TableChange] = []
        self.admissions: list[Admission] = []
        self.copies: list[BlockCopy] = []
        self.drafts: list[int] = []
        self.pooled: list[PooledRange] = []

    @property
    def decodes(self) -> int:
        """Rows that decode, before prompts are added."""
        return len(self.states)

    def slots_read(self, window: int | None) -> int:
        """Slots that the decodes read, each at most `window`."""
        return sum([state.length if window is None else min(state.length, window) for state in self.states])

    def add(self, state: RequestState, chunk: Chunk) -> None:
        """Add a request's chunk."""
        self.states.append(state)
        self.chunks.append(chunk)

    def admit(self, state: RequestState) -> None:
        """Let a request begin that has its row and its first blocks."""
        self.admissions.append(state.admission())

    def change_table(self, state: RequestState, index: int) -> None:
        """Write a row's blocks from `index` on into its block table."""
        row, new, column = state.row, tuple.__new__, index * (1 + len(state.allocation.others))
        for block in state.allocation.entries(index):
            self.changes.append(new(TableChange, (row, column, block)))  # half the time of TableChange(...)
            column += 1

    def build(self, sequence: int, bucket: int, sampler: int, *, scoring: bool) -> IterationPlan:
        """The finished plan.

        Args:
          sampler: a SamplerVariant, or -1 where no chunk samples.
          scoring: whether some chunk's tokens are scored.
        """
        return IterationPlan(**self.fields(sequence, bucket, sampler, scoring=scoring))

    def fields(self, sequence: int, bucket: int, sampler: int, *, scoring: bool) -> dict[str, Any]:
        """The fields of the finished plan (see `build`)."""
        return {
            "sequence": sequence,
            "bucket": bucket,
            "admissions": tuple(self.admissions),
            "chunks": tuple(self.chunks),
            "table_changes": tuple(self.changes),
            "sampler": None if sampler < 0 else SamplerVariant(sampler),
            "scoring": scoring,
            "drafts": tuple(self.drafts),
            "block_copies": tuple(self.copies),
            "pooled": tuple(self.pooled),
        }
