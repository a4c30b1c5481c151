"""Pictures of a run. They are drawn without pyplot, so no display and no global backend is involved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxserve.simulate.outcome import Outcome
from server.commands.bench.report import Comparison

if TYPE_CHECKING:
    from benchmarks.soak import Sample
    from jaxserve.engine import IterationRecord


def serving(
    path: Path,
    title: str,
    outcomes: Mapping[str, Sequence[Outcome]],
    records: Mapping[str, Sequence[IterationRecord]],
    comparison: Comparison | None = None,
) -> None:
    """Draws runs of one workload, by name: tokens over time, latency distributions, and how full iterations were.

    Args:
      outcomes: of each run.
      records: of each run whose engine could be watched; without any the last panel shows time to first token.
    """
    figure, axes = _figure(3, title if comparison is None else f"{title}: {comparison.measured:.2f}x the throughput")
    for name, served in outcomes.items():
        start = min(outcome.arrival for outcome in served)
        times = np.sort(np.concatenate([np.asarray(outcome.token_times) for outcome in served])) - start
        axes[0].step(times, np.arange(1, len(times) + 1), where="post", label=name)
        latencies = [1000 * outcome.normalised for outcome in served if outcome.error is None and outcome.token_times]
        _cumulative(axes[1], latencies, name)
        if not records:
            firsts = [1000 * outcome.first_token for outcome in served if outcome.token_times]
            _cumulative(axes[2], firsts, name)
    for name, run in records.items():
        began = run[0].finished_at
        axes[2].plot(
            [record.finished_at - began for record in run],
            _smooth([record.num_tokens / record.bucket for record in run]),
            label=name,
            linewidth=1,
        )
    _label(axes[0], "seconds", "tokens generated", "throughput")
    _label(axes[1], "ms/token", "share of requests", "normalised latency")
    axes[1].set_xscale("log")
    if records:
        _label(axes[2], "seconds", "tokens / bucket", "how full the iterations were")
        axes[2].set_ylim(0, 1.05)
    else:
        _label(axes[2], "ms", "share of requests", "time to first token")
        axes[2].set_xscale("log")
    _save(figure, path)


def bars(path: Path, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draws milliseconds as grouped bars: one group a workload, one colour an engine; None leaves a gap."""
    figure, (axis,) = _figure(1, title, width=max(6.0, 1.3 * len(groups)))
    _grouped(axis, groups, series)
    _label(axis, "", "ms", "")
    _save(figure, path)


def loads(
    path: Path, title: str, groups: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float | None]]]
) -> None:
    """Draws figures of loads as grouped bars, a panel a figure: one group a load, one colour an engine. What is wide
    apart (times) is drawn by powers of ten."""
    figure, axes = _figure(len(panels), title)
    for axis, (figure_name, series) in zip(axes, panels.items(), strict=True):
        _grouped(axis, groups, series)
        _label(axis, "", "", figure_name)
        values = [value for each in series.values() for value in each if value]
        if values and max(values) > 30 * min(values):
            axis.set_yscale("log")
    for axis in axes:
        axis.get_legend().remove()  # one is enough, and here it would lie over the bars
    axes[0].set_ylim(top=1.4 * axes[0].get_ylim()[1])
    axes[0].legend(fontsize=8, ncols=2)
    _save(figure, path)


def soak(path: Path, title: str, samples: Sequence[Sample]) -> None:
    """Draws what a server held by the requests that had ended: memory, slots, and requests, threads and files."""
    figure, axes = _figure(3, title)
    ended = [sample.ended / 1000 for sample in samples]
    memory = [sample.resident / 2**20 for sample in samples]
    axes[0].plot(ended, memory, label="resident", linewidth=1)
    axes[0].set_ylim(0, 1.2 * max(memory))
    for name, of in (("in use", "slots_used"), ("hold prefixes", "slots_cached")):
        axes[1].plot(ended, [getattr(sample, of) for sample in samples], label=name, linewidth=0.7)
    for name in ("running", "waiting", "threads", "open_files"):
        axes[2].plot(ended, [getattr(sample, name) for sample in samples], label=name.replace("_", " "), linewidth=0.7)
    for axis, unit, what in zip(
        axes, ("MiB", "slots", ""), ("memory of the server", "slots", "requests, threads, files"), strict=True
    ):
        _label(axis, "thousand requests ended", unit, what)
    _save(figure, path)


def _grouped(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [float("nan") if value is None else value for value in values]
        container = axis.bar(places, heights, width, label=name)
        axis.bar_label(
            container, fmt=lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}", fontsize=6, padding=1
        )
    axis.set_xticks(range(len(groups)), groups, fontsize=8)


def _figure(panels: int, title: str, width: float | None = None) -> tuple[Figure, Sequence[Any]]:
    figure = Figure(figsize=(width or 4.6 * panels, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _label(axis: Any, x: str, y: str, title: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _cumulative(axis: Any, values: Sequence[float], name: str) -> None:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    axis.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post", label=name)


def _smooth(values: Sequence[float], points: int = 200) -> np.ndarray:
    """A moving average that leaves about `points` steps visible."""
    array = np.asarray(values, dtype=np.float64)
    window = max(1, len(array) // points)
    weights = np.convolve(np.ones(len(array)), np.ones(window), mode="same")
    return np.convolve(array, np.ones(window), mode="same") / weights


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
