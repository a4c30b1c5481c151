"""The simulator's plans, in which rows that only get one more token are counted."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from jaxserve.iteration import (
    Admission,
    BlockCopy,
    Chunk,
    IterationPlan,
    PooledRange,
    SamplerVariant,
    TableChange,
)
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.state import RequestState


class SteadyPlan(IterationPlan):
    """A plan with rows that decode beside its chunks. It changes when some of them are listed.

    Attributes:
      steady: number of these rows.
      starts: sum of the positions that they compute.
      listed: how many of the chunks are of rows that ran before; they come first, by key.
      group: which these rows are.
      number: of the plan among those of the group.
    """

    __slots__ = ("admissions", "bucket", "chunks", "group", "listed", "number", "sequence", "starts", "steady")
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__  # with both, setting a field takes a fifth of the time
    sequence: int
    bucket: int
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    table_changes: tuple[TableChange, ...] = ()  # a simulation has no use for these
    sampler: SamplerVariant | None = None
    scoring: bool = False
    drafts: tuple[int, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    pooled: tuple[PooledRange, ...] = ()

    def __init__(self, group: SteadyGroup, sequence: int, bucket: int) -> None:
        """A plan of the steady rows alone, the next of their group."""
        self.sequence, self.bucket, self.group, self.number = sequence, bucket, group, group.launched
        self.steady = len(group.rows)
        self.starts = group.bases + self.steady * group.launched
        self.listed = 0
        self.chunks = self.admissions = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return self.steady + sum([length for _, _, length, _ in self.chunks]) if self.chunks else self.steady

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.steady + len(self.chunks)


class SteadyPlanBuilder(PlanBuilder):
    """A plan under construction, to which the steady rows are added at the end."""

    __slots__ = ("group", "listed", "starts", "steady")

    def __init__(self, group: SteadyGroup) -> None:
        super().__init__()
        self.group, self.listed = group, 0
        self.steady = len(group.rows)
        self.starts = group.bases + self.steady * group.launched

    @property
    def decodes(self) -> int:
        return self.steady + len(self.states)

    def slots_read(self, window: int | None) -> int:
        assert window is None
        return self.starts + self.steady + super().slots_read(window)

    def admit(self, state: RequestState) -> None:
        """Let a request begin. Nobody reads the tokens of a simulation."""
        self.admissions.append(
            Admission(
                row=state.row,
                request_id=state.name,
                tokens=(),
                prompt_length=len(state.request.prompt),
                blocks=tuple(state.allocation.entries()),
                sampling=state.request.sampling,
            )
        )

    def change_table(self, state: RequestState, index: int) -> None:
        """Nobody reads the block tables of a simulation."""

    def build(self, sequence: int, bucket: int, sampler: int, *, scoring: bool) -> SteadyPlan:
        plan = SteadyPlan(self.group, sequence, bucket)
        plan.listed, plan.chunks, plan.admissions = self.listed, tuple(self.chunks), tuple(self.admissions)
        return plan


class SteadyRow(NamedTuple):
    """A steady row: plan p of its group, from `first` to `last`, computes position `base + p`."""

    state: RequestState
    base: int
    first: int
    last: int
    group: SteadyGroup


def add_row(rows: dict[int, list[SteadyRow]], plan: int, row: SteadyRow) -> None:
    """Add a row to those of a plan, unless its last plan is before it."""
    if plan <= row.last:
        rows.setdefault(plan, []).append(row)


class SteadyGroup:
    """Rows that decode in the same plans: all with one stage, a batch's with several.

    Attributes:
      rows: the steady rows, by the names of their requests, but for those whose last plan is launched.
      bases: the sum of theirs.
      launched: number of the group's plans.
      landed: when the tokens of each came.
      listing / ending / growing / publishing: by plan: the rows that are listed from it on, whose last plan it is, that
        it gives a block, and whose block is complete when it lands.
    """

    def __init__(self) -> None:
        self.rows: dict[str, SteadyRow] = {}
        self.bases = self.launched = 0
        self.landed = array("d")
        self.listing: dict[int, list[SteadyRow]] = {}
        self.ending: dict[int, list[SteadyRow]] = {}
        self.growing: dict[int, list[SteadyRow]] = {}
        self.publishing: dict[int, list[SteadyRow]] = {}
