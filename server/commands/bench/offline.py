"""`jaxserve bench offline`: serves all requests at once with an engine in this process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import queue
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, IterationRecord
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Job, Workload
from jaxserve.startup_report import StartupReport
from jaxserve.stats import Load
from server.commands.bench import flags, machine, report, shapes
from server.commands.console import Progress, progress_bars, tables
from server.commands.flags import add_engine_flags, engine_config

HELP = """\
Serves all requests at once with an engine in this process, and reports throughput, latencies, padding and the
host's work. By default the workload and shape of Orca's evaluation, scaled to a CPU:

  jaxserve bench offline --compare-schedulers            request-level against iteration-level batching
  jaxserve bench offline --model DIR --requests 50       on your own checkpoint"""


class Run(NamedTuple):
    """One workload served once, with its requests' outcomes and what the engine counted."""

    config: EngineConfig
    startup: StartupReport
    outcomes: list[Outcome]
    records: list[IterationRecord]
    load: Load


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_output_flags(parser)
    flags.add_model_flags(parser)
    flags.add_workload_flags(parser).add_argument(
        "--compare-schedulers", action="store_true", help="serve it twice, by iteration and by request-level batching"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write when each stage ran which iteration, for ui.perfetto.dev"
    )
    add_engine_flags(parser)
    parser.set_defaults(max_rows=8)


def run(args: argparse.Namespace) -> int:
    """Serves the workload once for each scheduler, and prints, plots and writes the result.

    Returns:
      The exit code: 1 when a request failed.
    """
    timeline, console = args.timeline, tables()
    if timeline is not None and (timeline.is_dir() or not timeline.parent.is_dir()):
        raise ValueError(f"--timeline {timeline} is no file in a folder that is there")
    config, model = engine_config(args), flags.model(args)
    workload = flags.uniform(args, shapes.config_of(model).vocab_size)
    config = benchmark_config(config, workload)
    runs: dict[str, Run] = {}
    with progress_bars() as progress:
        for name in ("iteration", "request") if args.compare_schedulers else (config.scheduler,):
            engine = make_engine(model, dataclasses.replace(config, scheduler=name), progress)
            load.fit(workload, engine.max_context)
            with engine.timeline() if timeline else contextlib.nullcontext() as seen:
                runs[name] = serve_all(engine, workload, name, progress)
            if timeline and seen:
                seen.write(timeline)
            del engine  # its memory, before the next one takes as much
            gc.collect()
    bucket_ms = mean_costs([{cost.size: cost.milliseconds for cost in run.startup.buckets} for run in runs.values()])
    reports = [
        report.summarise(
            name,
            run.outcomes,
            iterations=report.iteration_summary(run.records, bucket_ms),
            extra={"preemptions": run.load.preemptions, "compiled after ready": run.load.compiled_after_ready},
        )
        for name, run in runs.items()
    ]
    title = f"{model}: {workload.name}, {config.max_rows} rows"
    notes = [*workload.notes, f"peak memory of this process: {(machine.peak_rss() or 0) / 2**20:.0f} MiB"]
    if "request" in runs:
        notes.append(report.REQUEST_NOTE)
    report.print_runs(console, title, reports, notes)
    comparison = None
    if len(reports) == 2:
        comparison = report.compare(*reports)
        report.print_comparison(console, comparison)
        title += f": {comparison.measured:.2f}x the throughput"
    report.plot(args.out / "offline.png", title, {name: run.outcomes for name, run in runs.items()}, console)
    result = {
        "benchmark": "offline",
        "workload": workload.name,
        "notes": notes,
        "environment": machine.environment(),
        "engines": [{"config": run.config, "startup": run.startup} for run in runs.values()],
        "bucket_ms": bucket_ms,
        "runs": reports,
        "comparison": comparison,
    }
    report.write_json(args.out / "offline.json", result, console)
    return 1 if any(r.failed for r in reports) else 0


def make_engine(model: Path | str, config: EngineConfig, progress: Progress) -> Engine:
    """An engine on a checkpoint directory (a path) or on random weights of a shape (its name)."""
    if isinstance(model, Path):
        return Engine.from_checkpoint(model, config, progress=progress)
    progress(f"drawing weights ({model})", 0, 1)
    model_config, params = shapes.random_params(model, "float32" if config.dtype == "auto" else config.dtype)
    progress(f"drawing weights ({model})", 1, 1)
    return Engine.from_params(model_config, params, config, progress=progress)


def benchmark_config(config: EngineConfig, workload: Workload) -> EngineConfig:
    """The configuration with a queue for the whole workload and without prompt scoring."""
    return dataclasses.replace(
        config,
        scoring=False,
        max_queued_requests=max(config.max_queued_requests, len(workload.jobs)),
        max_queued_tokens=max(config.max_queued_tokens, workload.prompt_tokens),
    )


class Recorder:
    """Submits jobs to an engine, and records the times of their tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outcomes: dict[str, Outcome] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit(self, job: Job, arrival: float) -> None:
        """Submits a job that arrived at this monotonic time."""
        request = make_request(str(len(self._outcomes)), job, arrival)
        self._outcomes[request.request_id] = Outcome(arrival=arrival, prompt_tokens=len(job.prompt))
        self._engine.submit(request, self._sink)

    def wait(self, progress: Progress, name: str) -> list[Outcome]:
        """Waits until every job has ended; returns their outcomes in the order of submission."""
        for done in range(1, len(self._outcomes) + 1):
            self._ended.get()
            progress(name, done, len(self._outcomes))
        return list(self._outcomes.values())

    def _sink(self, events: Sequence[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            outcome = self._outcomes[event.request_id]
            outcome.token_times.extend([now] * len(event.token_ids))
            if event.finish_reason is not None:
                if event.finish_reason in (FinishReason.ABORTED, FinishReason.ERROR):
                    outcome.error = event.error or event.finish_reason.value
                self._ended.put(event.request_id)


def serve_all(engine: Engine, workload: Workload, name: str, progress: Progress) -> Run:
    """Starts the engine, serves a workload that arrives all at once, and stops the engine.

    All requests are submitted before the engine starts, so that its first batch can choose among them.
    """
    records: list[IterationRecord] = []
    engine.record(records.append)
    recorder, started = Recorder(engine), time.monotonic()
    for job in workload.jobs:
        recorder.submit(job, started)
    with engine:
        outcomes = recorder.wait(progress, f"serving ({name})")
    return Run(engine.config, engine.report, outcomes, records, engine.load())


def mean_costs(tables: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean cost of each bucket over engines, so that schedules are compared by equal costs."""
    return {
        size: statistics.fmean(table[size] for table in tables if size in table)
        for size in sorted({size for table in tables for size in table})
    }


def make_request(request_id: str, job: Job, arrival: float) -> Request:
    """A greedy request that generates exactly as many tokens as its job says."""
    return Request(
        request_id=request_id,
        prompt=tuple(job.prompt.tolist()),
        sampling=SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True),
        arrival=arrival,
    )
