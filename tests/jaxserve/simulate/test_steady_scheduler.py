"""Rows that are only counted, against the scheduler that lists every row: the same outcomes to the bit."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.steady_plans import SteadyPlan
from jaxserve.simulate.steady_scheduler import SteadyScheduler
from jaxserve.simulate.system import SimulatedEngine, SimulationResult
from jaxserve.simulate.virtual_clock import Arrival, HostTimes

SIZES = (2, 4, 8, 16, 32, 64)


class Listing(SimulatedEngine):
    """An engine whose scheduler lists every row of every plan."""

    def scheduler(self, kind: type[Scheduler] = Scheduler) -> Scheduler:
        return super().scheduler()


def seconds(plan: IterationPlan) -> list[float]:
    read = sum(chunk.start for chunk in plan.chunks)
    if isinstance(plan, SteadyPlan):
        read += plan.starts
    return [0.01 + 0.001 * plan.bucket + 1e-5 * read + 1e-6 * plan.num_rows]


@st.composite
def engines(draw) -> SimulatedEngine:
    rows, block = draw(st.integers(1, 12)), draw(st.sampled_from([1, 4, 16]))
    cached, stages = draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 3]))
    config = EngineConfig(
        max_rows=rows,
        buckets=SIZES,
        slot_policy=draw(st.sampled_from(["grow", "grow", "reserve"])),
        prefix_cache=cached,
        host_cache=draw(st.sampled_from([None, 40])) if cached else None,
        stages=stages,
        in_flight=draw(st.sampled_from([None, 1, stages])),
        token_budget=draw(st.sampled_from([None, None, 8, 16])),
        target_tpot=draw(st.sampled_from([None, 0.03, 0.06])),
        order=draw(st.sampled_from(["slo", "fcfs"])),
        replicas=draw(st.sampled_from([1, 1, 2])),
    )
    times = {"launch": 0.001, "complete": 0.002, "polls": True}
    return SimulatedEngine(
        config=config,
        seconds=lambda plan: [(1 + 0.25 * stage) * each for stage in range(stages) for each in seconds(plan)],
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n, slots_read=8) for n in SIZES),
        slot_milliseconds=0.01,
        slots=draw(st.sampled_from([160, 320, 2048])),
        groups=CacheGroups(block_size=block, max_context=160, n_rows=(stages + 1) * rows, most_tokens=64),
        host=draw(st.sampled_from([None, HostTimes(**times)])),
        block_bytes=(1,),
        copy_seconds=(0.004,),
    )


@st.composite
def traffic(draw) -> list[Arrival]:
    rng, count = np.random.default_rng(draw(st.integers(0, 10**6))), draw(st.integers(1, 60))
    times = np.cumsum(rng.exponential(draw(st.sampled_from([0.001, 0.03, 0.2, 1.0])), count))
    more, tenants, priorities = draw(st.sampled_from([0, 0, 9])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    vocabulary, made = draw(st.sampled_from([1, 2, 99])), []
    for time in times:
        output = int(rng.integers(1, 90))
        limit = output + more
        prompt = rng.integers(vocabulary, size=int(rng.integers(1, 60)), dtype=np.int32)
        tenant = "ab"[rng.integers(tenants)]
        made.append(Arrival(float(time), prompt, output, limit, int(rng.integers(priorities)), tenant))
    return made


def figures(served: SimulationResult) -> list:
    table, percents = served.outcomes, (1, 25, 50, 75, 95, 99, 100)
    names = [field.name for field in dataclasses.fields(SimulationResult) if field.name != "outcomes"]
    return [list(table), [table.gaps.percentile(each) for each in percents], *(getattr(served, name) for name in names)]


def check(engine: SimulatedEngine, coming: list[Arrival]) -> None:
    listing = Listing(**{field.name: getattr(engine, field.name) for field in dataclasses.fields(SimulatedEngine)})
    times: tuple[list[Outcome], list[Outcome]] = ([], [])
    for each, kept in zip((engine, listing), times, strict=True):
        each.serve(coming, kept)
    assert times[0] == times[1]
    assert figures(engine.serve(coming)) == figures(listing.serve(coming))


EACH = [25, pytest.param(250, marks=pytest.mark.exhaustive), pytest.param(1500, marks=pytest.mark.weekly)]


@pytest.mark.parametrize("count", EACH)
def test_counted_rows_have_the_outcomes_of_listed_ones(count):
    drawn = given(engine=engines(), coming=traffic())
    settings(max_examples=count, deadline=None, derandomize=count < 1500)(drawn(check))()


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_share_all_rows_have_the_same_outcomes(seed):
    """Where a plan takes its share of all rows, some rows of a batch wait for the next plan."""
    draw = np.random.default_rng(seed)
    stages, rows = 2 + seed % 2, int(draw.integers(4, 13))
    engine = SimulatedEngine(
        config=EngineConfig(max_rows=rows, buckets=SIZES, stages=stages, target_tpot=0.15, prefix_cache=False),
        seconds=lambda plan: [(1 + 0.25 * stage) * each for stage in range(stages) for each in seconds(plan)],
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n, slots_read=8) for n in SIZES),
        slot_milliseconds=0.02,
        slots=2048,
        groups=CacheGroups(block_size=4, max_context=160, n_rows=(stages + 1) * rows, most_tokens=64),
    )
    times = np.cumsum(draw.exponential(0.1, 40))
    prompts, outputs, priorities = (
        draw.integers(1, 60, 40),
        draw.integers(1, 90, 40).tolist(),
        draw.integers(2, size=40),
    )
    check(
        engine,
        [
            Arrival(time, np.zeros(prompt, np.int32), output, output, int(priority))
            for time, prompt, output, priority in zip(times.tolist(), prompts, outputs, priorities, strict=True)
        ],
    )


def test_a_row_listed_again_completes_its_blocks_in_its_turn():
    """Of equal blocks that one plan completes, that of the first row stays."""
    engine = SimulatedEngine(
        config=EngineConfig(max_rows=2, buckets=SIZES),
        seconds=seconds,
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n, slots_read=8) for n in SIZES),
        slot_milliseconds=0.01,
        slots=160,
        groups=CacheGroups(block_size=1, max_context=160, n_rows=4, most_tokens=64),
    )
    coming = [(0.037, 5, 17, "b"), (0.045, 32, 4, "b"), (0.056, 10, 12, "b"), (0.066, 23, 71, "a")]
    check(
        engine,
        [Arrival(time, np.zeros(prompt, np.int32), output, output, 0, who) for time, prompt, output, who in coming],
    )


@pytest.mark.parametrize(("stages", "target"), [(1, None), (3, None), (3, 0.5)])
def test_most_rows_are_counted(stages, target):
    counted, listed = 0, 0

    def watched(plan: IterationPlan) -> list[float]:
        nonlocal counted, listed
        assert isinstance(plan, SteadyPlan)
        counted, listed = counted + plan.steady, listed + len(plan.chunks)
        return seconds(plan) * stages

    engine = SimulatedEngine(
        config=EngineConfig(max_rows=8, buckets=SIZES, stages=stages, target_tpot=target),
        seconds=watched,
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in SIZES),
        slots=16384,
        groups=CacheGroups(block_size=16, max_context=512, n_rows=8, most_tokens=64),
    )
    coming = [Arrival(0.1 * n, np.arange(30, dtype=np.int32) + n, 200, 200) for n in range(40)]
    before = gc.get_threshold()
    engine.serve(coming)
    assert counted > 4 * listed
    assert gc.get_threshold() == before


def two_rows() -> SteadyScheduler:
    """The scheduler of an engine with two rows, whose requests end at their limits."""
    engine = SimulatedEngine(
        config=EngineConfig(max_rows=2, buckets=SIZES),
        seconds=seconds,
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in SIZES),
        slots=512,
        groups=CacheGroups(block_size=16, max_context=256, n_rows=2, most_tokens=64),
    )
    made = engine.scheduler(SteadyScheduler)
    assert isinstance(made, SteadyScheduler)
    made.last_of = lambda name: made.requests.live[name].limit - 1
    return made


def request(name: str, answer: int) -> Request:
    return Request(
        request_id=name, prompt=(1,) * 10, sampling=SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
    )


def land(made: SteadyScheduler, plan: IterationPlan | None) -> list:
    assert isinstance(plan, SteadyPlan)
    return made.complete(plan, IterationResult(tokens=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32)))


def test_a_steady_request_can_be_aborted():
    made = two_rows()
    made.submit(request("x", 101))
    plans = []
    for _ in range(30):
        plans.append(made.schedule())
        land(made, plans[-1])
    assert plans[-1].steady == made.requests.num_running == 1
    assert [event.finish_reason for _, event in made.abort("x")] == [FinishReason.ABORTED]
    assert not made.has_work
    assert made.requests.num_running == made.pool.slots_held == 0


def test_a_row_listed_again_joins_its_plans():
    made = two_rows()
    made.submit(request("x", 100))
    prompt, decode = made.schedule(), made.schedule()
    assert isinstance(prompt, SteadyPlan)
    assert isinstance(decode, SteadyPlan)
    assert (prompt.num_rows, prompt.steady, decode.num_rows, decode.steady) == (1, 0, 1, 1)
    made.abort("x")
    assert [chunk.length for chunk in prompt.chunks] == [10]
    assert (prompt.steady, decode.steady, len(decode.chunks), decode.starts) == (0, 0, 1, 0)
    assert land(made, prompt) == land(made, decode) == []
    assert not made.has_work


def test_a_row_whose_last_plan_is_in_flight_can_be_aborted():
    made = two_rows()
    made.submit(request("x", 5))
    made.submit(request("y", 100))
    plans = [made.schedule(), made.schedule()]
    while plans[-1] is None or plans[-1].num_rows == 2:
        land(made, plans.pop(0))
        plans.append(made.schedule())
    last, after = plans
    assert isinstance(last, SteadyPlan)
    assert isinstance(after, SteadyPlan)
    assert (last.steady, after.steady) == (2, 1)
    made.abort("x")
    assert [(each.steady, len(each.chunks)) for each in (last, after)] == [(1, 1), (1, 0)]
    assert land(made, last) == land(made, after) == []
    assert made.requests.num_running == 1
