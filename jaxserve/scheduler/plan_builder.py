"""A plan in the making: what the scheduler has gathered of it so far."""

from __future__ import annotations

from jaxserve.iteration import Admission, BlockCopy, Chunk, TableChange
from jaxserve.scheduler.state import RequestState


class PlanBuilder:
    """What the next plan is going to hold.

    Attributes:
      states / chunks: entry by entry, whose chunk it is and which.
      prompts / prompt_tokens: those who wait for their share of the bucket, and what they have left to compute.
      changes / admissions / copies / drafts: as `IterationPlan` has them.
    """

    __slots__ = ("admissions", "changes", "chunks", "copies", "drafts", "prompt_tokens", "prompts", "states")

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self.chunks: list[Chunk] = []
        self.prompts: list[RequestState] = []
        self.prompt_tokens = 0
        self.changes: list[TableChange] = []
        self.admissions: list[Admission] = []
        self.copies: list[BlockCopy] = []
        self.drafts: list[int] = []

    def change_table(self, state: RequestState, index: int) -> None:
        """Enter the blocks of a row from `index` on into its block table."""
        for block in state.allocation.blocks[index:]:
            self.changes.append(TableChange(state.row, index, block))
            index += 1
