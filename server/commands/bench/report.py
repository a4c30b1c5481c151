"""Results of a benchmark: statistics of requests and iterations, as tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.planning import drawing
from jaxserve.simulate.outcome import Distribution, Outcome

if TYPE_CHECKING:
    from jaxserve.engine import IterationRecord

SHARE_TARGET = 0.90  # of the throughput ratio that iteration counts and bucket costs allow
REQUEST_NOTE = "request: tokens are returned when the whole batch has ended, so no time passes between them"
HOST_PHASES = ("schedule", "pack", "launch", "complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """Statistics of the engine's records of a run.

    Attributes:
      buckets: iterations by bucket.
      cost_seconds: the device time of these iterations by the measured bucket costs.
      waste_waiting / waste_drain: share of that device time spent on padding while requests waited / while none did;
        None where there was no such iteration.
      host_ms: milliseconds of an iteration's host work by phase, and their sum as `host`.
      wait_ms: milliseconds of an iteration in which the host waits for the device.
    """

    iterations: int
    buckets: dict[int, int]
    cost_seconds: float
    waste_waiting: float | None
    waste_drain: float | None
    host_ms: dict[str, Distribution]
    wait_ms: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One workload served once; rates count generated tokens unless named otherwise."""

    name: str
    requests: int
    failed: int
    errors: tuple[str, ...]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    first_token_ms: Distribution | None
    between_tokens_ms: Distribution | None
    normalised_ms: Distribution | None
    iterations: IterationSummary | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Iteration-level against request-level scheduling of one workload.

    Attributes:
      measured: ratio of their throughputs.
      allowed: ratio of the device times that their iterations and the measured bucket costs give.
      share: measured / allowed.
    """

    measured: float
    allowed: float
    share: float


def summarise(
    name: str,
    outcomes: Sequence[Outcome],
    *,
    iterations: IterationSummary | None = None,
    extra: Mapping[str, Any] | None = None,
) -> RunReport:
    """Summarises outcomes; a run lasts from the first arrival to the last token."""
    served = [outcome for outcome in outcomes if outcome.error is None and outcome.token_times]
    output_tokens = sum(len(outcome.token_times) for outcome in served)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in served)
    seconds = 0.0
    if served:
        seconds = max(o.token_times[-1] for o in served) - min(o.arrival for o in outcomes)
    rate = 1.0 / seconds if seconds > 0 else 0.0
    return RunReport(
        name=name,
        requests=len(outcomes),
        failed=len(outcomes) - len(served),
        errors=tuple(sorted({outcome.error for outcome in outcomes if outcome.error is not None})),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_second=output_tokens * rate,
        total_tokens_per_second=(prompt_tokens + output_tokens) * rate,
        requests_per_second=len(served) * rate,
        first_token_ms=Distribution.of(1000 * outcome.first_token for outcome in served),
        between_tokens_ms=Distribution.of(1000 * gap for outcome in served for gap in np.diff(outcome.token_times)),
        normalised_ms=Distribution.of(1000 * outcome.normalised for outcome in served),
        iterations=iterations,
        extra=dict(extra or {}),
    )


def iteration_summary(records: Sequence[IterationRecord], cost_ms: Mapping[int, float]) -> IterationSummary:
    """Summarises an engine's records, weighted by the measured milliseconds of each bucket."""
    if not records:
        raise ValueError("no iteration was recorded")

    def milliseconds(*phases: str) -> Distribution:
        found = Distribution.of(1000 * sum(getattr(record, f"{phase}_s") for phase in phases) for record in records)
        assert found is not None
        return found

    return IterationSummary(
        iterations=len(records),
        buckets=dict(sorted(Counter(record.bucket for record in records).items())),
        cost_seconds=sum(cost_ms[record.bucket] for record in records) / 1000,
        waste_waiting=padding_waste([record for record in records if record.waiting], cost_ms),
        waste_drain=padding_waste([record for record in records if not record.waiting], cost_ms),
        host_ms={phase: milliseconds(phase) for phase in HOST_PHASES} | {"host": milliseconds(*HOST_PHASES)},
        wait_ms=milliseconds("wait"),
    )


def padding_waste(records: Sequence[IterationRecord], cost_ms: Mapping[int, float]) -> float | None:
    """The share of the device's time spent on padding, weighted by the cost of buckets."""
    total = sum(cost_ms[record.bucket] for record in records)
    if not total:
        return None
    return sum(cost_ms[r.bucket] * (r.bucket - r.num_tokens) / r.bucket for r in records) / total


def compare(iteration: RunReport, request: RunReport) -> Comparison:
    """Compares two schedules of one workload, which generated the same number of tokens."""
    assert iteration.iterations is not None
    assert request.iterations is not None
    measured = iteration.tokens_per_second / request.tokens_per_second if request.tokens_per_second else float("nan")
    allowed = request.iterations.cost_seconds / iteration.iterations.cost_seconds
    return Comparison(measured=measured, allowed=allowed, share=measured / allowed)


def write_json(path: Path, result: Any, console: Console | None = None) -> None:
    """Writes dataclasses, mappings and lists of them as JSON, and prints the path to a console."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return value.item() if isinstance(value, np.generic) else str(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, default=plain, indent=1) + "\n", encoding="utf-8")
    if console is not None:
        console.print(f"written: {path}", highlight=False)


def plot(path: Path, title: str, runs: Mapping[str, Sequence[Outcome]], console: Console) -> None:
    """Plots tokens over time and latencies, with matplotlib only; the suffix is the format."""
    if not drawing.is_installed():
        console.print(drawing.MISSING, markup=False)
        return
    figure = drawing.figure(13.8, 3.6)
    figure.suptitle(title, fontsize=10)
    tokens, normalised, firsts = figure.subplots(1, 3)
    for name, outcomes in runs.items():
        start = min(outcome.arrival for outcome in outcomes)
        served = [outcome for outcome in outcomes if outcome.error is None and outcome.token_times]
        for axis, values, whole in (
            (tokens, [time - start for outcome in outcomes for time in outcome.token_times], 1),
            (normalised, [1000 * outcome.normalised for outcome in served], max(1, len(served))),
            (firsts, [1000 * outcome.first_token for outcome in served], max(1, len(served))),
        ):
            axis.step(np.sort(values), np.arange(1, len(values) + 1) / whole, where="post", label=name)
    tokens.set(xlabel="seconds", ylabel="tokens generated", title="throughput")
    normalised.set(xlabel="ms/token", ylabel="share of requests", title="normalised latency", xscale="log")
    firsts.set(xlabel="ms", ylabel="share of requests", title="time to first token", xscale="log")
    for axis in (tokens, normalised, firsts):
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left" if axis is tokens else "lower right", fontsize=8)
    drawing.save(figure, path)


def print_runs(console: Console, title: str, runs: Sequence[RunReport], notes: Sequence[str] = ()) -> None:
    table = Table(title=title, title_justify="left", caption_justify="left", caption="\n".join(notes) or None)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(label: str, cell: Callable[[RunReport], str | None]) -> None:
        cells = [cell(run) for run in runs]
        if any(value is not None for value in cells):
            table.add_row(label, *("-" if value is None else value for value in cells))

    def iterations(label: str, cell: Callable[[IterationSummary], str | None]) -> None:
        row(label, lambda run: None if run.iterations is None else cell(run.iterations))

    row("requests (failed)", lambda run: f"{run.requests} ({run.failed})")
    row("seconds", lambda run: f"{run.seconds:.2f}")
    row("generated tokens/s", lambda run: f"{run.tokens_per_second:.1f}")
    row("prompt + generated tokens/s", lambda run: f"{run.total_tokens_per_second:.1f}")
    row("requests/s", lambda run: f"{run.requests_per_second:.2f}")
    row("time to first token, ms (p50 / p95 / p99)", lambda run: percentiles(run.first_token_ms))
    row("time between tokens, ms", lambda run: percentiles(run.between_tokens_ms))
    row("normalised latency, ms/token", lambda run: percentiles(run.normalised_ms))
    iterations("iterations", lambda stats: str(stats.iterations))
    iterations("device seconds by bucket costs", lambda stats: f"{stats.cost_seconds:.2f}")
    iterations("padding waste while work waits", lambda stats: percent(stats.waste_waiting))
    iterations("padding waste in the drain", lambda stats: percent(stats.waste_drain))
    for phase in (*HOST_PHASES, "host"):
        label = "host in all" if phase == "host" else phase
        iterations(f"{label}, ms an iteration", lambda stats, phase=phase: percentiles(stats.host_ms[phase], 3))
    iterations("wait for the device, ms", lambda stats: percentiles(stats.wait_ms))
    for key in dict.fromkeys(key for run in runs for key in run.extra):
        row(key, lambda run, key=key: str(run.extra[key]) if key in run.extra else None)
    console.print(table)
    for run in runs:
        for error in run.errors:
            console.print(f"{run.name}: {error}", style="red", markup=False)


def print_comparison(console: Console, comparison: Comparison) -> None:
    verdict = "reached" if comparison.share >= SHARE_TARGET else "missed"
    console.print(f"throughput, iteration / request-level: {comparison.measured:.2f}x")
    console.print(f"what iteration counts and bucket costs allow: {comparison.allowed:.2f}x")
    console.print(f"share reached: {percent(comparison.share)} (target {percent(SHARE_TARGET)}: {verdict})")


def percentiles(distribution: Distribution | None, digits: int = 1) -> str | None:
    """p50 / p95 / p99 as text."""
    if distribution is None:
        return None
    return " / ".join(f"{value:.{digits}f}" for value in (distribution.p50, distribution.p95, distribution.p99))


def percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f}%"
