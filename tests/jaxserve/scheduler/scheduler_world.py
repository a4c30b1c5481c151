"""A scheduler, a model of its device and its clients: what every schedule must keep is asserted at each step."""

from __future__ import annotations

import dataclasses
from collections import deque
from random import Random

from jaxserve.iteration import (
    IterationPlan,
    IterationResult,
    SamplerVariant,
    max_chunks,
    max_points,
    max_table_changes,
)
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.cache_groups import CacheGroups, GroupedPool
from jaxserve.scheduler.host_cache import BlockLoad, HostCache
from jaxserve.scheduler.policy import TokenBudgetPolicy, make_policy
from jaxserve.scheduler.row_parts import PartitionedPool, make_pools
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.state import Phase, StateEvent
from jaxserve.scheduler.static_batching import StaticBatchScheduler
from jaxserve.scheduler.window_pool import WindowPool
from tests.jaxserve.scheduler import accounts
from tests.jaxserve.scheduler.device_model import EOS, MAX_CONTEXT, Client, Device, Prophet


class RecordedPolicy:
    """A policy that remembers the last budgets it gave."""

    def __init__(self, policy: TokenBudgetPolicy) -> None:
        self.policy = policy
        self.budget = self.for_decodes = 0

    def decode_budget(self, requests):
        self.for_decodes = self.policy.decode_budget(requests)
        return self.for_decodes

    def prompt_budget(self, requests, plan, decode_budget):
        self.budget = self.policy.prompt_budget(requests, plan, decode_budget)
        return self.budget


class World:
    """A scheduler, its device and its clients."""

    def __init__(
        self,
        policy,
        mode,
        n_stages,
        max_rows,
        block_size,
        slots,
        sizes,
        budget,
        cache,
        growth,
        *,
        target=None,
        ahead=1,
        errs=None,
        windows=(None,),
        tight=False,
        host=0,
        parts=1,
    ) -> None:
        """`host`: blocks of host memory. `parts`: of the pool, each with so many slots."""
        costs = [BucketCost(size=size, compile_seconds=0.0, milliseconds=10.0 + size) for size in sorted(sizes)]
        groups = CacheGroups(
            windows=windows,
            block_size=block_size,
            max_context=MAX_CONTEXT,
            n_rows=max_rows,
            most_tokens=max(sizes),
            draft_tokens=0 if errs is None else 5,
            parts=parts,
        )
        n_blocks, settings = -(-slots // block_size), {"policy": policy, "prefix_cache": cache}
        pool = make_pools(groups, parts * n_blocks, **settings)
        if tight and isinstance(pool, GroupedPool):  # only just enough for the longest request alone
            least = [min(n_blocks, each._bound + each._spare) for each in pool.pools[1:]]
            more = {"most_tokens": max(sizes), "draft_tokens": groups.draft_tokens, **settings}
            windowed = zip(least, windows[1:], strict=True)
            others = [WindowPool(blocks, block_size, window=window, **more) for blocks, window in windowed]
            pool = GroupedPool([pool.pools[0], *others])
        every = pool.parts if isinstance(pool, PartitionedPool) else (pool,)
        self.parts = [part.pools if isinstance(part, GroupedPool) else (part,) for part in every]
        self.pools = [each for part in self.parts for each in part]
        self.parts_used: set[int] = set()
        for each in self.pools:
            each.growth_tokens = growth
        if host and mode != "request":
            cache = HostCache(host, [1] * len(windows))
            for each in self.pools:
                each.blocks.attach(cache)
        self.copying: list[tuple[BlockLoad, bool]] = []  # copies from the host that have not landed, and whether intact
        ladder, speculation = BucketLadder(costs), None
        self.max_points = max_rows
        if errs is not None:
            self.max_points = max_points(max_rows, 5)
            speculation = Speculation(
                ladder,
                most=5,
                max_points=self.max_points,
                waits=n_stages == 1,
                propose=lambda tokens: Prophet(tokens, errs),
            )
        batches = n_stages + ahead if n_stages > 1 else 1
        self.policy = RecordedPolicy(
            make_policy(
                ladder,
                max_rows=max_rows,
                batches=batches,
                token_budget=budget,
                target_tpot=target,
                is_fixed=mode == "request",
            )
        )
        self.scheduler = (StaticBatchScheduler if mode == "request" else Scheduler)(
            pool,
            ladder,
            policy=self.policy,
            max_rows=max_rows,
            max_context=MAX_CONTEXT,
            eos_token_ids=EOS,
            n_stages=n_stages,
            in_flight=n_stages + ahead,
            speculation=speculation,
        )
        self.most_in_flight = n_stages + ahead
        self.withdrawals = 0
        self.n_stages, self.by_request, self.max_rows = n_stages, mode == "request", max_rows
        self.device = Device(block_size, windows)
        self.clients: dict[str, Client] = {}
        self.transcripts: list[tuple[int, ...]] = [()]
        self.in_flight: deque[tuple[IterationPlan, IterationResult]] = deque()

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.clients[request.request_id] = Client(request)

    def deliver(self, events: list[StateEvent]) -> None:
        assert not (self.by_request and events and self.scheduler.requests.num_running), (
            "a batch of requests ends as one"
        )
        for state, event in events:
            assert state.name == event.request_id
            client = self.clients[event.request_id]
            client.take(event)
            if event.finish_reason is not None:
                self.transcripts.append(client.request.prompt + tuple(client.tokens))
                del self.clients[event.request_id]

    def abort(self, request_id: str) -> None:
        (_, event), *released = self.scheduler.abort(request_id)
        assert event.finish_reason == FinishReason.ABORTED
        assert not event.token_ids
        del self.clients[request_id]
        self.deliver(released)
        assert self.scheduler.abort(request_id) == []

    def launch(self) -> bool:
        scheduler = self.scheduler
        exclusive = self.n_stages > 1
        in_batch = scheduler._batch if isinstance(scheduler, StaticBatchScheduler) else scheduler.requests.live
        live = sorted(in_batch.values(), key=lambda state: state.key)
        before = {
            state.name: state.length - state.computed
            for state in live
            if state.phase == Phase.RUNNING and not (exclusive and state.in_flight)
        }
        capacity = {state.name: state.allocation.capacity for state in live}
        closing = {state.allocation.part for state in live if state.phase == Phase.FINISHING}
        oldest = next((state for state in live if state.phase == Phase.RUNNING), None)
        plan = scheduler.schedule()
        if (copies := scheduler.fetches.take_copies()) is not None:
            loaded = self.device.copy(copies)
            self.copying += zip(copies.loads, loaded, strict=True)
        assert oldest is None or oldest.phase in (Phase.RUNNING, Phase.FINISHING), "the oldest request was preempted"
        if plan is None:
            return False
        self.check_shape(plan)
        states = dict(zip((chunk.row for chunk in plan.chunks), scheduler._in_flight[-1].states, strict=True))
        given = {states[chunk.row].name: chunk.length for chunk in plan.chunks}
        starts = {chunk.row: chunk.start for chunk in plan.chunks}
        admitted = [scheduler.requests.live[admission.request_id] for admission in plan.admissions]
        # Admission follows the order of keys: whoever still waits comes after all who were let in.
        waiting = [
            state.key
            for state in live
            if state.phase in (Phase.WAITING, Phase.PREEMPTED)
            and not is_deferred(state)
            and state not in scheduler.requests.fetching.values()
        ]
        assert not waiting or all(state.key < min(waiting) for state in admitted)
        assert admitted == sorted(admitted, key=lambda state: state.key)
        # So do prompt tokens: who gets less than it could use is the last to get any.
        stayed = [state for state in live if state.name in before and state.phase in (Phase.RUNNING, Phase.FINISHING)]
        prompts = [state for state in stayed if before[state.name] > 1]
        shares = [given.get(state.name, 0) for state in prompts]
        wanted = [before[state.name] for state in prompts]
        for state in admitted:
            admission = next(a for a in plan.admissions if a.request_id == state.name)
            shares.append(given[state.name])
            wanted.append(len(admission.tokens) - starts[admission.row])
            assert (
                starts[admission.row] * self.scheduler.pool.n_groups == len(admission.blocks) * self.device.block_size
                or state.samples is not None
            )
        short = [index for index, share in enumerate(shares) if share < wanted[index]]
        assert not short or not any(shares[short[0] + 1 :])
        full = len(given) == self.max_rows or sum(given.values()) == min(plan.bucket, self.policy.budget)
        assert not short or full, "tokens left, prompts waiting"
        # Decodes: everybody who can, each iteration; the latest stand back when rows or tokens do not suffice.
        decodes = [state for state in stayed if before[state.name] == 1]
        skipped = [state for state in decodes if state.name not in given]
        closed = [s for s in skipped if s.allocation.part in closing]
        waits = [s for s in closed if s.computed == capacity[s.name]]  # for blocks about to come back
        skipped = [s for s in skipped if s not in waits]
        if skipped:
            budget = min(self.policy.budget, self.policy.for_decodes)  # the latter is a share where several plans fly
            assert len(given) == self.max_rows or len(decodes) + bool(prompts) > budget
            assert all(s.name not in given for s in decodes if s.key > skipped[0].key)
        # Orca's promise: in every iteration in which somebody runs, all who arrived before in its class run too, unless
        # they have ended or wait for blocks. (With more stages they may be in another plan.)
        for state in live if not exclusive else ():
            if state.name in given:
                earlier = [s for s in live if s.key < state.key and s.request.priority == state.request.priority]
                # While others of its family compute the prompt, it is overtaken.
                earlier = [s for s in earlier if s.samples is None or s.phase not in (Phase.WAITING, Phase.PREEMPTED)]
                # While it waits for blocks of one part of the pool, those with blocks of another go on.
                again = [s for s in earlier if s.has_begun and s.phase in (Phase.WAITING, Phase.PREEMPTED)]
                earlier = [s for s in earlier if s not in again or len(self.parts) == 1]
                # And while its prefix is on its way from the host, by requests that keep the blocks they get.
                earlier = [s for s in earlier if not s.has_fetched or s.phase not in (Phase.WAITING, Phase.PREEMPTED)]
                assert all(s.name in given or s.phase == Phase.FINISHING or s in waits for s in earlier)
        if oldest is not None and oldest.name in before and oldest.name not in given:
            assert oldest.allocation.part in closing, "the oldest request stood still"
            assert oldest.computed == capacity[oldest.name]
        forks = {name for name, state in scheduler.requests.live.items() if state.samples is not None}
        self.in_flight.append((plan, self.device.run(plan, self.completed, forks)))
        self.withdraw(plan)
        return True

    def withdraw(self, plan: IterationPlan) -> None:
        """GrammarMasks are late for some of the rows with a grammar, and more and more of them once in a while."""
        draw, states = Random(plan.sequence), self.scheduler._in_flight[-1].states
        share = draw.choice([0.0, 0.3, 1.0])
        late = [
            index
            for index, (state, chunk) in enumerate(zip(states, plan.chunks, strict=True))
            if state.variant == SamplerVariant.CONSTRAINED and chunk.samples and draw.random() < share
        ]
        self.scheduler.withdraw(late)
        self.withdrawals += len(late)

    @property
    def completed(self) -> int:
        return self.in_flight[0][0].sequence if self.in_flight else 1 << 30

    def check_shape(self, plan: IterationPlan) -> None:
        scheduler = self.scheduler
        rows = [chunk.row for chunk in plan.chunks]
        lengths = [chunk.length for chunk in plan.chunks]
        assert rows
        assert len(rows) == len(set(rows)) <= max_chunks(plan.bucket, self.max_rows)
        assert {admission.row for admission in plan.admissions} <= set(rows)
        groups = self.scheduler.pool.n_groups
        for group in range(groups):
            copies = plan.block_copies[group::groups]
            copied = [copy.target for copy in copies]
            assert len(copied) == len(set(copied)) <= len(plan.admissions)
            assert set(copied).isdisjoint(copy.source for copy in copies)
            assert set(copied) <= {
                admission.blocks[group - groups] for admission in plan.admissions if admission.blocks
            }
        assert min(lengths) >= 1
        assert plan.num_tokens <= min(plan.bucket, self.policy.budget)
        assert lengths == [1] * lengths.count(1) + [length for length in lengths if length > 1]
        assert sum(chunk.samples or 1 for chunk in plan.chunks) <= min(plan.bucket, self.max_points)
        assert all(chunk.samples in (0, 1, chunk.length) for chunk in plan.chunks)
        assert len(plan.drafts) == plan.num_tokens - plan.num_decodes if plan.drafts else plan.drafts == ()
        assert self.n_stages > 1 or not any(other.drafts for other, _ in self.in_flight), "launched ahead of drafts"
        most = groups * max_table_changes(plan.bucket, self.max_rows, self.device.block_size)
        assert len(plan.table_changes) <= most
        states = scheduler._in_flight[-1].states
        variants = [state.variant for state, chunk in zip(states, plan.chunks, strict=True) if chunk.samples]
        assert plan.sampler == max(variants, default=None)
        assert all(
            chunk.samples < 2
            for state, chunk in zip(states, plan.chunks, strict=True)
            if state.variant == SamplerVariant.CONSTRAINED
        ), "drafts for a row with a grammar"
        if self.n_stages > 1:
            assert set(rows).isdisjoint(chunk.row for other, _ in self.in_flight for chunk in other.chunks)
            assert max(rows) < self.most_in_flight * self.max_rows
        else:
            assert max(rows) < self.max_rows

    def complete(self) -> None:
        plan, result = self.in_flight.popleft()
        self.deliver(self.scheduler.complete(plan, result))

    def check(self) -> None:
        self.parts_used |= {index for index, part in enumerate(self.parts) if any(pool.slots_held for pool in part)}
        accounts.check(self.scheduler, self.parts)
        assert set(self.scheduler.requests.live) <= set(self.clients)

    def land(self, count: int) -> None:
        """The oldest copies from the host land."""
        for load, intact in self.copying[:count]:
            self.scheduler.fetches.landed(load, intact=intact)
        del self.copying[:count]

    def step(self) -> bool:
        """What an engine does in one turn; False when there is nothing to do."""
        self.land(Random(len(self.transcripts) + self.completed).randint(0, len(self.copying)))
        launched = self.launch()
        if self.in_flight and (not launched or len(self.in_flight) >= self.most_in_flight):
            self.complete()
        elif not launched:
            if not self.copying:
                return False
            self.land(1)
        self.check()
        return True

    def drain(self) -> None:
        for _ in range(5000):
            if not self.step():
                break
        assert not self.clients, "somebody never got an answer"
        assert not self.scheduler.has_work
        assert self.scheduler.pool.slots_used == 0
        assert (self.scheduler.requests.samples.num_deferred, self.scheduler.requests.samples.named) == (0, {})
        rows = self.most_in_flight * self.max_rows if self.n_stages > 1 else self.max_rows
        assert sorted(self.scheduler.requests.free_rows) == list(range(rows))


def is_deferred(state) -> bool:
    return state.samples is not None and state in state.samples.deferred


def samples_of(request: Request, count: int) -> list[Request]:
    """A request and forks of it, of which some want their prompt scored and some have another salt."""
    made = [request]
    for index in range(1, count):
        scored = request.sampling.prompt_logprobs if index % 3 == 2 else None
        sampling = dataclasses.replace(request.sampling, sample_index=index, prompt_logprobs=scored)
        name, salt = f"{request.request_id}.{index}", "y" if index % 4 == 3 else request.cache_salt
        made.append(
            dataclasses.replace(
                request, request_id=name, sampling=sampling, cache_salt=salt, fork_of=request.request_id
            )
        )
    return made
