"""What a start measures of the buckets, on a pipeline that only notes what it is given."""

from collections import deque
from types import SimpleNamespace

import pytest

from jaxserve.runner import measure
from jaxserve.runner.batch import BatchLayout
from jaxserve.scheduler.cache_groups import CacheGroups

ROWS, BLOCK = 4, 16
SECONDS_A_SLOT = 1e-5


class MadeUp:
    """A pipeline of one stage on a clock of its own: an iteration takes 1 ms, 0.1 ms a token, and some for the slots
    it reads."""

    def __init__(self, monkeypatch, buckets=(2, 4, 16), max_context=1024) -> None:
        self.stages = [SimpleNamespace(buckets=buckets, compile_seconds=dict.fromkeys(buckets, 0.5))]
        self._groups = CacheGroups(block_size=BLOCK, max_context=max_context, n_rows=4, most_tokens=buckets[-1])
        self.shape = SimpleNamespace(
            max_rows=ROWS,
            max_context=max_context,
            attention=SimpleNamespace(block_size=BLOCK),
            groups=self._groups,
            layout=self.layout,
        )
        self._flying, self._now, self._free = deque(), 0.0, 0.0
        self.plans = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self._now)

    def layout(self, bucket: int) -> BatchLayout:
        return BatchLayout(bucket=bucket, max_rows=ROWS, n_rows=2 * ROWS, groups=self._groups)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def has_capacity(self) -> bool:
        return len(self._flying) <= 1

    def launch(self, plan, packed) -> None:
        del packed
        self.plans.append(plan)
        self._now += 0.004  # the host's part: hidden as long as another iteration is under way
        read = sum(chunk.start for chunk in plan.chunks)
        self._free = max(self._free, self._now) + 0.005 + 1e-4 * plan.bucket + SECONDS_A_SLOT * read
        self._flying.append(self._free)

    def wait(self) -> None:
        self._now = max(self._now, self._flying.popleft())


def test_cost_is_device_time_with_launch_ahead(monkeypatch) -> None:
    costs, slope = measure.measure_buckets(MadeUp(monkeypatch), 4096, lambda *_: None)
    assert [cost.size for cost in costs] == [2, 4, 16]
    assert [cost.slots_read for cost in costs] == [2 * 128, 4 * 128, 3 * 128]
    expected = [5 + 0.1 * cost.size + 1e3 * SECONDS_A_SLOT * cost.slots_read for cost in costs]
    assert [cost.milliseconds for cost in costs] == pytest.approx(expected)
    assert slope == pytest.approx(1e3 * SECONDS_A_SLOT)


def test_each_row_reads_blocks_of_its_own(monkeypatch) -> None:
    pipeline = MadeUp(monkeypatch)
    measure.measure_buckets(pipeline, 4096, lambda *_: None)
    admitted = [plan for plan in pipeline.plans if plan.admissions]
    assert len(admitted) == 1
    blocks = [block for admission in admitted[0].admissions for block in admission.blocks]
    assert len(blocks) == len(set(blocks)) == ROWS * -(-513 // BLOCK)
    longest = max(chunk.start + chunk.length for plan in pipeline.plans for chunk in plan.chunks)
    assert longest == 513
    assert pipeline.in_flight == 0


@pytest.mark.parametrize(("max_context", "n_blocks"), [(100, 4096), (1024, 2), (64, 3), (2, 1)])
def test_a_small_pool_or_context_is_kept_to(monkeypatch, max_context, n_blocks) -> None:
    pipeline = MadeUp(monkeypatch, max_context=max_context)
    costs, slope = measure.measure_buckets(pipeline, n_blocks, lambda *_: None)
    most = min(max_context, n_blocks * BLOCK)
    assert all(chunk.start + chunk.length <= most for plan in pipeline.plans for chunk in plan.chunks)
    assert all(change.block < n_blocks for plan in pipeline.plans for change in plan.table_changes)
    assert all(cost.milliseconds > 5 for cost in costs)
    assert slope >= 0


def test_slow_buckets_run_fewer_times(monkeypatch) -> None:
    pipeline = MadeUp(monkeypatch, buckets=(2, 16, 8000), max_context=8192)
    costs, _ = measure.measure_buckets(pipeline, 4096, lambda *_: None)
    assert costs[2].milliseconds == pytest.approx(5 + 800 + 1e3 * SECONDS_A_SLOT * costs[2].slots_read)
    launched = [plan.bucket for plan in pipeline.plans]
    assert launched.count(8000) < launched.count(2)
