"""The simulator held to an engine: the same arrivals served by one in this process and by its scheduler on a virtual
clock, with the costs that the engine measured of its buckets."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import time
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
from jaxserve.simulate.clock import Arrival, Host
from jaxserve.simulate.system import System
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
class Load:
    """One load, both ways: figure -> (measured, simulated).

    Attributes:
      share: of the rate that the engine serves with everything waiting.
      iterations: (launched by the engine, by the simulator).
    """

    share: float
    rate: float
    figures: dict[str, tuple[float, float]]
    iterations: tuple[int, int]

    @property
    def holds(self) -> bool:
        """Whether the simulated figures that count are near enough."""
        return all(abs(ours / theirs - 1) <= WITHIN for theirs, ours in map(self.figures.__getitem__, JUDGED))


def run(
    model: Path | str,
    config: EngineConfig,
    workload: Workload,
    shares: Sequence[float],
    seed: int,
    out: Path,
    console: Console,
) -> int:
    """`jaxserve bench simulate`: serves the workload at each load, prints and writes both sides; returns 0."""
    # Each load serves the same prompts: none is to find what an earlier one has computed.
    config = dataclasses.replace(benchmark_config(config, workload), prefix_cache=False)
    with Bars() as bars:
        engine = make_engine(model, config, bars)
        load.fit(workload, engine.max_context)
        with engine:
            records: list[IterationRecord] = []
            engine.record(records.append)
            warm = _serve(engine, workload, bars, "everything at once")
            capacity = report.summarise("", warm).requests_per_second
            system, in_service = system_of(engine, records), bucket_times(records)
            loads = []
            for share in shares:
                arriving = load.poisson(workload, rate=share * capacity, seed=seed)
                records.clear()
                measured = _serve(engine, arriving, bars, f"{share:.0%} of capacity")
                loads.append(_compare(system, arriving, measured, share, share * capacity, len(records)))
    table = Table(title=f"{model}: {workload.name}, {config.max_rows} rows; measured / simulated", title_justify="left")
    for column in ("load", "requests/s", *FIGURES, "iterations", f"within {WITHIN:.0%}"):
        table.add_column(column, justify="right")
    for each in loads:
        cells = [f"{theirs:.1f} / {ours:.1f} ({ours / theirs - 1:+.1%})" for theirs, ours in each.figures.values()]
        verdict = "yes" if each.holds else "no"
        iterations = f"{each.iterations[0]} / {each.iterations[1]}"
        table.add_row(f"{each.share:.0%}", f"{each.rate:.2f}", *cells, iterations, verdict)
    console.print(table)
    host = system.host or Host()
    costs = ", ".join(
        f"{cost.size}: {cost.milliseconds:.2f} / {in_service.get(cost.size, float('nan')):.2f}" for cost in system.costs
    )
    console.print(f"ms by bucket, measured at the start / median in service: {costs}")
    console.print(f"{1e3 * engine.report.slot_milliseconds:.3f} us for each slot that an iteration reads")
    console.print(f"host ms: {1e3 * host.launch:.2f} to launch, {1e3 * host.complete:.2f} after")
    result = {"benchmark": "simulate", "environment": machine.environment(), "workload": workload.name}
    result |= {
        "capacity": capacity,
        "buckets": list(system.costs),
        "slot_ms": engine.report.slot_milliseconds,
        "bucket_ms_in_service": in_service,
        "host": host._asdict(),
        "loads": loads,
    }
    report.write_json(out / "simulate.json", result)
    console.print(f"written: {out / 'simulate.json'}", highlight=False)
    return 0


def bucket_times(records: Sequence[IterationRecord]) -> dict[int, float]:
    """Median milliseconds between iterations that followed each other, by the later one's bucket: what the table of
    costs should say. Of a run in which there was always more to do."""
    spans: dict[int, list[float]] = {}
    for before, record in pairwise(records):
        spans.setdefault(record.bucket, []).append(1e3 * (record.finished_at - before.finished_at))
    return {bucket: statistics.median(each) for bucket, each in sorted(spans.items())}


def system_of(engine: Engine, records: Sequence[IterationRecord]) -> System:
    """An engine as the simulator sees it: its settings, its table of bucket costs, and its host's median times.

    A bucket costs what was measured, and for each slot more or less that an iteration reads than the one measured did,
    what the engine measured of that. With several stages the table has the time between iterations that follow each
    other, so each stage takes that long.
    """
    costs = {cost.size: cost for cost in engine.report.buckets}
    stages = engine.config.stages

    def seconds(plan: IterationPlan) -> list[float]:
        cost = costs[plan.bucket]
        more = sum(chunk.start for chunk in plan.chunks) - cost.slots_read
        return [max(0.0, cost.milliseconds + engine.report.slot_milliseconds * more) / 1000] * stages

    launch = statistics.median(record.schedule_s + record.pack_s + record.launch_s for record in records)
    return System(
        config=engine.config,
        seconds=seconds,
        costs=engine.report.buckets,
        slots=engine.report.slots,
        block_size=engine.report.block_size,
        max_context=engine.max_context,
        replicas=engine.report.replicas,
        host=Host(launch=launch, complete=statistics.median(record.complete_s for record in records)),
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


def _compare(
    system: System, workload: Workload, measured: Sequence[Outcome], share: float, rate: float, iterations: int
) -> Load:
    start = measured[0].arrival
    coming = [
        Arrival(outcome.arrival - start, job.prompt, job.max_tokens, job.max_tokens)
        for job, outcome in zip(workload.jobs, measured, strict=True)
    ]
    served = system.serve(coming)
    sides = []
    for outcomes in (measured, served.outcomes):
        latency = Distribution.of(1e3 * (each.token_times[-1] - each.arrival) for each in outcomes)
        assert latency is not None
        sides.append((report.summarise("", outcomes), latency))
    figures = {name: (figure(*sides[0]), figure(*sides[1])) for name, figure in FIGURES.items()}
    return Load(share=share, rate=rate, figures=figures, iterations=(iterations, sum(served.sizes.values())))
