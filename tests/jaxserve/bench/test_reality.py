"""What the simulator takes over from an engine."""

from types import SimpleNamespace

import pytest

from jaxserve.bench import reality
from jaxserve.config import EngineConfig
from jaxserve.engine import IterationRecord
from jaxserve.iteration import Chunk
from jaxserve.scheduling.buckets import BucketCost

COSTS = (
    BucketCost(size=4, compile_seconds=0.0, milliseconds=20.0, slots_read=512),
    BucketCost(size=16, compile_seconds=0.0, milliseconds=50.0, slots_read=384),
)


def system(slot_milliseconds=0.01):
    report = SimpleNamespace(
        buckets=COSTS, slot_milliseconds=slot_milliseconds, slots=1024, block_size=16, max_context=512, replicas=1
    )
    engine = SimpleNamespace(config=EngineConfig(stages=2), report=report, max_context=512)
    times = {"schedule_s": 0.001, "pack_s": 0.002, "launch_s": 0.003, "wait_s": 0.5, "complete_s": 0.004}
    counts = dict.fromkeys(("replica", "plan", "decodes", "prompt_tokens", "waiting"), 0)
    return reality.system_of(engine, [IterationRecord(**counts, **times, finished_at=0.0)])  # pyright: ignore[reportArgumentType]


def seconds(bucket, chunks, **settings) -> list[float]:
    plan = SimpleNamespace(bucket=bucket, chunks=[Chunk(row, *chunk, True) for row, chunk in enumerate(chunks)])
    return system(**settings).seconds(plan)  # pyright: ignore[reportArgumentType]


def test_an_iteration_like_the_one_measured_costs_what_was_measured() -> None:
    assert seconds(4, [(128, 1)] * 4) == pytest.approx([0.020, 0.020])
    assert seconds(16, [(128, 1)] * 3 + [(0, 13)]) == pytest.approx([0.050, 0.050])


def test_slots_that_are_read_more_and_less_count() -> None:
    assert seconds(4, [(228, 1)] * 4) == pytest.approx([0.024, 0.024])
    assert seconds(4, [(128, 1)]) == pytest.approx([0.020 - 384e-5] * 2)
    assert seconds(16, [(128, 1)] * 3 + [(64, 13)]) == pytest.approx([0.05064] * 2)
    assert seconds(4, [(1, 1)], slot_milliseconds=1.0) == [0.0, 0.0]


def test_the_hosts_times_are_its_records_medians() -> None:
    assert system().host == (pytest.approx(0.006), 0.004, False)
