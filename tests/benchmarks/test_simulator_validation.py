"""The simulated engine: costs, host times, parts and medians."""

import dataclasses
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from benchmarks import simulator_validation
from jaxserve.config import EngineConfig
from jaxserve.engine import IterationRecord
from jaxserve.iteration import Chunk, IterationPlan
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import HostTimes
from jaxserve.simulate.workload import Job, Workload
from jaxserve.startup_report import StartupReport

COSTS = (
    BucketCost(size=4, compile_seconds=0.0, milliseconds=20.0, slots_read=512),
    BucketCost(size=16, compile_seconds=0.0, milliseconds=50.0, slots_read=384),
)


def report(costs=COSTS, slot_milliseconds=0.01) -> StartupReport:
    sizes = {"slots": 1024, "block_size": 16, "max_context": 512, "replicas": 1}
    return cast(StartupReport, SimpleNamespace(buckets=costs, slot_milliseconds=slot_milliseconds, **sizes))


def system(after=None, **settings) -> SimulatedEngine:
    turn = simulator_validation.ServedPart(
        workload=Workload(name="", jobs=()),
        config=EngineConfig(stages=2),
        report=report(**settings),
        max_context=512,
        outcomes=[],
        records=[],
    )
    return simulator_validation.system_of(turn, after or report(**settings), HostTimes())


def seconds(bucket, chunks, **settings) -> list[float]:
    plan = SimpleNamespace(bucket=bucket, chunks=[Chunk(row, *chunk, True) for row, chunk in enumerate(chunks)])
    return [*system(**settings).seconds(cast(IterationPlan, plan))]


def test_cost_of_a_measured_iteration() -> None:
    assert seconds(4, [(128, 1)] * 4) == pytest.approx([0.020, 0.020])
    assert seconds(16, [(128, 1)] * 3 + [(0, 13)]) == pytest.approx([0.050, 0.050])


def test_cost_of_more_and_fewer_slots() -> None:
    assert seconds(4, [(228, 1)] * 4) == pytest.approx([0.024, 0.024])
    assert seconds(4, [(128, 1)]) == pytest.approx([0.020 - 384e-5] * 2)
    assert seconds(16, [(128, 1)] * 3 + [(64, 13)]) == pytest.approx([0.05064] * 2)
    assert seconds(4, [(1, 1)], slot_milliseconds=1.0) == [0.0, 0.0]


def test_cost_is_the_mean_of_two_starts() -> None:
    dearer = tuple(dataclasses.replace(cost, milliseconds=2 * cost.milliseconds) for cost in COSTS)
    after = report(dearer, slot_milliseconds=0.03)
    assert seconds(4, [(128, 1)] * 4, after=after) == pytest.approx([0.030, 0.030])
    assert seconds(4, [(228, 1)] * 4, after=after) == pytest.approx([0.038, 0.038])
    assert system(after).costs == COSTS  # what the scheduler decides by


def record(finished_at=0.0, bucket=4, **times) -> IterationRecord:
    times = {"schedule_s": 0.001, "pack_s": 0.002, "launch_s": 0.003, "wait_s": 0.5, "complete_s": 0.004} | times
    counts = dict.fromkeys(("replica", "decodes", "prompt_tokens", "waiting"), 0)
    plan = SimpleNamespace(bucket=bucket, chunks=[])
    return IterationRecord(**counts, **times, plan=cast(IterationPlan, plan), finished_at=finished_at)


def test_host_times_are_medians() -> None:
    times = [record(), record(schedule_s=1.0, complete_s=1.0), record()]
    assert simulator_validation.host_of(times) == (pytest.approx(0.006), 0.004, False)


def test_pace_counts_consecutive_iterations() -> None:
    def costs(plan):
        return [plan.bucket / 100]

    def outcome(arrival, end):
        return Outcome(arrival=arrival, prompt_tokens=1, token_times=[arrival, end])

    records = [record(0.1), record(0.15), record(0.2), record(9.0), record(9.1), record(9.58, bucket=16)]
    # Nobody was there between 0.2 and 8.9; the second comes while the first is answered, the fourth after the third.
    outcomes = [outcome(0.0, 0.15), outcome(0.12, 0.2), outcome(8.9, 9.1), outcome(9.05, 9.58)]
    assert simulator_validation.pace_of(outcomes, records, costs) == pytest.approx(
        (0.05 + 0.05 + 0.1 + 0.48) / (3 * 0.04 + 0.16)
    )
    assert simulator_validation.pace_of(outcomes, records[:1], costs) == 1.0


def test_parts_have_about_equal_numbers_of_jobs() -> None:
    jobs = tuple(Job(arrival=0.0, prompt=np.zeros(length, np.int32), max_tokens=1) for length in range(1, 13))
    parts = simulator_validation.parts_of(Workload(name="", jobs=jobs))
    assert [len(part.jobs) for part in parts] == [2, 2, 3, 2, 3]
    assert tuple(job for part in parts for job in part.jobs) == jobs
    assert [len(part.jobs) for part in simulator_validation.parts_of(Workload(name="", jobs=jobs[:3]))] == [1, 1, 1]


def test_figures_are_medians_over_parts() -> None:
    parts = [
        {"a": (1.0, 10.0), "b": (5.0, 5.0)},
        {"a": (9.0, 12.0), "b": (6.0, 7.0)},
        {"a": (2.0, 11.0), "b": (7.0, 6.0)},
    ]
    assert simulator_validation.middle(parts) == {"a": (2.0, 11.0), "b": (6.0, 6.0)}
