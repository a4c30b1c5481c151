"""Iteration-level scheduling: choose the tokens of the next iteration, and apply its result.

Orca's Algorithm 1 (OSDI'22, section 4.2) is the base: before every iteration choose among the requests that can run,
first come first served, with at most `max_rows` in a batch and their slots accounted for. On top of it come chunked
prefill (prompts fill what decodes leave of a bucket), plans made before the results of earlier ones are known, prefix
reuse and preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from jaxserve.iteration import BlockCopy, Chunk, IterationPlan, IterationResult, PooledRange, SamplerVariant
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.drafting import Drafting
from jaxserve.scheduler.order import ArrivalOrder, RequestOrder
from jaxserve.scheduler.outputs import OutputProcessor, ScoredRange
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.policy import TokenBudgetPolicy, make_policy
from jaxserve.scheduler.prefix_fetches import PrefixFetches
from jaxserve.scheduler.requests import RequestTable
from jaxserve.scheduler.row_parts import Pool
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.state import Phase, RequestState, StateEvent
from jaxserve.scheduler.tenants import FairQueue


class PlanInFlight(NamedTuple):
    """What the scheduler remembers of a plan, because rows are reused before it lands."""

    sequence: int
    states: list[RequestState]
    scores: dict[int, ScoredRange]  # by chunk
    pooled: dict[int, int]  # by chunk: the plan's range
    drafted: bool
    withdrawn: set[int]  # chunks whose sample is withdrawn


class Scheduler:
    """Plans every iteration. Not thread safe: one thread calls everything.

    The loop: `plan = schedule()`, launch it, and `complete(plan, result)` in the order of launches. Up to `in_flight`
    plans (by default `n_stages + 1`) are in flight. With one stage they may hold the same rows, because the device
    feeds a row's newest token back to itself. With more stages their rows are disjoint, as in Orca.

    The request order admits requests, and prompts get the tokens that a plan has left in the same order. Decodes go
    before prompts. Within a tenant one key that never changes orders everything; tenants take turns (see `tenants`).
    The token budget policy decides how many tokens prompts may add to an iteration in which others decode.

    With a `fixed_chunk` a prompt is cut at its multiples alone, so that its arithmetic does not depend on the batch. A
    piece that does not fit an iteration waits for the next, and every plan asks for the same sampler.

    Rows with a grammar are planned like others. `withdraw` removes the samples whose mask is late.

    With a `speculation`, iterations without prompt tokens may carry drafts. If plans in flight share rows, no plan is
    launched before a plan with drafts has landed.
    """

    def __init__(
        self,
        pool: Pool,
        ladder: BucketLadder,
        *,
        max_rows: int,
        max_context: int,
        policy: TokenBudgetPolicy | None = None,
        order: RequestOrder | None = None,
        fixed_chunk: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        n_stages: int = 1,
        in_flight: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        most = in_flight or n_stages + 1
        if not 1 <= most <= n_stages + 1:
            raise ValueError(f"in_flight is {in_flight}; with {n_stages} stages it must be from 1 to {n_stages + 1}")
        least = (fixed_chunk or 0) + max_rows - 1
        if fixed_chunk is not None and (len(ladder.sizes) > 1 or ladder.largest < least):
            raise ValueError(f"buckets are {ladder.sizes}; with fixed_chunk there must be one, of {least} or more")
        self.pool = pool
        self._ladder = ladder
        self._max_rows = max_rows
        self.max_context = max_context
        self._fixed_chunk = fixed_chunk
        self.eos_token_ids = eos_token_ids
        self._most_in_flight = most
        self._exclusive = n_stages > 1  # rows of plans in flight are disjoint
        batches = most if self._exclusive else 1
        self.policy = policy or make_policy(
            ladder, max_rows=max_rows, batches=batches, is_fixed=fixed_chunk is not None
        )
        self.order = order or ArrivalOrder()
        self.requests = RequestTable(
            batches * max_rows,
            FairQueue(ladder, max_rows),
            rows_are_exclusive=self._exclusive,
            boundary=fixed_chunk,
        )
        self.fetches = PrefixFetches(pool, self.requests)
        self.drafting = None if speculation is None else Drafting(speculation, pool)
        self.preemptions = self.drafted_tokens = self.accepted_tokens = 0  # totals since the start
        self.outputs_of: Callable[..., OutputProcessor] = OutputProcessor  # a simulation has a simpler one
        self._in_flight: deque[PlanInFlight] = deque()
        self._to_trim: list[RequestState] = []
        self._sequence = 0
        self._submitted = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a row: new or preempted."""
        return self.requests.num_waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting requests must compute before they generate."""
        return self.requests.waiting_tokens

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a plan is in flight."""
        return bool(self.requests.live or self._in_flight)

    def submit(self, request: Request) -> None:
        """Add a request to the queue. The caller has checked that it can run (`state.check_fits`).

        Raises:
          InvalidRequest: `fork_of` names a request with another prompt.
          ValueError: a live request has its id.
        """
        state = RequestState.of(request, self.eos_token_ids)
        self.requests.register(state)
        self.enqueue(state)

    def enqueue(self, state: RequestState) -> None:
        """Add a registered request to the queue (see `submit`)."""
        self._set_key(state)
        self.requests.enqueue(state)

    def _set_key(self, state: RequestState) -> None:
        uncached = len(state.tokens) - self.pool.cached_tokens(state.allocation)
        state.key = (self.order.key(state.request.arrival, state.request.priority, uncached), self._submitted)
        self._submitted += 1

    def abort(self, request_id: str) -> list[StateEvent]:
        """Ends a request now and releases its blocks; its last event, or none if it is not live."""
        if (state := self.requests.live.get(request_id)) is None:
            return []
        self._end(state)
        self._forget(state)
        return [(state, TokenEvent(request_id, finish_reason=FinishReason.ABORTED, cached_tokens=state.cached))]

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes, and never publish what has been computed so far."""
        self.pool.flush([state.allocation for state in list(self.requests.live.values())])

    def schedule(self) -> IterationPlan | None:
        """The next plan, to be launched at once; None if nothing can run before a plan completes."""
        if len(self._in_flight) >= self._most_in_flight:
            return None
        self.requests.samples.resume_deferred()
        for state in self._to_trim:
            # One position less: samples of the prompt compute its last token again, and so does a withdrawn sample.
            self.pool.trim(state.allocation, state.computed - 1)
        self._to_trim = []
        budget = self.policy.decode_budget(self.requests)
        last = self._in_flight[-1] if self._in_flight and not self._exclusive else None
        if self.drafting and last and (last.drafted or self.drafting.is_next(self.requests, self._max_rows, budget)):
            return None  # `last` may yield several tokens per row, or the next plan should carry drafts
        plan = self._new_plan()
        may_admit = self._gather_running(plan, budget)
        budget = self.policy.prompt_budget(self.requests, plan, budget)
        if may_admit and self.requests.waiting:
            self._admit(plan, budget)
        decodes = plan.decodes
        if not decodes and not plan.prompts:
            return None
        if self.drafting is not None and not plan.prompts:
            self.drafting.lengthen(plan, budget)
            decodes += len(plan.drafts)
        bucket = self._ladder.pick(decodes, plan.prompt_tokens, budget, decodes + len(plan.prompts))
        self._fill_with_prompts(plan, min(bucket, budget) - decodes)
        return self._launch(plan, bucket)

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[StateEvent]:
        """Apply the result of the oldest plan in flight; one event per request that advanced."""
        launched = self._in_flight.popleft()
        assert launched.sequence == plan.sequence, f"plan {plan.sequence} completed before {launched.sequence}"
        events, gone = list[StateEvent](), list[RequestState]()
        outputs = self.outputs_of(result, plan.drafts, self.eos_token_ids)
        ended, preempted = Phase.ENDED, Phase.PREEMPTED  # looked up once for all rows
        scores, pooled, withdrawn = launched.scores, launched.pooled, launched.withdrawn
        for index, (state, chunk) in enumerate(zip(launched.states, plan.chunks, strict=True)):
            state.in_flight -= 1
            if state.phase == ended:
                outputs.skip(chunk)
                self.requests.leave_row(state)
                continue
            event, computed, accepted = outputs.take(
                state, chunk, scores.get(index) if scores else None, withdrawn=index in withdrawn
            )
            if chunk.samples > 1:
                self.drafted_tokens += chunk.samples - 1
                self.accepted_tokens += accepted
            if pooled and index in pooled:
                event = state.add_pooled(result, pooled[index], event)
            if event is not None:
                events.append((state, event))
            if computed >= state.allocation.publish_at:
                self.pool.publish(state.allocation, computed)
            if state.phase == preempted:
                self.requests.preempted_tokens += accepted
            if event is not None and event.finish_reason is not None:
                self._end(state)
                gone.append(state)
            elif state.phase == preempted and not state.in_flight:
                self.requests.preempted_has_landed(state)
        self._forget(*gone)  # not before, so that none is lost if a later one fails
        return events

    def withdraw(self, chunks: Sequence[int]) -> None:
        """Withdraw the samples after these chunks of the newest plan.

        The next plan with these requests computes the last known token of each again.
        """
        launched = self._in_flight[-1]
        launched.withdrawn.update(chunks)
        for state in (launched.states[chunk] for chunk in chunks):
            if state.phase != Phase.ENDED:
                self.requests.take_back_token(state)

    def _new_plan(self) -> PlanBuilder:
        return PlanBuilder()

    def _gather_running(self, plan: PlanBuilder, budget: int) -> bool:
        """Add the decodes and find the prompts that have begun.

        Returns whether requests may be admitted.
        """
        may_admit = not self.requests.num_preempted
        states, chunks, prompts = plan.states, plan.chunks, plan.prompts  # looked up once for all rows
        running, exclusive, max_rows, new = Phase.RUNNING, self._exclusive, self._max_rows, tuple.__new__
        for state in self.requests.by_turn():
            if state.phase is not running or (exclusive and state.in_flight):  # an earlier one preempted it
                continue
            if len(states) + len(prompts) == max_rows:
                break
            start = state.computed
            if state.length - start > 1:
                prompts.append(state)
                plan.prompt_tokens += state.length - start
                continue
            # However small the budget, decodes leave one token for the prompt of an earlier request.
            if len(states) >= (budget - 1 if prompts else budget):
                continue
            if start >= state.allocation.capacity:
                if self.pool.shortage(state.allocation, start + 1):
                    may_admit = False
                    if self.requests.finishing[state.allocation.part]:
                        continue  # blocks become free when a plan in flight completes
                self._extend(plan, state, start + 1)
                if state.phase is not running:
                    continue
            states.append(state)
            chunks.append(new(Chunk, (state.row, start, 1, True)))  # half the time of Chunk(...)
        return may_admit

    def _admit(self, plan: PlanBuilder, budget: int) -> None:
        """Admit requests in order while there are rows, blocks and tokens for them.

        No request overtakes the first that has to wait, but for one whose prefix is on its way from the host.
        """
        requests = self.requests
        rows = min(len(requests.free_rows), self._max_rows - plan.decodes - len(plan.prompts)) - len(requests.fetching)
        tokens = plan.decodes + plan.prompt_tokens
        while rows > 0 and tokens < budget:
            state = requests.waiting.first()
            if state is None:
                break
            if requests.samples.defer_first(state):
                continue
            prefix = requests.samples.shared_prefix(state)
            if prefix is None and self.fetches.begin(state):
                rows -= 1
                continue
            if not self.pool.can_admit(state.allocation, prefix):
                break
            requests.waiting.pop()
            state.computed = self.pool.admit(state.allocation, prefix)
            rows -= 1
            tokens += state.length - state.computed
            plan.prompts.append(state)
            requests.waiting.charge_prompt(state)
        plan.prompt_tokens = tokens - plan.decodes

    def _fill_with_prompts(self, plan: PlanBuilder, left: int) -> None:
        """Share `left` tokens among the prompts in order."""
        long_chunks: list[tuple[RequestState, Chunk]] = []
        for state in plan.prompts:
            start = state.computed
            length = min(state.length - start, left)
            if self._fixed_chunk is not None:
                length = min(state.length - start, self._fixed_chunk - start % self._fixed_chunk)
                if length > left:
                    length = left = 0
            if not length:
                if state.phase == Phase.WAITING:  # the bucket is full; by the next plan there may be more prefix hits
                    self.pool.release(state.allocation)
                    self.requests.waiting.put_back(state)
                continue
            if state.phase == Phase.WAITING:
                self._begin(plan, state)
            self._extend(plan, state, start + length)
            chunk = tuple.__new__(Chunk, (state.row, start, length, start + length == state.length))
            if length == 1:  # attention expects all chunks of one token first
                plan.add(state, chunk)
            else:
                long_chunks.append((state, chunk))
            left -= length
        for state, chunk in long_chunks:
            plan.add(state, chunk)

    def _begin(self, plan: PlanBuilder, state: RequestState) -> None:
        self.requests.begin(state)
        if state.allocation.copied is not None:
            plan.copies += [BlockCopy(*each.copied) for each in state.allocation.groups if each.copied is not None]
        plan.admit(state)

    def _launch(self, builder: PlanBuilder, bucket: int) -> IterationPlan:
        """Build the plan and count it as in flight."""
        sampler = -1
        flat = 0
        scores: dict[int, ScoredRange] = {}
        pooled: dict[int, int] = {}
        if self.requests.waiting.is_shared:
            self.requests.waiting.charge_samples(builder.states, builder.chunks)
        constrained = None if self._fixed_chunk is None else SamplerVariant.CONSTRAINED
        for index, (state, (_, start, length, samples)) in enumerate(zip(builder.states, builder.chunks, strict=True)):
            state.in_flight += 1
            state.computed = end = start + (length if samples < 2 else 1)  # drafts are not accepted yet
            if state.score_end and state.scored < min(end, state.score_end):
                last = min(end, state.score_end)
                scores[index] = ScoredRange(state.scored + 1, last, flat + state.scored - start)
                state.scored = last
            if state.to_pool < state.pool_end and state.to_pool < end:
                last = min(end, state.pool_end)
                pooled[index] = len(builder.pooled)
                builder.pooled.append(PooledRange(flat + state.to_pool - start, flat + last - start))
                state.to_pool = last
            flat += length
            if samples:
                if (variant := constrained or state.variant) > sampler:
                    sampler = variant
                state.length = length = state.length + 1
                if length == state.limit:
                    self.requests.finish(state)
        if self.pool.gives_back:
            chunks = zip(reversed(builder.states), reversed(builder.chunks), strict=True)  # the longer ones are last
            self._to_trim = [state for state, _ in takewhile(lambda each: each[1].length > 1, chunks)]
        plan = builder.build(self._sequence, bucket, sampler, scoring=bool(scores))
        entry = self._sequence, builder.states, scores, pooled, bool(builder.drafts), set()
        self._in_flight.append(tuple.__new__(PlanInFlight, entry))
        self._sequence += 1
        return plan

    def _extend(self, plan: PlanBuilder, state: RequestState, length: int) -> None:
        """Extend a request's blocks to cover `length` positions.

        Requests that lose blocks for it, possibly `state` itself, are preempted.
        """
        allocation = state.allocation
        self.pool.trim(allocation, state.computed)
        index = len(allocation.blocks)
        self.fetches.cancel_for(allocation, length)
        victims = self.pool.extend(allocation, length, self.requests.victims())
        plan.change_table(state, index)
        for victim in victims:
            self.requests.preempt(victim)
            self.preemptions += 1

    def _end(self, state: RequestState) -> None:
        self.requests.end(state)
        self.pool.release(state.allocation)

    def _forget(self, *states: RequestState) -> None:
        for state in states:
            del self.requests.live[state.name]
