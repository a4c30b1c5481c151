"""`python -m benchmarks simulator`: the simulator against an engine, on equal arrivals."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, list_flags
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, IterationRecord
from jaxserve.iteration import IterationPlan
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.simulate import workload as traffic
from jaxserve.simulate.outcome import Distribution, Outcome
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import Arrival, HostTimes, StageSeconds
from jaxserve.simulate.workload import Workload
from jaxserve.startup_report import StartupReport
from server.commands.bench import flags, machine, report, shapes
from server.commands.bench.offline import Recorder, benchmark_config, make_engine
from server.commands.console import Progress, progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Serves Poisson arrivals at several loads with an engine in this process, and the same arrivals with the simulator: the
engine's scheduler on a virtual clock, with the bucket costs and the host times of the engine. Throughput and latencies
should agree within 10%. Machines change their pace within minutes, so each load is served in parts, the loads in turn;
each part has its own engine, and its costs are the means of what its start and the next one's measured. Figures are
medians over the parts. Leave the machine alone meanwhile."""

WITHIN = 0.10  # the tolerated difference, as a share of the measured figure
PARTS = 5  # parts of each load, which alternate with those of the other loads
# Figures of a load, measured or simulated, by name.
FIGURES: dict[str, Callable[[report.RunReport, Distribution], float]] = {
    "generated tokens/s": lambda run, _: run.tokens_per_second,
    "latency p50, ms": lambda _, latency: latency.p50,
    "latency p95, ms": lambda _, latency: latency.p95,
    "ms/token p50": lambda run, _: run.normalised_ms.p50 if run.normalised_ms else 0.0,
    "first token p50, ms": lambda run, _: run.first_token_ms.p50 if run.first_token_ms else 0.0,
}
JUDGED = ("generated tokens/s", "latency p50, ms", "latency p95, ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPart:
    """A workload, such as one part of a load, served by its own engine.

    Attributes:
      report: the engine's start-up report, with the costs that it measured.
    """

    workload: Workload
    config: EngineConfig
    report: StartupReport
    max_context: int
    outcomes: list[Outcome]
    records: list[IterationRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedLoad:
    """One load, served and simulated.

    Attributes:
      share: the rate as a share of what the engine serves with everything waiting.
      figures: figure -> (measured, simulated), each the median over the parts.
      parts: the figures of each part.
      iterations: how many the engines and the simulator launched.
      pace: the measured time of iterations divided by their cost, in each part.
    """

    share: float
    rate: float
    figures: dict[str, tuple[float, float]]
    parts: list[dict[str, tuple[float, float]]]
    iterations: tuple[int, int]
    pace: list[float]

    @property
    def holds(self) -> bool:
        """Whether the judged figures agree."""
        return all(abs(ours / theirs - 1) <= WITHIN for theirs, ours in map(self.figures.__getitem__, JUDGED))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    flags.add_model_flags(parser)
    flags.add_workload_flags(parser)
    parser.add_argument(
        "--loads",
        type=list_flags.shares,
        default=[0.3, 0.5, 0.7, 0.9, 1.1],
        metavar="X,...",
        help="rates, as shares of what is served with everything waiting (default: 0.3,0.5,0.7,0.9,1.1)",
    )
    add_engine_flags(parser)
    parser.set_defaults(max_rows=8)


def run(args: argparse.Namespace) -> int:
    """Serves the workload at each load, prints and writes both sides; returns 0."""
    model, config, console = checkpoints.from_flags(args), engine_config(args), tables()
    workload, shares = flags.uniform(args, shapes.config_of(model).vocab_size), [0.5] if args.quick else args.loads
    config = benchmark_config(config, workload)
    with progress_bars() as bars:
        warm = _turn(model, config, workload, bars, "everything at once")
        capacity = report.summarise("", warm.outcomes).requests_per_second
        host = host_of(warm.records)
        turns = []
        for number, part in enumerate(parts_of(workload)):
            for share in shares:
                arriving = traffic.poisson(part, rate=share * capacity, seed=args.seed + number)
                turns.append(_turn(model, config, arriving, bars, f"{share:.0%} of capacity"))
        starts = [*(turn.report for turn in turns), make_engine(model, config, bars).report]
    systems = [system_of(turn, after, host) for turn, after in zip(turns, starts[1:], strict=True)]
    loads = [
        _compare(share, share * capacity, turns[index :: len(shares)], systems[index :: len(shares)])
        for index, share in enumerate(shares)
    ]
    _print(f"{model.name}: {workload.name}, {config.max_rows} rows", loads, starts, host, console)
    result = {"benchmark": "simulator", "environment": machine.environment(), "workload": workload.name}
    result |= {
        "capacity": capacity,
        "buckets": [list(start.buckets) for start in starts],
        "slot_ms": [start.slot_milliseconds for start in starts],
        "host": host._asdict(),
        "loads": loads,
    }
    report.write_json(args.out / "simulator.json", result, console)
    return 0


def _print(
    title: str, loads: Sequence[ValidatedLoad], starts: Sequence[StartupReport], host: HostTimes, console: Console
) -> None:
    """Prints the loads, and the bucket costs over all starts."""
    table = Table(title=f"{title}; measured / simulated, medians of {len(loads[0].parts)} parts", title_justify="left")
    for column in ("load", "requests/s", *FIGURES, "iterations", f"within {WITHIN:.0%}", "times the costs, by parts"):
        table.add_column(column, justify="right")
    for each in loads:
        cells = [f"{theirs:.1f} / {ours:.1f} ({ours / theirs - 1:+.1%})" for theirs, ours in each.figures.values()]
        cells += ["{} / {}".format(*each.iterations), "yes" if each.holds else "no"]
        table.add_row(f"{each.share:.0%}", f"{each.rate:.2f}", *cells, " ".join(f"{pace:.2f}" for pace in each.pace))
    console.print(table)
    costs = Table(title=f"ms by bucket, of {len(starts)} starts", title_justify="left")
    for column in ("bucket", "least", "median", "most"):
        costs.add_column(column, justify="right")
    by_bucket = zip(*(start.buckets for start in starts), strict=True)
    spread = {str(each[0].size): [cost.milliseconds for cost in each] for each in by_bucket}
    spread["us a slot"] = [1e3 * start.slot_milliseconds for start in starts]
    for name, measured in spread.items():
        costs.add_row(name, *(f"{each:.2f}" for each in (min(measured), statistics.median(measured), max(measured))))
    console.print(costs)
    console.print(f"host ms: {1e3 * host.launch:.2f} to launch, {1e3 * host.complete:.2f} after")


def parts_of(workload: Workload) -> list[Workload]:
    """Divides a workload into parts of about equal numbers of jobs, in order."""
    count = min(PARTS, len(workload.jobs))
    ends = [len(workload.jobs) * index // count for index in range(count + 1)]
    return [dataclasses.replace(workload, jobs=workload.jobs[start:end]) for start, end in pairwise(ends)]


def pace_of(outcomes: Sequence[Outcome], records: Sequence[IterationRecord], seconds: StageSeconds) -> float:
    """The measured time of all iterations divided by their cost.

    Only iterations between which some request was alive count: the others waited for an arrival.
    """
    arrivals, ends = (sorted(times) for times in zip(*((o.arrival, o.token_times[-1]) for o in outcomes), strict=True))
    took = cost = 0.0
    for before, record in pairwise(records):
        then = before.finished_at
        if bisect_right(arrivals, then) > bisect_right(ends, then):
            took += record.finished_at - then
            cost += max(seconds(record.plan))
    return took / cost if cost else 1.0


def host_of(records: Sequence[IterationRecord]) -> HostTimes:
    """The median host times of an iteration."""
    launch = statistics.median(record.schedule_s + record.pack_s + record.launch_s for record in records)
    return HostTimes(launch=launch, complete=statistics.median(record.complete_s for record in records))


def system_of(turn: ServedPart, after: StartupReport, host: HostTimes) -> SimulatedEngine:
    """The simulated engine of a part: its settings, bucket costs and host times.

    The scheduler decides by the engine's own table of costs. An iteration takes the mean of this table and the next
    start's, corrected for the slots that it reads beyond those of the measurement. With several stages the tables have
    the time between consecutive iterations, so each stage takes that long.
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

    return SimulatedEngine(
        config=turn.config,
        seconds=seconds,
        costs=turn.report.buckets,
        slots=turn.report.slots,
        groups=CacheGroups(
            block_size=turn.report.block_size,
            max_context=turn.max_context,
            n_rows=turn.config.max_rows,
            most_tokens=turn.report.buckets[-1].size,
        ),
        replicas=turn.report.replicas,
        host=host,
    )


def _turn(model: Path, config: EngineConfig, workload: Workload, bars: Progress, name: str) -> ServedPart:
    engine = make_engine(model, config, bars)
    traffic.fit(workload, engine.max_context)
    records: list[IterationRecord] = []
    with engine:
        engine.record(records.append)
        outcomes = _serve(engine, workload, bars, name)
    return ServedPart(
        workload=workload,
        config=engine.config,
        report=engine.report,
        max_context=engine.max_context,
        outcomes=outcomes,
        records=records,
    )


def _serve(engine: Engine, workload: Workload, bars: Progress, name: str) -> list[Outcome]:
    """Submits every job at its time (an open loop), and waits for the last to end."""
    recorder, started = Recorder(engine), time.monotonic()
    for job in workload.jobs:
        time.sleep(max(0.0, started + job.arrival - time.monotonic()))
        recorder.submit(job, time.monotonic())
    return recorder.wait(bars, name)


def _compare(
    share: float, rate: float, turns: Sequence[ServedPart], systems: Sequence[SimulatedEngine]
) -> ValidatedLoad:
    """Simulates the parts of a load, and sets the figures beside the measured ones."""
    parts, paces, launched = [], [], [0, 0]
    for turn, system in zip(turns, systems, strict=True):
        start = turn.outcomes[0].arrival
        coming = [
            Arrival(outcome.arrival - start, job.prompt, job.max_tokens, job.max_tokens)
            for job, outcome in zip(turn.workload.jobs, turn.outcomes, strict=True)
        ]
        served = system.serve(coming, outcomes := list[Outcome]())
        measured, simulated = _figures(turn.outcomes), _figures(outcomes)
        parts.append({name: (measured[name], simulated[name]) for name in FIGURES})
        paces.append(pace_of(turn.outcomes, turn.records, system.seconds))
        launched[0] += len(turn.records)
        launched[1] += sum(served.sizes.values())
    return ValidatedLoad(
        share=share, rate=rate, figures=middle(parts), parts=parts, iterations=(launched[0], launched[1]), pace=paces
    )


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    run = report.summarise("", outcomes)
    latency = Distribution.of(1e3 * (each.end - each.arrival) for each in outcomes)
    assert latency is not None
    return {name: figure(run, latency) for name, figure in FIGURES.items()}


def middle(parts: Sequence[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """The medians over parts of each figure, measured and simulated."""
    return {
        name: (statistics.median(part[name][0] for part in parts), statistics.median(part[name][1] for part in parts))
        for name in parts[0]
    }
