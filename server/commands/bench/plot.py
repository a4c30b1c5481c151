"""Plots of a run, drawn without pyplot: no display and no global backend is involved."""

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
    from jaxserve.engine import IterationRecord


def serving(
    path: Path,
    title: str,
    outcomes: Mapping[str, Sequence[Outcome]],
    records: Mapping[str, Sequence[IterationRecord]],
    comparison: Comparison | None = None,
) -> None:
    """Draws runs of one workload: tokens over time, latencies, and how full iterations were.

    Args:
      outcomes: outcomes by run.
      records: iterations by run; without any the last panel shows time to first token.
    """
    figure, axes = new_figure(3, title if comparison is None else f"{title}: {comparison.measured:.2f}x the throughput")
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
    label_axis(axes[0], "seconds", "tokens generated", "throughput")
    label_axis(axes[1], "ms/token", "share of requests", "normalised latency")
    axes[1].set_xscale("log")
    if records:
        label_axis(axes[2], "seconds", "tokens / bucket", "how full the iterations were")
        axes[2].set_ylim(0, 1.05)
    else:
        label_axis(axes[2], "ms", "share of requests", "time to first token")
        axes[2].set_xscale("log")
    save(figure, path)


def new_figure(panels: int, title: str, width: float | None = None) -> tuple[Figure, Sequence[Any]]:
    """A figure with panels beside each other, and their axes; width in inches."""
    figure = Figure(figsize=(width or 4.6 * panels, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def label_axis(axis: Any, x: str, y: str, title: str) -> None:
    """Labels the axes, and adds a grid and a legend."""
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


def save(figure: Figure, path: Path) -> None:
    """Writes the figure; the ending of the path chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
