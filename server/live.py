"""Live view of the engine: its last iterations chunk by chunk, its load and its latencies.

The engine only appends to a bounded ring. Viewers read new entries at their own pace, at no cost for the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from server.call import Observer, RequestTiming

if TYPE_CHECKING:
    from jaxserve.stats import IterationRecord
    from server.engine_client import EngineClient

KEPT = 512  # iterations
_WINDOW = 60.0  # seconds of samples in the latencies
_SAMPLES = 4096  # most samples of each latency
_QUANTILES = (0.5, 0.95, 0.99)


class LiveStats(Observer):
    """Keeps the last iterations and latencies of an engine.

    Args:
      engine: its iterations are recorded from now on.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._ring: deque[tuple[int, IterationRecord]] = deque(maxlen=KEPT)
        self._latencies = {name: deque[tuple[float, float]](maxlen=_SAMPLES) for name in ("first_token", "gap")}
        self._generated: deque[tuple[float, int]] = deque()
        engine.record(self._append)

    def _append(self, record: IterationRecord) -> None:
        self._ring.append((next(self._numbers), record))

    def tokens(self, timing: RequestTiming, count: int, gap: float | None) -> None:
        now = time.monotonic()
        if gap is None:
            self._latencies["first_token"].append((now, now - timing.request.arrival))
        else:
            self._latencies["gap"].append((now, gap))

    def since(self, number: int) -> dict[str, Any]:
        """Everything since iteration `number`, as data for JSON.

        Returns:
          `next`: the `number` of the next call; smaller than this one if the server has restarted, and then all kept
          iterations are returned. `iterations`: lists of replica, sequence, bucket, waiting requests, monotonic seconds
          at its end, chunks as [row, start, length, samples], and admissions as [row, request id]. `load`: the fields
          of `Engine.load`. `latencies`: of the last minute, seconds to the first token (`first_token`) and between
          tokens (`gap`), at the quantiles 0.5, 0.95 and 0.99, or null without samples.
        """
        kept = self._ring.copy()
        ahead = kept[-1][0] + 1 if kept else 0
        new = [record for its, record in kept if its >= number or number > ahead]
        load = self._engine.load()
        return {
            "next": ahead,
            "healthy": self._engine.problem is None,
            "iterations": [_as_list(record) for record in new],
            "load": dataclasses.asdict(load),
            "latencies": {name: _quantiles(seen) for name, seen in self._latencies.items()},
            "tokens_per_second": self._rate(load.generated_tokens),
        }

    def about(self) -> dict[str, Any]:
        """Facts that do not change while the engine runs, as data for JSON."""
        report, config = self._engine.report, self._engine.config
        return {
            "device": report.device,
            "family": report.family,
            "attention": report.attention,
            "max_rows": report.max_rows,
            "rows": report.max_rows * (1 if config.stages == 1 else config.stages + 1),
            "replicas": config.replicas,
            "max_context": report.max_context,
            "block_size": report.block_size,
            "buckets": [cost.size for cost in report.buckets],
        }

    def _rate(self, generated: int) -> float:
        """Tokens a second since a viewer's call up to two seconds ago."""
        now, seen = time.monotonic(), self._generated
        seen.append((now, generated))
        while now - seen[0][0] > 2.0:
            seen.popleft()
        elapsed = now - seen[0][0]
        return (generated - seen[0][1]) / elapsed if elapsed > 0 else 0.0


def _as_list(record: IterationRecord) -> list[Any]:
    plan = record.plan
    return [
        record.replica,
        plan.sequence,
        plan.bucket,
        record.waiting,
        round(record.finished_at, 4),
        [[chunk.row, chunk.start, chunk.length, int(chunk.samples)] for chunk in plan.chunks],
        [[admission.row, admission.request_id] for admission in plan.admissions],
    ]


def _quantiles(seen: deque[tuple[float, float]]) -> list[float] | None:
    """Quantiles of the samples in the window, or None without samples."""
    after = time.monotonic() - _WINDOW
    values = sorted(value for at, value in seen.copy() if at >= after)
    if not values:
        return None
    return [values[min(int(q * len(values)), len(values) - 1)] for q in _QUANTILES]
