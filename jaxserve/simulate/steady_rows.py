"""A scheduler that leaves rows alone while all that happens to them is one more token in each iteration.

Most rows of most iterations are such. The simulator counts them instead of listing them, so an iteration costs it time
with the rows to which something else happens. Every decision is that of `Scheduler`.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from jaxserve.iteration import Chunk, IterationPlan, IterationResult
from jaxserve.request import TokenEvent
from jaxserve.scheduler.kv_blocks import SlotPool
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.policy import ObjectiveTokenBudget
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import Phase, RequestState

_by_key = attrgetter("key")
_LEAST = 3  # plans that a row must be steady for; for fewer it costs more to count it than to list it


def _key_of_state(due: tuple[RequestState, int]) -> tuple[float, int]:
    return due[0].key


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyPlan(IterationPlan):
    """A plan with rows that decode beside its chunks.

    Attributes:
      steady: number of these rows.
      starts: sum of the positions that they compute.
      listed: how many of the chunks are decodes; they come first.
      group: which these rows are.
      number: of the plan among those of the group.
    """

    steady: int
    starts: int
    listed: int
    group: SteadyGroup
    number: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return self.steady + sum([chunk.length for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.steady + len(self.chunks)


class _SteadyPlanBuilder(PlanBuilder):
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

    def build(self, sequence: int, bucket: int, sampler: int, *, scoring: bool) -> SteadyPlan:
        return SteadyPlan(
            **self.fields(sequence, bucket, sampler, scoring=scoring),
            steady=self.steady,
            starts=self.starts,
            listed=self.listed,
            group=self.group,
            number=self.group.launched,
        )


class _SteadyRow(NamedTuple):
    """A steady row: plan p of its group computes its position `base + p`, from plan `first` on."""

    state: RequestState
    base: int
    first: int
    group: SteadyGroup


class SteadyGroup:
    """Rows that decode in the same plans: all of them with one stage, those of one batch with several.

    Attributes:
      rows: the steady rows, by the names of their requests.
      bases: the sum of theirs.
      launched: number of the group's plans.
      landed: when the tokens of each came.
      ending / growing / publishing: by plan: the rows that it ends or gives a block, and those whose block is complete
        when it lands.
    """

    def __init__(self) -> None:
        self.rows: dict[str, _SteadyRow] = {}
        self.bases = self.launched = 0
        self.landed = array("d")
        self.ending: dict[int, list[_SteadyRow]] = {}
        self.growing: dict[int, list[_SteadyRow]] = {}
        self.publishing: dict[int, list[_SteadyRow]] = {}

    @property
    def is_free(self) -> bool:
        """Whether none of its plans is in flight."""
        return self.launched == len(self.landed)


class SteadyScheduler(Scheduler):
    """`Scheduler`, with plans that are a `SteadyPlan`.

    A row is steady from its first decode to before the plan that samples its last token. It is listed for good where
    the scheduler might have to choose between rows: when blocks are short, when tenants take turns, or when not all
    decodes fit.

    With several stages the rows of a batch are in every plan of their group. A policy that shares all rows among the
    batches (`ObjectiveTokenBudget`) has them listed.

    Attributes:
      last_of: the position of the last token that a request will have, by its id.
      advanced: called with a request's id and the times at which it got a token each while it was steady.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `Scheduler`."""
        super().__init__(*args, **settings)
        self.last_of: Callable[[str], int] = {}.__getitem__
        self.advanced: Callable[[str, array[float]], None] = lambda name, times: None
        self._steady: dict[str, _SteadyRow] = {}
        self._groups = [SteadyGroup()]
        self._plan_of: dict[int, tuple[SteadyGroup, int]] = {}  # plan in flight -> its group and number
        self._listed_late: dict[int, list[Chunk]] = {}  # plan in flight -> chunks of rows that were steady in it

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End a request now (see `Scheduler.abort`)."""
        if request_id in self._steady:
            self._list(self._steady[request_id])
        return super().abort(request_id)

    def schedule(self) -> IterationPlan | None:
        """The next plan (see `Scheduler.schedule`)."""
        if self._steady and len(self._in_flight) < self._most_in_flight:
            group = self._next_group()
            for row in self._still_steady(group.ending, group.launched):
                self._list(row)
            growing = len(group.growing.get(group.launched, ()))
            if not self._may_count(group, len(self.requests.running) + growing):
                for row in list(self._steady.values()):
                    self._list(row)
        return super().schedule()

    def _next_group(self) -> SteadyGroup:
        """The group of the next plan, of which there is one; rows of others that are free join it when listed."""
        if not self._exclusive:
            return self._groups[0]
        free = sorted((group for group in self._groups if group.is_free), key=lambda group: -len(group.rows))
        if not free:
            self._groups.append(SteadyGroup())
            return self._groups[-1]
        for group in free[1:]:
            for row in list(group.rows.values()):
                self._list(row)
            self._groups.remove(group)
        return free[0]

    def landing(self, plan: SteadyPlan, now: float) -> SteadyPlan:
        """The oldest plan in flight, which lands now, with the rows that were listed since it was launched.

        `complete` takes it so.
        """
        plan.group.landed.append(now)
        del self._plan_of[plan.sequence]
        late = self._listed_late.pop(plan.sequence, None)
        if late is None:
            return plan
        starts = plan.starts - sum([chunk.start for chunk in late])
        return replace(plan, chunks=(*plan.chunks, *late), steady=plan.steady - len(late), starts=starts)

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[TokenEvent]:
        """Apply a result (see `Scheduler.complete`). It completes blocks of steady rows too."""
        assert isinstance(plan, SteadyPlan)
        if plan.number in plan.group.publishing:
            self._publish(plan)
        if not plan.chunks:
            self._in_flight.popleft()
            return []
        return super().complete(plan, result)

    def _publish(self, plan: SteadyPlan) -> None:
        """Publish the blocks that a plan's decodes have completed: by key, as of equal blocks the first is kept."""
        publishing = plan.group.publishing
        rows = self._still_steady(publishing, plan.number)
        due = [(row.state, row.base + plan.number + 1) for row in rows]
        for state, computed in due:
            state.tokens += [0] * (computed - len(state.tokens))
        for state, chunk in zip(self._in_flight[0].states[: plan.listed], plan.chunks, strict=False):
            if state.phase is not Phase.ENDED and chunk.start + 1 >= state.allocation.publish_at:
                due.append((state, chunk.start + 1))
        for state, computed in sorted(due, key=_key_of_state):
            self.pool.publish(state.allocation, computed)
        for row in rows:
            publishing.setdefault(int(row.state.allocation.publish_at) - 1 - row.base, []).append(row)

    def _still_steady(self, rows: dict[int, list[_SteadyRow]], plan: int) -> list[_SteadyRow]:
        """Take the rows of a plan that have not been listed meanwhile."""
        if plan not in rows:
            return []
        return [row for row in rows.pop(plan) if self._steady.get(row.state.name) is row]

    def _may_count(self, group: SteadyGroup, blocks: int) -> bool:
        """Whether the next plan takes every decode and needs no more blocks than there are.

        Args:
          blocks: free blocks that there must be where they come on demand.
        """
        pool, requests = self.pool, self.requests
        if type(pool) is not SlotPool or self._fixed_chunk is not None or self.drafting is not None:
            return False
        rows = self.num_running
        if self._exclusive:
            if isinstance(self.policy, ObjectiveTokenBudget):
                return False
            rows = len(group.rows) + sum([not state.in_flight for state in requests.running])
        if requests.waiting.is_shared or rows > self._max_rows or rows >= self.policy.decode_budget(requests):
            return False
        return pool.policy == "reserve" or pool.n_slots - pool.slots_used >= blocks * pool.block_size

    def _new_plan(self) -> PlanBuilder:
        return _SteadyPlanBuilder(self._next_group())

    def _gather_running(self, plan: PlanBuilder, budget: int) -> bool:
        assert isinstance(plan, _SteadyPlanBuilder)
        group = plan.group
        for row in self._still_steady(group.growing, group.launched):
            self._extend(plan, row.state, row.base + group.launched + 1)
            group.growing.setdefault(group.launched + self.pool.block_size, []).append(row)
        may_admit = super()._gather_running(plan, budget)
        plan.listed = len(plan.states)
        return may_admit

    def _launch(self, builder: PlanBuilder, bucket: int) -> IterationPlan:
        assert isinstance(builder, _SteadyPlanBuilder)
        plan, group = super()._launch(builder, bucket), builder.group
        self._plan_of[plan.sequence] = group, group.launched
        group.launched += 1
        if not plan.chunks:
            return plan
        sampled = (state for state, chunk in zip(builder.states, builder.chunks, strict=True) if chunk.samples)
        states = [state for state in sampled if self._lasts(state)]
        if states and self._may_count(group, self._max_rows // 4):
            for state in states:
                self._count(state, group)
            self.requests.running[:] = [state for state in self.requests.running if state.name not in self._steady]
        return plan

    def _lasts(self, state: RequestState) -> bool:
        """Whether a row that decodes from now on does so for some plans."""
        return state.phase is Phase.RUNNING and state.samples is None and self._end_of(state) >= _LEAST

    def _end_of(self, state: RequestState) -> int:
        """Plans from the next to the one that samples a row's last token."""
        return min(state.limit - 2, self.last_of(state.name) - 1) - state.computed

    def _count(self, state: RequestState, group: SteadyGroup) -> None:
        """Make a row steady from the next plan of a group on."""
        allocation, size, first = state.allocation, self.pool.block_size, group.launched
        base = state.computed - first
        row = self._steady[state.name] = group.rows[state.name] = _SteadyRow(state, base, first, group)
        group.bases += base
        self.requests.num_counted += 1
        group.ending.setdefault(first + self._end_of(state), []).append(row)
        group.growing.setdefault(allocation.capacity - base, []).append(row)
        if allocation.publish_at < inf:
            publish_at = max(int(allocation.publish_at), (state.computed // size + 1) * size)  # the rest is in flight
            group.publishing.setdefault(publish_at - 1 - base, []).append(row)

    def _list(self, row: _SteadyRow) -> None:
        """List a row again, in the next plan and in those in flight."""
        state, base, first, group = row
        del self._steady[state.name], group.rows[state.name]
        group.bases -= base
        self.requests.num_counted -= 1
        landed = len(group.landed)
        state.tokens += [0] * (base + landed + 1 - len(state.tokens))
        if landed > first:
            self.advanced(state.name, group.landed[first:landed])
        for launched in self._in_flight:
            its_group, number = self._plan_of.get(launched.sequence, (None, 0))
            if its_group is group and number >= first:
                launched.states.append(state)
                chunk = Chunk(state.row, base + number, 1, 1)
                self._listed_late.setdefault(launched.sequence, []).append(chunk)
                state.in_flight += 1
        state.computed = base + group.launched
        state.length = state.computed + 1
        insort(self.requests.running, state, key=_by_key)
