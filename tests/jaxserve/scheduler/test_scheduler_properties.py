"""Whatever arrives, in whatever order plans are launched and completed: nothing is lost and nobody's answer changes.

The device here is a model of a real one (`device_model`).
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import InvalidRequest
from jaxserve.request import Request
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.scheduler.order import PRIORITY_SECONDS
from jaxserve.scheduler.state import check_fits
from tests.jaxserve.scheduler.device_model import MAX_CONTEXT, VOCABULARY
from tests.jaxserve.scheduler.scheduler_world import World, samples_of

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
        host=st.sampled_from([0, 0, 1, 4, 100]),
        parts=st.sampled_from([1, 1, 2, 3]),
    )
    def begin(self, tpot, host, parts, **settings):
        self.world = World(**settings, target=tpot, parts=parts, host=host if parts == 1 else 0)
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
            if request.prompt and request.max_length <= min(MAX_CONTEXT, self.world.scheduler.pool.request_slots):
                for sample in samples_of(request, samples):
                    self.world.submit(sample)
            else:
                with pytest.raises(InvalidRequest, match=r"^(prompt|max_tokens): "):
                    check_fits(request, MAX_CONTEXT, self.world.scheduler.pool.request_slots)

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

    @precondition(lambda self: self.world.device.host)
    @rule(which=st.integers(0, 100))
    def corrupt(self, which):
        keys = sorted(self.world.device.host)
        self.world.device.host[keys[which % len(keys)]][-1] = None

    @rule()
    def flush(self):
        self.world.scheduler.flush_prefix_cache()
        assert not any(pool.blocks.num_cached for pool in self.world.pools)

    @invariant()
    def all_accounted_for(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


FEW = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class TestScheduler(SchedulerMachine.TestCase):
    settings = FEW


@pytest.mark.long
class TestSchedulerInManyCases(SchedulerMachine.TestCase):
    settings = settings(FEW, max_examples=300)


@pytest.mark.weekly
class TestSchedulerInAThousandCases(SchedulerMachine.TestCase):
    settings = settings(FEW, max_examples=1000, derandomize=False)


def stages_and_seeds(count: int) -> pytest.MarkDecorator:
    """Three pairs in every run, the others among the long tests."""
    pairs = [(n_stages, seed) for seed in range(count) for n_stages in (1, 2)]
    each = [
        pytest.param(*pair, marks=pytest.mark.long if index not in (1, 2, 3) else ())
        for index, pair in enumerate(pairs)
    ]
    return pytest.mark.parametrize(("n_stages", "seed"), each)


@stages_and_seeds(3)
@pytest.mark.parametrize("mode", ["iteration", "request"])
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_in_a_small_pool(policy, mode, n_stages, seed):
    """Random, not adversarial, but far more crowded: many preemptions, hits, late stops and aborts."""
    crowd(policy, mode, n_stages, seed)


@stages_and_seeds(6)
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_windows(policy, n_stages, seed):
    """The same where every layer has a sliding window, with late masks and drafts."""
    errs, grammars = 0.2 if seed % 2 else None, 0.3 if seed % 3 else 0.0
    crowd(policy, "iteration", n_stages, seed, errs=errs, grammars=grammars, windows=(1 + 3 * seed,))


@stages_and_seeds(8)
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_two_cache_groups(policy, n_stages, seed):
    """The same where some layers have a sliding window, whose pool is often the smaller."""
    errs, grammars = 0.2 if seed % 2 else None, 0.3 if seed % 3 else 0.0
    windows = (None, 1 + 3 * (seed % 4))
    crowd(policy, "iteration", n_stages, seed, errs=errs, grammars=grammars, windows=windows, tight=seed > 3)


@stages_and_seeds(6)
def test_a_crowd_with_drafts(n_stages, seed):
    """The same with drafts, some of them wrong."""
    scheduler = crowd("grow" if seed % 3 else "reserve", "iteration", n_stages, seed, errs=0.2).scheduler
    assert 0 < scheduler.accepted_tokens < scheduler.drafted_tokens


@stages_and_seeds(6)
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_with_late_masks(policy, n_stages, seed):
    """The same with grammars, some of whose masks are late."""
    world = crowd(policy, "iteration", n_stages, seed, errs=0.2 if seed % 2 else None, grammars=0.6)
    assert world.withdrawals > 20


@stages_and_seeds(6)
@pytest.mark.parametrize("windows", [(None,), (7,), (None, 4)])
def test_a_crowd_with_a_host_cache(windows, n_stages, seed):
    """The same with blocks that go to the host and come back, some of them corrupt."""
    policy, errs = "grow" if seed % 3 else "reserve", 0.2 if seed % 2 else None
    host = [30, 200][seed // 3]
    world = crowd(policy, "iteration", n_stages, 4 * seed + 1, errs=errs, windows=windows, tight=seed > 3, host=host)
    cache = world.pools[0].host
    assert cache is not None
    assert cache.loaded_blocks > cache.corrupt_blocks
    assert cache.bytes_used == len(cache) == len(world.device.host) <= host
    world.scheduler.flush_prefix_cache()
    copies = world.scheduler.fetches.take_copies()
    assert copies is not None
    world.device.copy(copies)
    assert not world.device.host
    assert not cache.bytes_used


@stages_and_seeds(8)
@pytest.mark.parametrize("policy", ["grow", "reserve"])
def test_a_crowd_in_a_pool_of_parts(policy, n_stages, seed):
    """The same where each part of the pool has the blocks of its own requests."""
    windows, parts = ((None,), (None,), (7,), (None, 4))[seed % 4], 2 + seed % 2
    world = crowd(policy, "iteration", n_stages, seed, errs=0.2 if seed % 2 else None, windows=windows, parts=parts)
    assert world.parts_used == set(range(parts))


def crowd(
    policy, mode, n_stages, seed, errs=None, grammars=0.0, windows=(None,), tight=False, host=0, parts=1
) -> World:
    draw = Random(seed)
    block_size = draw.choice([1, 2, 3, 4])
    slots = draw.randint(MAX_CONTEXT, 3 * MAX_CONTEXT)
    sizes, growth = {1, 3, 6, 10, 16}, seed % 3
    rows, cache = draw.randint(3, 6), seed % 4 > 0
    more = {"errs": errs, "windows": windows, "tight": tight, "host": host, "parts": parts}
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
            if world.device.host and draw.random() < 0.03:
                world.device.host[draw.choice(sorted(world.device.host))][0] = None
        if world.clients and draw.random() < 0.1:
            world.abort(draw.choice(sorted(world.clients)))
    world.drain()
    return world
