"""`python -m benchmarks host`: the host's work of an iteration, on a tiny model."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from benchmarks import list_flags
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, IterationRecord
from jaxserve.request import TokenEvent
from jaxserve.simulate.workload import DrawnPrompt, Job, Range
from server.commands.bench import flags, machine, report, shapes
from server.commands.bench.offline import make_request
from server.commands.console import Progress, progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Measures the host's work of an iteration (schedule, pack, launch, complete) with few and with very many requests
waiting."""

PROMPT, OUTPUT = Range(low=8, high=32), Range(low=32, high=96)
WARM_UP = 50  # iterations that are not counted
TARGETS_MS = {8: 0.6, 256: 2.5}  # by rows
FLAT = 1.25  # the growth with requests waiting above which the table reports it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Host work of an iteration at one load; `stats.host_ms` has it by phase."""

    rows: int
    waiting: int
    stats: report.IterationSummary

    @property
    def median(self) -> float:
        return self.stats.host_ms["host"].p50


class BusyEngine:
    """An engine with all rows busy: a new request replaces each one that ends.

    Args:
      waiting: the queue lengths that `run` will be called with.
    """

    def __init__(self, rows: int, waiting: Sequence[int], config: EngineConfig, bars: Progress, seed: int = 0) -> None:
        self._model, params = shapes.random_params("tiny", "float32")
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
        self._engine = Engine.from_params(self._model, params, settings, progress=bars)
        self._records: list[IterationRecord] = []
        self._engine.record(self._records.append)
        self._rows, self._bars = rows, bars
        self._rng, self._names, self._alive = np.random.default_rng(seed), itertools.count(), 0

    def run(self, waiting: int, iterations: int) -> HostTime:
        """Runs iterations with `waiting` requests in the queue, or more from earlier calls."""
        label = f"{self._rows} rows, {waiting:,} waiting"
        for done in range(WARM_UP + iterations):
            self._top_up(self._rows + waiting)
            self._engine.step()
            if done == WARM_UP - 1:
                self._records.clear()
            if done % 10 == 0:
                self._bars(label, done, WARM_UP + iterations)
        self._bars(label, WARM_UP + iterations, WARM_UP + iterations)
        bucket_ms = {cost.size: cost.milliseconds for cost in self._engine.report.buckets}
        return HostTime(rows=self._rows, waiting=waiting, stats=report.iteration_summary(self._records, bucket_ms))

    def stop(self) -> None:
        self._engine.stop()

    def _sink(self, events: Sequence[TokenEvent]) -> None:
        self._alive -= sum(event.finish_reason is not None for event in events)

    def _top_up(self, wanted: int) -> None:
        for _ in range(wanted - self._alive):
            length = int(PROMPT.draw(self._rng, 1)[0])
            prompt = DrawnPrompt(length, self._model.vocab_size, 0, int(self._rng.integers(1 << 62)))
            job = Job(arrival=0.0, prompt=prompt, max_tokens=int(OUTPUT.draw(self._rng, 1)[0]))
            self._engine.submit(make_request(str(next(self._names)), job, 0.0), self._sink)
            self._alive += 1


def measure(
    rows: int, waiting: Sequence[int], iterations: int, config: EngineConfig, bars: Progress, seed: int = 0
) -> list[HostTime]:
    """Measures one busy engine at each queue length of `waiting`, in ascending order."""
    load = BusyEngine(rows, waiting, config, bars, seed)
    results = [load.run(queued, iterations) for queued in sorted(waiting)]
    load.stop()
    return results


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    parser.add_argument(
        "--rows", type=list_flags.integers, default=[8, 256], metavar="N,...", help="batch sizes (default: 8,256)"
    )
    parser.add_argument(
        "--waiting",
        type=list_flags.integers,
        default=[0, 1_000, 100_000],
        metavar="N,...",
        help="requests in the queue (default: 0,1000,100000)",
    )
    parser.add_argument("--iterations", type=flags.positive, default=300, metavar="N", help="(default: %(default)s)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints host times against their targets and writes JSON; returns 0."""
    rows, waiting, iterations = args.rows, args.waiting, args.iterations
    if args.quick:
        rows, waiting, iterations = [4], [0, 20], 20
    config, console = engine_config(args), tables()
    with progress_bars() as bars:
        results = [result for count in rows for result in measure(count, waiting, iterations, config, bars)]
    table = Table(title="host time of an iteration, ms (medians; all: p50 / p95 / p99)", title_justify="left")
    for column in ("rows", "waiting", *report.HOST_PHASES, "all", "target", "", "against first", "device wait"):
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
    result = {"benchmark": "host", "environment": machine.environment(), "results": results}
    report.write_json(args.out / "host.json", result, console)
    return 0
