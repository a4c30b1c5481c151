"""Whatever arrives, in whatever order plans are launched and completed: nothing is lost and nobody's answer changes.

The device here is a model of a real one (`device_model`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import (
    IterationPlan,
    IterationResult,
    SamplerVariant,
    max_chunks,
    max_points,
    max_table_changes,
)
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.scheduler.block_allocation import NO_BLOCK, BlockAllocation
from jaxserve.scheduler.buckets import BucketCost, BucketLadder
from jaxserve.scheduler.cache_groups import CacheGroups, GroupedPool, make_pool
from jaxserve.scheduler.kv_blocks import SlotPool
from jaxserve.scheduler.order import PRIORITY_SECONDS
from jaxserve.scheduler.policy import TokenBudgetPolicy, make_policy
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.speculation import Speculation
from jaxserve.scheduler.state import Phase, check_fits
from jaxserve.scheduler.static_batching import StaticBatchScheduler
from jaxserve.scheduler.window_pool import WindowPool
from tests.jaxserve.scheduler.device_model import EOS, MAX_CONTEXT, VOCABULARY, Client, Device, Prophet


class RecordedPolicy:
    """A policy that remembers the last budget it gave."""

    def __init__(self, policy: TokenBudgetPolicy) -> None:
        self.policy = policy
        self.budget = 0

    def decode_budget(self, requests):
        return self.policy.decode_budget(requests)

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
    ) -> None:
        costs = [BucketCost(size=size, compile_seconds=0.0, milliseconds=10.0 + size) for size in sorted(sizes)]
        groups = CacheGroups(
            windows=windows,
            block_size=block_size,
            max_context=MAX_CONTEXT,
            n_rows=max_rows,
            most_tokens=max(sizes),
            draft_tokens=0 if errs is None else 5,
        )
        n_blocks, settings = -(-slots // block_size), {"policy": policy, "prefix_cache": cache}
        pool = make_pool(groups, n_blocks, **settings)
        if tight and isinstance(pool, GroupedPool):  # only just enough for the longest request alone
            least = [min(n_blocks, each._bound + each._spare) for each in pool.pools[1:]]
            more = {"most_tokens": max(sizes), "draft_tokens": groups.draft_tokens, **settings}
            windowed = zip(least, windows[1:], strict=True)
            others = [WindowPool(blocks, block_size, window=window, **more) for blocks, window in windowed]
            pool = GroupedPool([pool.pools[0], *others])
        self.pools = pool.pools if isinstance(pool, GroupedPool) else (pool,)
        for each in self.pools:
            each.growth_tokens = growth
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
        self.n_stages, self.by_request, self.max_rows = n_stages, mode == "request", max_rows
        self.device = Device(block_size, windows)
        self.clients: dict[str, Client] = {}
        self.transcripts: list[tuple[int, ...]] = [()]
        self.in_flight: deque[tuple[IterationPlan, IterationResult]] = deque()

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.clients[request.request_id] = Client(request)

    def deliver(self, events: list[TokenEvent]) -> None:
        assert not (self.by_request and events and self.scheduler.num_running), "a batch of requests ends as one"
        for event in events:
            client = self.clients[event.request_id]
            client.take(event)
            if event.finish_reason is not None:
                self.transcripts.append(client.request.prompt + tuple(client.tokens))
                del self.clients[event.request_id]

    def abort(self, request_id: str) -> None:
        event, *released = self.scheduler.abort(request_id)
        assert event.finish_reason == FinishReason.ABORTED
        assert not event.token_ids
        del self.clients[request_id]
        self.deliver(released)
        assert self.scheduler.abort(request_id) == []

    def launch(self) -> bool:
        scheduler = self.scheduler
        exclusive = self.n_stages > 1
        live = sorted(scheduler.requests.live.values(), key=lambda state: state.key)
        before = {
            state.name: state.length - state.computed
            for state in live
            if state.phase == Phase.RUNNING and not (exclusive and state.in_flight)
        }
        capacity = {state.name: state.allocation.capacity for state in live}
        closing = scheduler.requests.num_finishing
        oldest = next((state for state in live if state.phase == Phase.RUNNING), None)
        plan = scheduler.schedule()
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
            state.key for state in live if state.phase in (Phase.WAITING, Phase.PREEMPTED) and not is_deferred(state)
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
                starts[admission.row] * len(self.pools) == len(admission.blocks) * self.device.block_size
                or state.samples is not None
            )
        short = [index for index, share in enumerate(shares) if share < wanted[index]]
        assert not short or not any(shares[short[0] + 1 :])
        full = len(given) == self.max_rows or sum(given.values()) == min(plan.bucket, self.policy.budget)
        assert not short or full, "tokens left, prompts waiting"
        # Decodes: everybody who can, each iteration; the latest stand back when rows or tokens do not suffice.
        decodes = [state for state in stayed if before[state.name] == 1]
        skipped = [state for state in decodes if state.name not in given]
        waits = [s for s in skipped if closing and s.computed == capacity[s.name]]  # for blocks about to come back
        skipped = [s for s in skipped if s not in waits]
        if skipped:
            assert len(given) == self.max_rows or len(decodes) + bool(prompts) > self.policy.budget
            assert all(s.name not in given for s in decodes if s.key > skipped[0].key)
        # Orca's promise: in every iteration in which somebody runs, all who arrived before in its class run too, unless
        # they have ended or wait for blocks. (With more stages they may be in another plan.)
        for state in live if not exclusive else ():
            if state.name in given:
                earlier = [s for s in live if s.key < state.key and s.request.priority == state.request.priority]
                # While others of its family compute the prompt, it is overtaken.
                earlier = [s for s in earlier if s.samples is None or s.phase not in (Phase.WAITING, Phase.PREEMPTED)]
                assert all(s.name in given or s.phase == Phase.FINISHING or s in waits for s in earlier)
        if oldest is not None and oldest.name in before and oldest.name not in given:
            assert closing, "the oldest request stood still"
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
        before = self.scheduler.withdrawals
        self.scheduler.withdraw(late)
        assert self.scheduler.withdrawals == before + len(late)

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
        groups = len(self.pools)
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
        """Every block is in one place; every row and every count is right."""
        scheduler = self.scheduler
        live = scheduler.requests.live.values()
        for group, pool in enumerate(self.pools):
            held = [state.allocation.groups[group] for state in live if state.allocation.is_held]
            self.check_pool(pool, held)
            assert all(len(each.blocks) * pool.block_size == each.capacity for each in held)
        for state in live:
            assert len({(each.capacity, each.is_held) for each in state.allocation.groups}) == 1
        assert 0 <= scheduler.pool.slots_held <= scheduler.pool.slots_used <= scheduler.pool.n_slots
        rows = [state.row for state in live if state.row >= 0]
        assert len(rows) == len(set(rows))
        assert set(rows).isdisjoint(scheduler.requests.free_rows)
        assert len(scheduler.requests.free_rows) == len(set(scheduler.requests.free_rows))
        phases = Counter(state.phase for state in live)
        assert scheduler.requests.num_waiting == phases[Phase.WAITING] + phases[Phase.PREEMPTED]
        assert scheduler.num_running == phases[Phase.RUNNING] + phases[Phase.FINISHING]
        rowless = [state for state in live if state.phase in (Phase.WAITING, Phase.PREEMPTED)]
        assert scheduler.requests.waiting_tokens == sum(state.length for state in rowless)
        assert all(s.length == len(s.tokens) for s in live if s.phase == Phase.WAITING)
        assert not any(state.allocation.blocks for state in rowless)
        if scheduler.pool.policy == "reserve":
            assert not scheduler.preemptions
        assert set(scheduler.requests.live) <= set(self.clients)

    def check_pool(self, pool: SlotPool, held: list[BlockAllocation]) -> None:
        """Every block of a cache group is in one place, and every promise is kept."""
        references = Counter(block for each in held for block in each.blocks if block != NO_BLOCK)
        assert [references[block] for block in range(pool.n_blocks)] == pool._references
        places = Counter([*pool._free, *pool._idle, *references])
        assert places == Counter(range(pool.n_blocks))
        if isinstance(pool, WindowPool):
            promised = [each._set_aside for each in held]
            assert all(len(each.blocks) <= each._set_aside for each in held)
            assert pool._set_aside == sum(min(each, pool._bound) for each in promised)
            assert pool._beyond == sum(max(each - pool._bound, 0) for each in promised)
            assert pool._set_aside + min(pool._beyond, pool._spare) <= pool.n_blocks
            # A request that was not trimmed yet may hold its chunk as well.
            trimmed = [
                each
                for each in held
                if all(each is not state.allocation.groups[-1] for state in self.scheduler._to_trim)
            ]
            assert all(sum(block != NO_BLOCK for block in each.blocks) <= pool._bound for each in trimmed)
        else:
            assert pool._set_aside == sum(each._set_aside for each in held) <= pool.num_available
        assert {digest: block for block, digest in enumerate(pool._digest_of) if digest} == pool._block_of
        assert set(pool._idle) <= set(pool._block_of.values())
        assert set(pool._free).isdisjoint(pool._block_of.values())

    def step(self) -> bool:
        """What an engine does in one turn; False when there is nothing to do."""
        launched = self.launch()
        if self.in_flight and (not launched or len(self.in_flight) >= self.most_in_flight):
            self.complete()
        elif not launched:
            return False
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


GRAMMAR = Grammar(kind="regex", text="whatever the device says")
SHARED = tuple(1 + i * i % 5 for i in range(MAX_CONTEXT))  # prompts begin alike


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.integers(1, 16), st.just(16)),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (), (3,), (0, 5)]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, None, 0, 3]),
    top_p=st.sampled_from([1.0, 0.5]),
    grammar=st.sampled_from([None, None, GRAMMAR]),
)
REQUESTS = st.tuples(
    st.integers(0, 10),  # tokens of the shared beginning
    st.lists(st.integers(1, VOCABULARY - 1), max_size=5),  # and of its own
    st.one_of(st.none(), st.none(), st.integers(0, 100)),  # or the conversation that it goes on with
    SAMPLING,
    st.sampled_from([0, 0, 0, 1]),  # priority
    st.sampled_from(["", "", "", "x"]),  # salt
    st.sampled_from([1, 1, 2, 5]),  # samples
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["grow", "reserve"]),
        mode=st.sampled_from(["iteration", "iteration", "request"]),
        n_stages=st.sampled_from([1, 1, 2]),
        max_rows=st.sampled_from([1, 2, 3, 4, 5, 4, 5]),
        block_size=st.integers(1, 4),
        slots=st.one_of(st.integers(MAX_CONTEXT, 40), st.integers(12, 80)),
        sizes=st.sets(st.sampled_from([1, 2, 4, 5, 7, 8, 12, 16, 20]), min_size=1, max_size=5),
        budget=st.sampled_from([None, None, None, 1, 2, 3, 5, 12]),
        cache=st.sampled_from([True, True, False]),
        growth=st.sampled_from([0, 1, 3, 16]),
        tpot=st.sampled_from([None, None, 0.001, 0.05, 1.0]),
        ahead=st.sampled_from([0, 1, 1]),
        errs=st.sampled_from([None, None, 0.0, 0.2, 0.7]),
        windows=st.sampled_from([(None,), (None,), (4,), (9,), (None, 1), (None, 4), (None, 9), (9, 2), (None, 9, 2)]),
        tight=st.booleans(),
    )
    def begin(self, tpot, **settings):
        self.world = World(**settings, target=tpot)
        self.count = 0

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests):
        transcripts = self.world.transcripts
        for shared, own, follows, sampling, priority, salt, samples in requests:
            before = SHARED[:shared] if follows is None else transcripts[follows % len(transcripts)]
            request = Request(
                request_id=str(self.count),
                prompt=(before + tuple(own))[: MAX_CONTEXT - 4],
                sampling=sampling,
                priority=priority,
                arrival=self.count * PRIORITY_SECONDS / 3,
                cache_salt=salt,
            )
            self.count += 1
            if request.prompt and request.max_length <= min(MAX_CONTEXT, self.world.scheduler.pool.n_slots):
                for sample in samples_of(request, samples):
                    self.world.submit(sample)
            else:
                with pytest.raises(InvalidRequest, match=r"^(prompt|max_tokens): "):
                    check_fits(request, MAX_CONTEXT, self.world.scheduler.pool.n_slots)

    @rule(times=st.integers(1, 12))
    def run(self, times):
        for _ in range(times):
            self.world.step()

    @rule()
    def launch(self):
        self.world.launch()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def complete(self):
        self.world.complete()

    @precondition(lambda self: self.world.clients)
    @rule(which=st.integers(0, 100))
    def abort(self, which):
        names = sorted(self.world.clients)
        self.world.abort(names[which % len(names)])

    @rule()
    def flush(self):
        self.world.scheduler.flush_prefix_cache()
        assert not any(pool.num_cached for pool in self.world.pools)

    @invariant()
    def all_accounted_for(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("mode", ["iteration", "request"])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_in_a_small_pool(policy, mode, n_stages, seed):
    """Random, not adversarial, but far more crowded: many preemptions, hits, late stops and aborts."""
    crowd(policy, mode, n_stages, seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_windows(policy, n_stages, seed):
    """The same where every layer has a sliding window, with late masks and drafts."""
    errs, grammars = 0.2 if seed % 2 else None, 0.3 if seed % 3 else 0.0
    crowd(policy, "iteration", n_stages, seed, errs=errs, grammars=grammars, windows=(1 + 3 * seed,))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_two_cache_groups(policy, n_stages, seed):
    """The same where some layers have a sliding window, whose pool is often the smaller."""
    errs, grammars = 0.2 if seed % 2 else None, 0.3 if seed % 3 else 0.0
    windows = (None, 1 + 3 * (seed % 4))
    crowd(policy, "iteration", n_stages, seed, errs=errs, grammars=grammars, windows=windows, tight=seed > 3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_crowd_with_drafts(n_stages, seed):
    """The same with drafts, some of them wrong."""
    scheduler = crowd("grow" if seed % 3 else "reserve", "iteration", n_stages, seed, errs=0.2).scheduler
    assert 0 < scheduler.accepted_tokens < scheduler.drafted_tokens


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_late_masks(policy, n_stages, seed):
    """The same with grammars, some of whose masks are late."""
    world = crowd(policy, "iteration", n_stages, seed, errs=0.2 if seed % 2 else None, grammars=0.6)
    assert world.scheduler.withdrawals > 20


def crowd(policy, mode, n_stages, seed, errs=None, grammars=0.0, windows=(None,), tight=False) -> World:
    draw = Random(seed)
    block_size = draw.choice([1, 2, 3, 4])
    slots = draw.randint(MAX_CONTEXT, 3 * MAX_CONTEXT)
    sizes, growth = {1, 3, 6, 10, 16}, seed % 3
    rows, cache = draw.randint(3, 6), seed % 4 > 0
    more = {"errs": errs, "windows": windows, "tight": tight}
    world = World(policy, mode, n_stages, rows, block_size, slots, sizes, None, cache, growth, **more)
    for count in range(60):
        before = SHARED[: draw.randint(0, 12)] if draw.random() < 0.7 else draw.choice(world.transcripts)
        own = tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 5)))
        prompt = (before + own)[: MAX_CONTEXT - 8]
        most = MAX_CONTEXT - len(prompt)
        sampling = SamplingParams(
            max_tokens=draw.randint(1, most),
            ignore_eos=draw.random() < 0.8,
            logprobs=draw.choice([None, 0, 1]),
            prompt_logprobs=draw.choice([None, None, None, 0, 2]),
            grammar=GRAMMAR if grammars and draw.random() < grammars else None,
        )
        arrival, priority = float(count), draw.choice([0, 0, 0, 0, 2])
        request = Request(request_id=str(count), prompt=prompt, sampling=sampling, priority=priority, arrival=arrival)
        for sample in samples_of(request, draw.choice([1, 1, 1, 2, 4])):
            world.submit(sample)
        for _ in range(draw.choice([0, 0, 1, 3, 10])):
            world.step()
        if world.clients and draw.random() < 0.1:
            world.abort(draw.choice(sorted(world.clients)))
    world.drain()
    return world
