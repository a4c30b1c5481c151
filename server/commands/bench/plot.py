"""Plots of runs, drawn without pyplot: no display and no global backend is involved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxserve.simulate.outcome import Outcome


def serving(path: Path, title: str, runs: Mapping[str, Sequence[Outcome]]) -> None:
    """Draws tokens over time and the distributions of latencies; the ending of the path chooses the format."""
    figure = Figure(figsize=(13.8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
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
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
