"""The simulator held to engines: the same arrivals served by one in this process and by its scheduler on a virtual
clock, with the costs that engines measured of their buckets."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.bench import machine, report
from jaxserve.bench.offline import benchmark_config, make_engine, make_request
from jaxserve.bench.progress import Bars
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, IterationRecord
from jaxserve.iteration import IterationPlan
from jaxserve.request import TokenEvent
from jaxserve.simulate.clock import Arrival, Host, StageSeconds
from jaxserve.simulate.system import Served, System
from jaxserve.startup_report import StartupReport
from jaxserve.traffic import load
from jaxserve.traffic.load import Workload
from jaxserve.traffic.outcome import Distribution, Outcome

WITHIN = 0.10  # of the measured figure, where the simulated one is to lie
# Of the measured and the simulated outcomes of a load: name -> figure.
FIGURES: dict[str, Callable[[report.RunReport, Distribution], float]] = {
    "generated tokens/s": lambda run, _: run.tokens_per_second,
    "latency p50, ms": lambda _, latency: latency.p50,
    "latency p95, ms": lambda _, latency: latency.p95,
    "ms/token p50": lambda run, _: run.normalised_ms.p50 if run.normalised_ms else 0.0,
    "first token p50, ms": lambda run, _: run.first_token_ms.p50 if run.first_token_ms else 0.0,
}
JUDGED = ("generated tokens/s", "latency p50, ms", "latency p95, ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A workload served by an engine of its own.

    Attributes:
      report: of the engine's start, with the costs that it measured then.
    """

    workload: Workload
    config: EngineConfig
    report: StartupReport
    max_context: int
    outcomes: list[Outcome]
    records: list[IterationRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A load as it was simulated.

    Attributes:
      figures: figure -> (measured, simulated).
      iterations: launched by the simulator.
    """

    figures: dict[str, tuple[float, float]]
    iterations: int

    @property
    def holds(self) -> bool:
        """Whether the simulated figures that count are near enough."""
        return all(abs(ours / theirs - 1) <= WITHIN for theirs, ours in map(self.figures.__getitem__, JUDGED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load, both ways.

    Attributes:
      share: of the rate that the engine serves with everything waiting.
      iterations: launched by the engine.
      pace: how many times what iterations should cost they took.
      by_costs: as simulated with what they should cost.
      at_pace: with so many times that.
    """

    share: float
    rate: float
    iterations: int
    pace: float
    by_costs: Side
    at_pace: Side


def run(
    model: Path | str,
    config: EngineConfig,
    workload: Workload,
    shares: Sequence[float],
    seed: int,
    out: Path,
    console: Console,
) -> int:
    """`jaxserve bench simulate`: serves the workload at each load, prints and writes both sides; returns 0.

    An engine measures its buckets as it starts, and machines change their pace by more than what is asked of the
    simulator here. So every load has an engine of its own, its costs are the means of what that one and the next have
    measured, and it is simulated a second time at the pace that iterations of the load had by these costs.
    """
    config = benchmark_config(config, workload)
    with Bars() as bars:
        warm = _turn(model, config, workload, bars, "everything at once")
        capacity = report.summarise("", warm.outcomes).requests_per_second
        host = host_of(warm.records)
        turns = []
        for share in shares:
            arriving = load.poisson(workload, rate=share * capacity, seed=seed)
            turns.append(_turn(model, config, arriving, bars, f"{share:.0%} of capacity"))
        last = make_engine(model, config, bars).report
    starts = [warm.report, *(turn.report for turn in turns), last]
    loads = [
        _compare(turn, system_of(turn, after, host), share, share * capacity)
        for turn, after, share in zip(turns, starts[2:], shares, strict=True)
    ]
    _print(f"{model}: {workload.name}, {config.max_rows} rows", loads, starts, host, console)
    result = {"benchmark": "simulate", "environment": machine.environment(), "workload": workload.name}
    result |= {
        "capacity": capacity,
        "buckets": [list(start.buckets) for start in starts],
        "slot_ms": [start.slot_milliseconds for start in starts],
        "host": host._asdict(),
        "loads": loads,
    }
    report.write_json(out / "simulate.json", result)
    console.print(f"written: {out / 'simulate.json'}", highlight=False)
    return 0


def _print(title: str, loads: Sequence[Load], starts: Sequence[StartupReport], host: Host, console: Console) -> None:
    """Args:
    starts: of the engine that was given everything at once, of each load's, and of one after them.
    """
    table = Table(title=f"{title}; measured / simulated", title_justify="left")
    for column in ("load", "requests/s", "times the costs", *FIGURES, "iterations", f"within {WITHIN:.0%}"):
        table.add_column(column, justify="right")
    for each in loads:
        for pace, side in ((1.0, each.by_costs), (each.pace, each.at_pace)):
            cells = [f"{theirs:.1f} / {ours:.1f} ({ours / theirs - 1:+.1%})" for theirs, ours in side.figures.values()]
            iterations, verdict = f"{each.iterations} / {side.iterations}", "yes" if side.holds else "no"
            table.add_row(f"{each.share:.0%}", f"{each.rate:.2f}", f"{pace:.2f}", *cells, iterations, verdict)
    console.print(table)
    costs = Table(title="ms by bucket, as measured before each load", title_justify="left")
    for column in ("bucket", "all at once", *(f"{each.share:.0%}" for each in loads), "at the end"):
        costs.add_column(column, justify="right")
    for measured in zip(*(start.buckets for start in starts), strict=True):
        costs.add_row(str(measured[0].size), *(f"{cost.milliseconds:.2f}" for cost in measured))
    costs.add_row("us a slot", *(f"{1e3 * start.slot_milliseconds:.2f}" for start in starts))
    console.print(costs)
    console.print(f"host ms: {1e3 * host.launch:.2f} to launch, {1e3 * host.complete:.2f} after")


def pace_of(outcomes: Sequence[Outcome], records: Sequence[IterationRecord], seconds: StageSeconds) -> float:
    """How many times what they should have cost iterations took, all together: those that followed each other, as some
    request was alive in between."""
    arrivals, ends = (sorted(times) for times in zip(*((o.arrival, o.token_times[-1]) for o in outcomes), strict=True))
    took = cost = 0.0
    for before, record in pairwise(records):
        then = before.finished_at
        if bisect_right(arrivals, then) > bisect_right(ends, then):
            took += record.finished_at - then
            cost += max(seconds(record.plan))
    return took / cost if cost else 1.0


def host_of(records: Sequence[IterationRecord]) -> Host:
    """What an engine's host adds to an iteration: medians."""
    launch = statistics.median(record.schedule_s + record.pack_s + record.launch_s for record in records)
    return Host(launch=launch, complete=statistics.median(record.complete_s for record in records))


def system_of(turn: Turn, after: StartupReport, host: Host) -> System:
    """The engine of a turn as the simulator sees it: its settings, the costs of its buckets, and its host's times.

    The scheduler decides by the table that the engine has. An iteration takes the mean of what that table and the one
    measured after the turn have for its bucket, and for each slot more or less that it reads than the one measured did,
    what they have of that. With several stages the tables have the time between iterations that follow each other, so
    each stage takes that long.
    """
    stages = turn.config.stages
    costs = {
        one.size: ((one.milliseconds + other.milliseconds) / 2, one.slots_read)
        for one, other in zip(turn.report.buckets, after.buckets, strict=True)
    }
    slot = (turn.report.slot_milliseconds + after.slot_milliseconds) / 2

    def seconds(plan: IterationPlan) -> list[float]:
        milliseconds, slots_read = costs[plan.bucket]
        more = sum(chunk.start for chunk in plan.chunks) - slots_read
        return [max(0.0, milliseconds + slot * more) / 1000] * stages

    return System(
        config=turn.config,
        seconds=seconds,
        costs=turn.report.buckets,
        slots=turn.report.slots,
        block_size=turn.report.block_size,
        max_context=turn.max_context,
        replicas=turn.report.replicas,
        host=host,
    )


def _turn(model: Path | str, config: EngineConfig, workload: Workload, bars: Bars, name: str) -> Turn:
    engine = make_engine(model, config, bars)
    load.fit(workload, engine.max_context)
    records: list[IterationRecord] = []
    with engine:
        engine.record(records.append)
        outcomes = _serve(engine, workload, bars, name)
    return Turn(
        workload=workload,
        config=engine.config,
        report=engine.report,
        max_context=engine.max_context,
        outcomes=outcomes,
        records=records,
    )


def _serve(engine: Engine, workload: Workload, bars: Bars, name: str) -> list[Outcome]:
    """Hands every job in at its time, whether or not earlier ones have ended, and waits for the last."""
    outcomes: dict[str, Outcome] = {}
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(events: Sequence[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            outcomes[event.request_id].token_times.extend([now] * len(event.token_ids))
            if event.finish_reason is not None:
                ended.put(event.request_id)

    requests = [make_request(str(index), job, 0.0) for index, job in enumerate(workload.jobs)]
    started = time.monotonic()
    for job, request in zip(workload.jobs, requests, strict=True):
        if (early := started + job.arrival - time.monotonic()) > 0:
            time.sleep(early)
        now = time.monotonic()
        outcomes[request.request_id] = Outcome(arrival=now, prompt_tokens=len(job.prompt))
        engine.submit(dataclasses.replace(request, arrival=now), sink)
    for done in range(1, len(requests) + 1):
        ended.get()
        bars(name, done, len(requests))
    return list(outcomes.values())


def _compare(turn: Turn, system: System, share: float, rate: float) -> Load:
    start = turn.outcomes[0].arrival
    coming = [
        Arrival(outcome.arrival - start, job.prompt, job.max_tokens, job.max_tokens)
        for job, outcome in zip(turn.workload.jobs, turn.outcomes, strict=True)
    ]
    pace = pace_of(turn.outcomes, turn.records, system.seconds)
    paced = dataclasses.replace(system, seconds=lambda plan: [pace * each for each in system.seconds(plan)])
    return Load(
        share=share,
        rate=rate,
        iterations=len(turn.records),
        pace=pace,
        by_costs=_side(turn.outcomes, system.serve(coming)),
        at_pace=_side(turn.outcomes, paced.serve(coming)),
    )


def _side(measured: Sequence[Outcome], served: Served) -> Side:
    both = []
    for outcomes in (measured, served.outcomes):
        latency = Distribution.of(1e3 * (each.token_times[-1] - each.arrival) for each in outcomes)
        assert latency is not None
        both.append((report.summarise("", outcomes), latency))
    figures = {name: (figure(*both[0]), figure(*both[1])) for name, figure in FIGURES.items()}
    return Side(figures=figures, iterations=sum(served.sizes.values()))
