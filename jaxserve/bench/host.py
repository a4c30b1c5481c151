"""What the host does for an iteration, with a model so small that hardly anything else is left."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import machine, report, shapes
from jaxserve.bench.load import Job, Range
from jaxserve.bench.offline import make_request
from jaxserve.bench.progress import Bars
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, IterationRecord
from jaxserve.request import TokenEvent

PROMPT, OUTPUT = Range(low=8, high=32), Range(low=32, high=96)
WARM_UP = 50  # iterations that are not counted
TARGETS_MS = {8: 0.6, 256: 2.5}  # by rows
FLAT = 1.25  # how much dearer an iteration may get with requests waiting before the table says so


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Host work of an iteration at one load; `stats.host_ms` has it by phase."""

    rows: int
    waiting: int
    stats: report.IterationStats

    @property
    def median(self) -> float:
        return self.stats.host_ms["host"].p50


def measure(
    rows: int, waiting: Sequence[int], iterations: int, config: EngineConfig, bars: Bars, seed: int = 0
) -> list[HostTime]:
    """Runs an engine with all rows busy and, for each entry of `waiting` (ascending), so many requests in its queue.

    Whenever requests end as many new ones come, so rows change hands at the same pace at every load.
    """
    model_config, params = shapes.random_params("tiny", "float32")
    longest = PROMPT.high + OUTPUT.high
    settings = dataclasses.replace(
        config,
        dtype="float32",
        max_rows=rows,
        max_context=longest,
        slots=2 * rows * longest,
        scoring=False,
        max_queued_requests=2 * (rows + max(waiting)),
        max_queued_tokens=2 * (rows + max(waiting)) * longest,
    )
    engine = Engine.from_params(model_config, params, settings, progress=bars)
    bucket_ms = {cost.size: cost.milliseconds for cost in engine.report.buckets}
    records: list[IterationRecord] = []
    engine.record(records.append)
    rng, names, alive = np.random.default_rng(seed), itertools.count(), 0

    def sink(events: Sequence[TokenEvent]) -> None:
        nonlocal alive
        alive -= sum(event.finish_reason is not None for event in events)

    def top_up(wanted: int) -> None:
        nonlocal alive
        for _ in range(wanted - alive):
            prompt = rng.integers(model_config.vocab_size, size=int(PROMPT.draw(rng, 1)[0]), dtype=np.int32)
            job = Job(arrival=0.0, prompt=prompt, max_tokens=int(OUTPUT.draw(rng, 1)[0]))
            engine.submit(make_request(str(next(names)), job, 0.0), sink)
            alive += 1

    results = []
    for queued in sorted(waiting):
        label = f"{rows} rows, {queued:,} waiting"
        for done in range(WARM_UP + iterations):
            top_up(rows + queued)
            engine.step()
            if done == WARM_UP - 1:
                records.clear()
            if done % 10 == 0:
                bars(label, done, WARM_UP + iterations)
        bars(label, WARM_UP + iterations, WARM_UP + iterations)
        stats = report.iteration_stats(records, bucket_ms)
        results.append(HostTime(rows=rows, waiting=queued, stats=stats))
    engine.stop()
    return results


def run(
    rows: Sequence[int], waiting: Sequence[int], iterations: int, config: EngineConfig, out: Path, console: Console
) -> int:
    """`jaxserve bench host`: prints the table of host times against their targets and writes JSON."""
    with Bars() as bars:
        results = [result for count in rows for result in measure(count, waiting, iterations, config, bars)]
    table = Table(title="host time of an iteration, ms (medians; all: p50 / p95 / p99)", title_justify="left")
    for column in ("rows", "waiting", *report.HOST_PHASES, "all", "target", "", "against none waiting", "device wait"):
        table.add_column(column, justify="right")
    base = {}
    for result in results:
        base.setdefault(result.rows, result.median)
        growth, target = result.median / base[result.rows], TARGETS_MS.get(result.rows)
        table.add_row(
            str(result.rows),
            f"{result.waiting:,}",
            *(f"{result.stats.host_ms[phase].p50:.3f}" for phase in report.HOST_PHASES),
            report.percentiles(result.stats.host_ms["host"], 3),
            "" if target is None else f"{target:.1f}",
            "" if target is None else ("reached" if result.median <= target else "missed"),
            f"{growth:.2f}x" + ("" if growth <= FLAT else " (not flat)"),
            f"{result.stats.wait_ms.p50:.3f}",
        )
    console.print(table)
    report.write_json(
        out / "host.json", {"benchmark": "host", "environment": machine.environment(), "results": results}
    )
    console.print(f"written: {out / 'host.json'}", highlight=False)
    return 0
