"""Iteration-level scheduling: which tokens of which requests the next iteration computes, and what its answer means.

Orca's Algorithm 1 (OSDI'22, section 4.2) is the base: before every iteration choose among the requests that can run,
first come first served, with at most `max_rows` in a batch and their slots accounted for. On top of it come chunked
prefill (prompts fill what decodes leave of a bucket), plans made before the answers of earlier ones are known, prefix
reuse and preemption.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from jaxserve.iteration import (
    BlockCopy,
    Chunk,
    IterationPlan,
    IterationResult,
    SamplerVariant,
)
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.drafting import Drafting
from jaxserve.scheduler.kv_blocks import SlotPool
from jaxserve.scheduler.outputs import OutputProcessor, Scores
from jaxserve.scheduler.parallel_samples import ParallelSampleGroups
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.policy import DefaultTokenBudget, ObjectiveTokenBudget
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.state import (
    ENDED,
    FINISHING,
    PREEMPTED,
    RUNNING,
    WAITING,
    RequestState,
    check_fits,
)
from jaxserve.scheduler.waiting import WaitingQueue

PRIORITY_SECONDS = 10.0  # one step of priority outweighs this much waiting


class _Launched(NamedTuple):
    """What schedule() remembers of a plan: rows are reused before it lands."""

    sequence: int
    states: list[RequestState]
    scores: dict[int, Scores]  # by chunk
    drafted: bool
    withdrawn: set[int]  # chunks after which no token is chosen after all


_by_key = attrgetter("key")


class Scheduler:
    """Decides every iteration. Not thread safe: one thread calls everything.

    The loop: `plan = schedule()`, launch it, and `complete(plan, result)` in the order of launches; up to `in_flight`
    plans (by default `n_stages + 1`) are under way. With one stage, they may hold the same rows, because the device
    feeds a row's newest token back to itself; with more stages their rows are disjoint (Orca's RUNNING requests are not
    selected).

    Within a priority class, admission follows arrival, and so do the tokens that a plan has left for prompts. Decodes
    go before them. A key that never changes orders everything: arrival minus priority times PRIORITY_SECONDS.

    How many tokens prompts may add to an iteration in which others decode depends on what that costs: see
    `policy.DefaultTokenBudget`, and `policy.ObjectiveTokenBudget` where there is a `target_tpot` (seconds between a
    request's tokens). Prompts that are cut at fixed places, and batches whose answers are held back, are not paced.

    With a `fixed_chunk` a prompt is cut at multiples of it and nowhere else, so that its arithmetic is the same
    whoever it shares iterations with; a piece that does not fit an iteration waits for the next, and every plan asks
    for the same sampler.

    Rows with a grammar are planned like others, and those whose mask is late are taken out of a plan (`withdraw`).

    With a `speculation` rows may be drafted for, in iterations that have no prompt tokens to compute. Where plans in
    flight share rows, nothing is then launched before the drafted plan has landed.

    `mode="request"` is the baseline that Orca compares itself with: a batch is formed when no row is in use, nobody
    joins it later, and what it answers is held back until all of it has finished.
    """

    def __init__(
        self,
        pool: SlotPool,
        ladder: BucketLadder,
        *,
        max_rows: int,
        max_context: int,
        token_budget: int | None = None,
        target_tpot: float | None = None,
        fixed_chunk: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        mode: Literal["iteration", "request"] = "iteration",
        n_stages: int = 1,
        in_flight: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        most = in_flight or n_stages + 1
        if not 1 <= most <= n_stages + 1:
            raise ValueError(f"in_flight is {in_flight}; with {n_stages} stages it must be from 1 to {n_stages + 1}")
        self.pool = pool
        self._ladder = ladder
        self._max_rows = max_rows
        self._max_context = max_context
        self._fixed_chunk = fixed_chunk
        self._limit = self._budget = ladder.limit(token_budget)
        self._eos = eos_token_ids
        self._most_in_flight = most
        self._exclusive = n_stages > 1  # rows of plans in flight are disjoint
        batches = most if self._exclusive else 1
        self._free_rows = list(range(batches * max_rows))
        self._batches = batches
        self._pace = self._default_pace = None
        if target_tpot is not None:
            self._pace = ObjectiveTokenBudget(ladder, target_tpot=target_tpot, limit=self._limit, batches=batches)
        elif fixed_chunk is None and mode == "iteration":
            self._default_pace = DefaultTokenBudget(ladder, max_rows=max_rows, limit=self._limit)
        self._live: dict[str, RequestState] = {}
        self._waiting: WaitingQueue[RequestState] = WaitingQueue()
        self._families = ParallelSampleGroups(self._waiting, boundary=fixed_chunk)
        self._running: list[RequestState] = []  # by key
        self._num_preempted = self._preempted_tokens = 0  # in phase PREEMPTED
        self._num_closing = 0
        self._drafting = None if speculation is None else Drafting(speculation, pool)
        self.preemptions = self.drafted_tokens = self.accepted_tokens = self.withdrawals = 0  # since the start
        self._in_flight: deque[_Launched] = deque()
        self._sequence = 0
        self._submitted = 0
        # Request-level batching: how many may still join the batch, and the events held back until it has finished.
        self._by_request = mode == "request"
        self._joinable = 0
        self._held: list[TokenEvent] = []

    @property
    def num_waiting(self) -> int:
        """Requests without a row: not yet begun, or preempted."""
        return len(self._waiting) + self._num_preempted + self._families.num_aside

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the waiting requests have to compute before they generate."""
        return self._waiting.num_tokens + self._preempted_tokens + self._families.aside_tokens

    @property
    def num_running(self) -> int:
        """Requests with work in the batch or a last token in flight."""
        return len(self._running) + self._num_closing

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self._live or self._in_flight or self._held)

    def submit(self, request: Request) -> None:
        """Let `request` wait for its turn.

        Raises InvalidRequest if it could never run, ValueError if a live request has its id.
        """
        if request.request_id in self._live or any(e.request_id == request.request_id for e in self._held):
            raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not finished")
        check_fits(request, self._max_context, self.pool.n_slots)
        key = (request.arrival - request.priority * PRIORITY_SECONDS, self._submitted)
        self._submitted += 1
        state = RequestState.of(request, key, self._eos)
        if request.fork_of is not None and not self._by_request:  # a batch of requests is not joined by later ones
            self._families.join(state, self._live.get(request.fork_of))
        self._live[request.request_id] = state
        self._waiting.push(state)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and give its blocks back; its last event, or None if it is not alive."""
        state = self._live.get(request_id)
        if self._held:
            kept = [event for event in self._held if event.request_id != request_id]
            if state is None and len(kept) == len(self._held):
                return None
            self._held = kept
        elif state is None:
            return None
        if state is not None:
            self._end(state)
        return TokenEvent(request_id, finish_reason=FinishReason.ABORTED, cached_tokens=state.cached if state else 0)

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes, and never publish what was computed before now."""
        self.pool.flush(state.allocation for state in self._live.values())

    def schedule(self) -> IterationPlan | None:
        """The next iteration, to be launched at once; None when nothing can run before a plan in flight completes."""
        if len(self._in_flight) >= self._most_in_flight:
            return None
        self._families.come_back()
        if self._default_pace is not None:
            self._budget = self._limit
        if self._drafting is not None and self._awaits_tokens(self._drafting):
            return None
        if self._pace is not None:
            self._budget = self._paced(self._pace)
        builder = PlanBuilder()
        may_admit = self._choose(builder)
        if self._default_pace is not None:
            self._budget = self._paced_by_default(self._default_pace, builder)
        if may_admit:
            self._admit(builder)
        decodes = len(builder.states)
        if not decodes and not builder.prompts:
            return None
        if self._drafting is not None and not builder.prompts:
            self._drafting.lengthen(builder, self._budget)
            decodes += len(builder.drafts)
        bucket = self._ladder.pick(decodes, builder.prompt_tokens, self._budget, decodes + len(builder.prompts))
        self._fill(builder, min(bucket, self._budget) - decodes)
        return self._launch(builder, bucket)

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[TokenEvent]:
        """Take in what the device answered for the oldest plan in flight; one event for each request it got on with."""
        launched = self._in_flight.popleft()
        assert launched.sequence == plan.sequence, f"plan {plan.sequence} completed before {launched.sequence}"
        events: list[TokenEvent] = []
        outputs = OutputProcessor(result, plan.drafts, self._eos)
        for index, (state, chunk) in enumerate(zip(launched.states, plan.chunks, strict=True)):
            state.in_flight -= 1
            if state.phase == ENDED:
                outputs.skip(chunk)
                self._leave_row(state)
                continue
            event, computed, accepted = outputs.take(
                state, chunk, launched.scores.get(index), withdrawn=index in launched.withdrawn
            )
            self.drafted_tokens += max(chunk.samples - 1, 0)
            self.accepted_tokens += accepted
            if event is not None:
                events.append(event)
            if computed >= state.allocation.publish_at:
                self.pool.publish(state.allocation, computed)
            if state.phase == PREEMPTED:
                self._preempted_tokens += accepted
            if event is not None and event.finish_reason is not None:
                self._end(state)
            elif state.phase == PREEMPTED and not state.in_flight:
                self._num_preempted -= 1
                self._preempted_tokens -= state.length
                self._requeue(state)
        return self._hold(events) if self._by_request else events

    def withdraw(self, chunks: Sequence[int]) -> None:
        """After these chunks of the newest plan no token is chosen after all. The next plan that takes their requests
        computes the last known token of each once more."""
        launched = self._in_flight[-1]
        launched.withdrawn.update(chunks)
        self.withdrawals += len(chunks)
        for state in (launched.states[chunk] for chunk in chunks):
            if state.phase == ENDED:
                continue
            if state.phase == FINISHING:
                state.phase = RUNNING
                self._num_closing -= 1
                insort(self._running, state, key=_by_key)
            assert state.phase == RUNNING
            state.length -= 1
            state.computed = state.length - 1

    def take_held(self) -> list[TokenEvent]:
        """Events that no plan in flight will bring: those of a request-level batch whose last request was aborted."""
        return [] if self._in_flight else self._hold([])

    def _paced(self, pace: ObjectiveTokenBudget) -> int:
        begun = [state.length for state in self._running if state.length - state.computed > 1]
        return pace.budget(len(self._running) - len(begun), sum(begun) + self.waiting_tokens)

    def _paced_by_default(self, pace: DefaultTokenBudget, builder: PlanBuilder) -> int:
        decodes = len(builder.states)
        if self._exclusive:  # an iteration delays the rows of all batches in flight, which have about as many each
            decodes = max(decodes, -(-(len(self._running) - len(builder.prompts)) // self._batches))
        # Those who stand aside will hardly have anything left to compute.
        return pace.budget(decodes, builder.prompt_tokens + self._waiting.num_tokens + self._preempted_tokens)

    def _choose(self, builder: PlanBuilder) -> bool:
        """Gather the decodes, find the rows that prompts can be continued on; whether anybody may join."""
        budget = self._budget
        may_admit = not self._num_preempted
        for state in self._running.copy():
            if (self._exclusive and state.in_flight) or state.phase != RUNNING:  # preempted for one before it
                continue
            if len(builder.states) + len(builder.prompts) == self._max_rows:
                break
            start = state.computed
            if state.length - start > 1:
                builder.prompts.append(state)
                builder.prompt_tokens += state.length - start
                continue
            # However small the budget, decodes leave a token for the prompt of somebody who comes before them.
            if len(builder.states) >= (budget - 1 if builder.prompts else budget):
                continue
            if start >= state.allocation.capacity:
                if self.pool.shortage(state.allocation, start + 1):
                    may_admit = False
                    if self._num_closing:
                        continue  # blocks come back as soon as a plan in flight completes
                self._extend(builder, state, start + 1)
                if state.phase != RUNNING:
                    continue
            builder.states.append(state)
            builder.chunks.append(Chunk(state.row, start, 1, True))
        return may_admit

    def _admit(self, builder: PlanBuilder) -> None:
        """Let requests in, in order, as long as there are rows, blocks and tokens for them; the first who has to wait
        is not overtaken."""
        rows = min(len(self._free_rows), self._max_rows - len(builder.states) - len(builder.prompts))
        if self._by_request:
            if not (self._running or self._num_closing or self._num_preempted):
                self._joinable = min(len(self._waiting), len(self._free_rows))
            rows = min(rows, self._joinable)
        tokens = len(builder.states) + builder.prompt_tokens
        while rows > 0 and tokens < self._budget:
            state = self._waiting.first()
            if state is None:
                break
            if self._families.steps_aside(state):
                continue
            source = self._families.source(state)
            if not self.pool.can_admit(state.allocation, source):
                self._joinable = 0
                break
            self._waiting.pop()
            state.computed = self.pool.admit(state.allocation, source)
            rows -= 1
            tokens += state.length - state.computed
            builder.prompts.append(state)
        builder.prompt_tokens = tokens - len(builder.states)

    def _awaits_tokens(self, drafting: Drafting) -> bool:
        """Whether nothing is to be launched before a plan in flight has landed, because it may yield several tokens a
        row or because the next one could."""
        if self._exclusive or not self._in_flight:
            return False
        if self._in_flight[-1].drafted:
            return True
        if not self._running or self._num_preempted:
            return False
        first = self._waiting.first() if self._free_rows else None
        if first is not None and self.pool.can_admit(first.allocation, self._families.source(first)):
            return False
        return drafting.pays(self._running[: self._max_rows], self._budget)

    def _fill(self, builder: PlanBuilder, room: int) -> None:
        """Share `room` tokens among the prompts, in order."""
        long_states: list[RequestState] = []
        long_chunks: list[Chunk] = []
        for state in builder.prompts:
            start = state.computed
            length = min(state.length - start, room)
            if self._fixed_chunk is not None:
                length = min(state.length - start, self._fixed_chunk - start % self._fixed_chunk)
                if length > room:
                    length = room = 0
            if not length:
                if state.phase == WAITING:  # the chosen bucket ends before it: better prefix hits may come until then
                    self.pool.release(state.allocation)
                    self._waiting.push(state)
                continue
            if state.phase == WAITING:
                self._begin(builder, state)
            self._extend(builder, state, start + length)
            chunk = Chunk(state.row, start, length, start + length == state.length)
            if length == 1:  # attention expects all chunks of one token in front
                builder.states.append(state)
                builder.chunks.append(chunk)
            else:
                long_states.append(state)
                long_chunks.append(chunk)
            room -= length
        builder.states += long_states
        builder.chunks += long_chunks

    def _begin(self, builder: PlanBuilder, state: RequestState) -> None:
        state.phase = RUNNING
        state.row = heapq.heappop(self._free_rows)
        if not state.has_begun:
            state.has_begun = True
            state.cached = state.computed
        insort(self._running, state, key=_by_key)
        self._joinable -= 1
        if state.allocation.copied is not None:
            builder.copies.append(BlockCopy(*state.allocation.copied))
        builder.admissions.append(state.admission())

    def _launch(self, builder: PlanBuilder, bucket: int) -> IterationPlan:
        """Make the outline a plan and count it as under way."""
        sampler = -1
        flat = 0
        scores: dict[int, Scores] = {}
        for index, (state, (_, start, length, samples)) in enumerate(zip(builder.states, builder.chunks, strict=True)):
            state.in_flight += 1
            state.computed = end = start + (length if samples < 2 else 1)  # drafts are not the request's yet
            if state.scored < state.score_end and state.scored < end:
                last = min(end, state.score_end)
                scores[index] = Scores(state.scored + 1, last, flat + state.scored - start)
                state.scored = last
            flat += length
            if samples:
                variant = state.variant if self._fixed_chunk is None else SamplerVariant.CONSTRAINED
                if variant > sampler:
                    sampler = variant
                state.length += 1
                if state.length == state.limit:
                    state.phase = FINISHING
                    self._running.remove(state)
                    self._num_closing += 1
                    # The next plan may use the row: the device runs it after this one. Not where it may come back.
                    if not self._exclusive and state.variant < SamplerVariant.CONSTRAINED:
                        self._leave_row(state)
        plan = IterationPlan(
            sequence=self._sequence,
            bucket=bucket,
            admissions=tuple(builder.admissions),
            chunks=tuple(builder.chunks),
            table_changes=tuple(builder.changes),
            sampler=None if sampler < 0 else SamplerVariant(sampler),
            scoring=bool(scores),
            drafts=tuple(builder.drafts),
            block_copies=tuple(builder.copies),
        )
        self._in_flight.append(_Launched(self._sequence, builder.states, scores, bool(builder.drafts), set()))
        self._sequence += 1
        return plan

    def _extend(self, builder: PlanBuilder, state: RequestState, length: int) -> None:
        """Cover `length` positions; whoever gives up blocks for it, possibly `state` itself, is preempted."""
        allocation = state.allocation
        index = len(allocation.blocks)
        victims = self.pool.extend(allocation, length, (other.allocation for other in reversed(self._running)))
        builder.change_table(state, index)
        for victim in victims:
            preempted = self._running.pop()  # candidates were offered from the end
            self.preemptions += 1
            assert preempted.allocation is victim
            self._leave_row(preempted)
            if preempted.in_flight:
                preempted.phase = PREEMPTED
                self._num_preempted += 1
                self._preempted_tokens += preempted.length
            else:
                self._requeue(preempted)

    def _requeue(self, state: RequestState) -> None:
        self._leave_row(state)
        state.phase = WAITING
        state.computed = 0
        state.guesses = None  # a model's keys went with the blocks
        # A prompt to be scored is computed whole; once it is, its prefix need not be computed again.
        state.allocation.takes_hits = state.scored == state.score_end
        self._waiting.push(state)

    def _end(self, state: RequestState) -> None:
        stood_aside = self._families.leave(state)
        if state.phase == WAITING:
            if not stood_aside:
                self._waiting.remove(state)
        elif state.phase == RUNNING:
            self._running.remove(state)
        elif state.phase == FINISHING:
            self._num_closing -= 1
        else:
            self._num_preempted -= 1
            self._preempted_tokens -= state.length
        state.phase = ENDED
        self.pool.release(state.allocation)
        self._leave_row(state)
        del self._live[state.name]

    def _leave_row(self, state: RequestState) -> None:
        """Free the row of a state that is through with it, unless plans in flight must not share it."""
        if state.row >= 0 and not (self._exclusive and state.in_flight):
            heapq.heappush(self._free_rows, state.row)
            state.row = -1

    def _hold(self, events: list[TokenEvent]) -> list[TokenEvent]:
        self._held += events
        if self._running or self._num_closing or self._num_preempted:
            return []
        held, self._held = self._held, []
        return held
