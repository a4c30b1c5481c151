"""A scheduler that leaves alone rows that only get one more token in each iteration.

Most rows of most iterations are such. The simulator counts them instead of listing them, so an iteration costs it time
with the rows to which something else happens. Every decision is that of `Scheduler`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from jaxserve.iteration import Chunk, IterationPlan, IterationResult
from jaxserve.request import FinishReason, TokenEvent
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.scheduler import PlanInFlight, Scheduler
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.state import Phase, RequestState, StateEvent
from jaxserve.simulate.steady_plans import SteadyGroup, SteadyPlan, SteadyPlanBuilder, SteadyRow, add_row

_by_key = attrgetter("key")
_NOTHING, _NONE = MappingProxyType({}), frozenset()  # scores and so on of a plan of steady rows alone
_LEAST = 3  # plans that a row must be steady for; for fewer it costs more to count it than to list it


def _key_of_state(due: tuple[RequestState, int]) -> tuple[float, int]:
    return due[0].key


def _key_of_row(row: SteadyRow) -> tuple[float, int]:
    return row.state.key


class SteadyScheduler(Scheduler):
    """`Scheduler`, with plans that are a `SteadyPlan`.

    A row is steady from its first decode to its last, or to the one before if that is not the last that its request may
    have. It is listed for good where the scheduler might have to choose between rows: when blocks are short, when
    tenants take turns, or when not all decodes fit.

    With several stages the rows of a batch are in every plan of their group.

    Attributes:
      now: when the plan that is completed next lands.
      last_of: the position of the last token that a request will have, by its id.
      advanced: called with a request's id and the times at which it got a token each while it was steady.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `Scheduler`."""
        super().__init__(*args, **settings)
        self.last_of: Callable[[str], int] = {}.__getitem__
        self.advanced: Callable[[str, array[float]], None] = lambda name, times: None
        self.now = 0.0
        self._steady: dict[str, SteadyRow] = {}
        self._groups = [SteadyGroup()]
        self._plans: deque[SteadyPlan] = deque()  # in flight
        self._buckets: dict[tuple[int, int], int] = {}  # of plans of steady rows alone, by rows and budget
        self._can_count = type(self.pool) is SlotPool and self._fixed_chunk is None and self.drafting is None

    def abort(self, request_id: str) -> list[StateEvent]:
        """End a request now (see `Scheduler.abort`)."""
        if request_id in self._steady:
            self._list(self._steady[request_id])
        return super().abort(request_id)

    def schedule(self) -> IterationPlan | None:
        """The next plan (see `Scheduler.schedule`)."""
        if not self._steady or len(self._in_flight) >= self._most_in_flight:
            return super().schedule()
        group, requests = self._next_group() if self._exclusive else self._groups[0], self.requests
        number, running = group.launched, requests.running
        if number in group.listing:
            for row in self._still_steady(group.listing, number):
                self._list(row)
        rows = len(group.rows)
        if len(requests.live) == len(self._steady) and rows and not requests.waiting.is_shared:
            grows = number in group.growing
            budget = self.policy.decode_budget(requests)
            if rows <= budget and (not grows or self._has_blocks(len(group.growing[number]))):
                if grows:
                    self._grow(group)
                return self._launch_steady(group, rows, budget)
        if number in group.ending and any(state.length - state.computed < 2 for state in running):
            for row in self._still_steady(group.ending, number):  # rows end in the order of their keys
                self._list(row)
        if not self._has_blocks(len(running) + len(group.growing.get(number, ()))):
            for row in [row for each in self._groups for row in each.rows.values()]:
                self._list(row)
        elif not self._has_places(group):
            self._list_surplus(group)
        return super().schedule()

    def _list_surplus(self, group: SteadyGroup) -> None:
        """List the rows that a group's next plan will not take; all where there may be too many."""
        budget, prompts, taken = self.policy.decode_budget(self.requests), 0, 0
        if self._num_rows(group) > self._max_rows:
            budget = 0
        for state in sorted([*(row.state for row in group.rows.values()), *self._free_rows()], key=_by_key):
            row = group.rows.get(state.name)
            if row is None and state.length - state.computed > 1:
                prompts = 1  # for which decodes after it leave a token
            elif taken < budget - prompts:
                taken += 1
            elif row is not None:
                self._list(row)

    def _launch_steady(self, group: SteadyGroup, rows: int, budget: int) -> SteadyPlan:
        """A plan of steady rows alone, as `Scheduler.schedule` makes where all requests are steady."""
        sequence, number, bucket = self._sequence, group.launched, self._buckets.get((rows, budget))
        if bucket is None:
            bucket = self._buckets[rows, budget] = self._ladder.pick(rows, 0, budget, rows)
        plan = SteadyPlan(group, sequence, bucket)
        self._in_flight.append(tuple.__new__(PlanInFlight, (sequence, [], _NOTHING, _NOTHING, False, _NONE)))
        self._plans.append(plan)
        self._sequence, group.launched = sequence + 1, number + 1
        if number in group.ending:
            self._finish_rows(group.ending[number])
        return plan

    def _count_plan(self, plan: SteadyPlan) -> None:
        """Note that a plan of a group is launched. The rows whose last it is finish."""
        group = plan.group
        self._plans.append(plan)
        group.launched += 1
        if plan.number in group.ending:
            self._finish_rows(group.ending[plan.number])

    def _finish_rows(self, rows: list[SteadyRow]) -> None:
        """Note that the last plan of these rows is launched."""
        for row in rows:
            state = row.state
            if self._steady.get(state.name) is row:
                self._leave(row)
                insort(self.requests.running, state, key=_by_key)
                self.requests.finish(state)

    def _leave(self, row: SteadyRow) -> None:
        """Take a row out of the next plans of its group."""
        del row.group.rows[row.state.name]
        row.group.bases -= row.base
        self.requests.num_counted -= 1

    def _end_rows(self, plan: SteadyPlan) -> list[StateEvent]:
        """Ends requests whose last token came with a plan, which is counted and in no event."""
        events: list[StateEvent] = []
        for row in sorted(self._still_steady(plan.group.ending, plan.number), key=_key_of_row):
            name = row.state.name
            del self._steady[name]
            self.advanced(name, plan.group.landed[row.first :])
            self._end(row.state)
            self._forget(row.state)
            events.append((row.state, TokenEvent(name, finish_reason=FinishReason.LENGTH)))
        return events

    def _next_group(self) -> SteadyGroup:
        """The next plan's group, with several stages; free rows of other groups join it when listed."""
        free = [group for group in self._groups if group.launched == len(group.landed)]
        if len(free) == 1:
            return free[0]
        free.sort(key=lambda group: -len(group.rows))
        if not free:
            self._groups.append(SteadyGroup())
            return self._groups[-1]
        for group in free[1:]:
            for row in list(group.rows.values()):
                self._list(row)
            self._groups.remove(group)
        return free[0]

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[StateEvent]:
        """Apply a result (see `Scheduler.complete`). It completes blocks of steady rows too."""
        assert isinstance(plan, SteadyPlan)
        oldest, group, number = self._plans.popleft(), plan.group, plan.number
        assert plan is oldest, f"plan {plan.sequence} landed before {oldest.sequence}"
        group.landed.append(self.now)
        if number in group.publishing:
            self._publish(plan)
        ended = self._end_rows(plan) if number in group.ending else []
        if not plan.chunks:
            self._in_flight.popleft()
            return ended
        return ended + super().complete(plan, result)

    def _publish(self, plan: SteadyPlan) -> None:
        """Publishes blocks that a plan's rows completed, by key: the first of equal ones stays."""
        publishing = plan.group.publishing
        rows = self._still_steady(publishing, plan.number)
        due = [(row.state, row.base + plan.number + 1) for row in rows]
        for state, computed in due:
            state.tokens += [0] * (computed - len(state.tokens))
        if plan.listed:
            for state, chunk in zip(self._in_flight[0].states[: plan.listed], plan.chunks, strict=False):
                if state.phase is not Phase.ENDED and chunk.start + chunk.length >= state.allocation.publish_at:
                    due.append((state, chunk.start + chunk.length))
        for state, computed in sorted(due, key=_key_of_state) if len(due) > 1 else due:
            self.pool.publish(state.allocation, computed)
        for row in rows:
            add_row(publishing, int(row.state.allocation.publish_at) - 1 - row.base, row)

    def _still_steady(self, rows: dict[int, list[SteadyRow]], plan: int) -> list[SteadyRow]:
        """Take the rows of a plan that have not been listed meanwhile."""
        if plan not in rows:
            return []
        steady = self._steady
        return [row for row in rows.pop(plan) if steady.get(row.state.name) is row]

    def _may_count(self, group: SteadyGroup, blocks: int) -> bool:
        """Whether the next plan takes every decode and needs no more blocks than there are.

        Args:
          blocks: free blocks that there must be where they come on demand.
        """
        return self._has_blocks(blocks) and self._has_places(group)

    def _has_blocks(self, blocks: int) -> bool:
        """Whether the scheduler need not choose who gets blocks, if so many are needed."""
        pool = self.pool
        if not self._can_count or self.requests.waiting.is_shared:
            return False
        assert isinstance(pool, SlotPool)
        return pool.policy == "reserve" or pool.num_unpromised >= blocks

    def _has_places(self, group: SteadyGroup) -> bool:
        """Whether a group's next plan takes every decode."""
        rows = self._num_rows(group)
        return rows <= self._max_rows and rows <= self.policy.decode_budget(self.requests)

    def _num_rows(self, group: SteadyGroup) -> int:
        """Rows that could be in a group's next plan, or more."""
        return len(group.rows) + len(self._free_rows()) if self._exclusive else self.requests.num_running

    def _free_rows(self) -> list[RequestState]:
        """Rows that are listed and that the next plan may have."""
        running = self.requests.running
        return [state for state in running if not state.in_flight] if self._exclusive else running

    def _new_plan(self) -> PlanBuilder:
        return SteadyPlanBuilder(self._next_group() if self._exclusive else self._groups[0])

    def _gather_running(self, plan: PlanBuilder, budget: int) -> bool:
        assert isinstance(plan, SteadyPlanBuilder)
        group = plan.group
        if group.launched in group.growing:
            self._grow(group)
        if self._exclusive:  # otherwise nobody reads it
            slots = [each.bases + len(each.rows) * (each.launched + 1) for each in self._groups]
            self.requests.counted_slots = sum(slots)
        may_admit = super()._gather_running(plan, budget - plan.steady)
        plan.listed = len(plan.states)
        return may_admit

    def _grow(self, group: SteadyGroup) -> None:
        """Gives blocks to steady rows that need one in a group's next plan; there are enough."""
        for row in self._still_steady(group.growing, group.launched):
            allocation = row.state.allocation
            if self.requests.fetching:
                self.fetches.cancel_for(allocation, allocation.capacity + 1)
            self.pool.extend(allocation, allocation.capacity + 1)
            add_row(group.growing, group.launched + self.pool.block_size, row)

    def _launch(self, builder: PlanBuilder, bucket: int) -> IterationPlan:
        assert isinstance(builder, SteadyPlanBuilder)
        plan, group = super()._launch(builder, bucket), builder.group
        assert isinstance(plan, SteadyPlan)
        self._count_plan(plan)
        if not plan.chunks:
            return plan
        entries = zip(builder.states, builder.chunks, strict=True)
        states = [state for state, (_, _, _, samples) in entries if samples and self._lasts(state)]
        if states and self._may_count(group, self._max_rows // 4):
            for state in states:
                self._count(state, group)
            self.requests.running[:] = [state for state in self.requests.running if state.name not in self._steady]
        return plan

    def _lasts(self, state: RequestState) -> bool:
        """Whether a row that decodes from now on does so for some plans."""
        return state.phase is Phase.RUNNING and state.samples is None and self._decodes_of(state) >= _LEAST

    def _decodes_of(self, state: RequestState) -> int:
        """A row's decodes from now on, without the last unless its request may have no more."""
        limit, end = state.limit - 1, self.last_of(state.name)
        return min(limit, end) - state.computed - (end < limit)

    def _count(self, state: RequestState, group: SteadyGroup) -> None:
        """Make a row steady from the next plan of a group on."""
        allocation, size, first = state.allocation, self.pool.block_size, group.launched
        base, end = state.computed - first, first + self._decodes_of(state)
        row = self._steady[state.name] = group.rows[state.name] = SteadyRow(state, base, first, end - 1, group)
        group.bases += base
        self.requests.num_counted += 1
        if base + end == state.limit - 1:
            add_row(group.ending, end - 1, row)
        else:
            group.listing.setdefault(end, []).append(row)
        add_row(group.growing, allocation.capacity - base, row)
        if allocation.publish_at < inf:
            publish_at = max(int(allocation.publish_at), (state.computed // size + 1) * size)  # the rest is in flight
            add_row(group.publishing, publish_at - 1 - base, row)

    def _list(self, row: SteadyRow) -> None:
        """List a row again, in the next plan and in those in flight."""
        state, base, first, last, group = row
        del self._steady[state.name]
        landed = len(group.landed)
        state.tokens += [0] * (base + landed + 1 - len(state.tokens))
        if landed > first:
            self.advanced(state.name, group.landed[first:landed])
        for launched, plan in zip(self._in_flight, self._plans, strict=True):
            if plan.group is group and first <= plan.number <= last:
                # Running rows come first in a plan, by key.
                at = bisect_right(launched.states, state.key, hi=plan.listed, key=_by_key)
                launched.states.insert(at, state)
                plan.chunks = (*plan.chunks[:at], Chunk(state.row, base + plan.number, 1, 1), *plan.chunks[at:])
                plan.listed += 1
                plan.steady -= 1
                plan.starts -= base + plan.number
                state.in_flight += 1
        if state.name in group.rows:
            self._leave(row)
            state.computed = base + group.launched
            state.length = state.computed + 1
            insort(self.requests.running, state, key=_by_key)
