"""The tables of `python -m benchmarks peers`, made of whatever its ledger holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import METRICS, OURS, Metric, Verdict, judge_load, judge_step
from benchmarks.results import Ledger
from server.commands.bench import plot
from server.commands.bench.step import Case


def print_all(
    console: Console, out: Path, ledger: Ledger, cases: Sequence[Case], loads: Sequence[float]
) -> list[dict[str, Any]]:
    """Prints the tables of every model and dtype, draws them, and returns the verdicts."""
    verdicts: list[dict[str, Any]] = []
    shapes = list(dict.fromkeys(turn.shape for turn in ledger.answers))
    for shape in shapes:
        series: dict[str, list[float | None]] = {}
        for dtype in dict.fromkeys(turn.dtype for turn in ledger.answers if turn.shape == shape):
            engines = _engines(ledger, shape, dtype)
            if cases:
                verdicts += _print_steps(console, ledger, shape, dtype, engines, cases)
                series |= {f"{name} {dtype}": _medians(ledger, shape, dtype, name, cases) for name in engines}
            for share in loads:
                verdicts += _print_load(console, ledger, shape, dtype, engines, share, share == max(loads))
            _draw_loads(console, out, ledger, shape, dtype, engines, loads)
        if any(value is not None for values in series.values() for value in values):
            path = out / f"peers-{shape}.png"
            draw_steps(path, f"{shape}: ms a step", [case.name for case in cases], series)
            console.print(f"written: {path}", highlight=False)
    for turn, answer in ledger.answers.items():
        if turn.work == "check" and turn.engine != OURS:
            within = "not told" if answer["largest"] is None else f"within {answer['largest']:.4f}"
            console.print(
                f"outputs of {turn.engine} and ours ({turn.shape}, {turn.dtype}): logprobs {within} (tolerance "
                f"{answer['tolerance']:g}), {answer['mismatches']} greedy tokens differ",
                highlight=False,
            )
    for version in dict.fromkeys(answer.get("version") for answer in ledger.answers.values()):
        if version is not None:
            console.print(version, highlight=False)
    for note in ledger.notes:
        console.print(note, markup=False, highlight=False)
    for problem in ledger.problems:
        console.print(problem, style="red", markup=False, highlight=False)
    return verdicts


def _engines(ledger: Ledger, shape: str, dtype: str) -> list[str]:
    found = dict.fromkeys(turn.engine for turn in ledger.answers if (turn.shape, turn.dtype) == (shape, dtype))
    return sorted(found, key=lambda name: name != OURS)


def _table(title: str, engines: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in (*engines, "ratio", "against", "target", ""):
        table.add_column(name, justify="right")
    return table


def _judged(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["-", "-", "-", ""]
    if verdict.target is None:
        return [f"{verdict.ratio:.2f}x", verdict.against, "-", ""]
    sign = "<=" if verdict.at_most else ">="
    told = "reached" if verdict.reached else "missed"
    return [f"{verdict.ratio:.2f}x", verdict.against, f"{sign} {verdict.target:g}x", told]


def _entry(verdict: Verdict, **where: Any) -> dict[str, Any]:
    found = {name: getattr(verdict, name) for name in ("ratio", "against", "target", "reached")}
    return {**where, **found}


def _medians(ledger: Ledger, shape: str, dtype: str, engine: str, cases: Sequence[Case]) -> list[float | None]:
    """The median milliseconds of each case over an engine's rounds."""
    rounds = [answer["milliseconds"] for answer in ledger.rounds(shape, dtype, engine, "steps")]
    return [_median(each.get(case.name) for each in rounds) for case in cases]


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _print_steps(
    console: Console, ledger: Ledger, shape: str, dtype: str, engines: Sequence[str], cases: Sequence[Case]
) -> list[dict[str, Any]]:
    table = _table(f"{shape}, {dtype}: ms a step (medians); ratio: how many times as fast as the best peer", engines)
    verdicts = []
    medians = {name: _medians(ledger, shape, dtype, name, cases) for name in engines}
    for index, case in enumerate(cases):
        values = {name: medians[name][index] for name in engines}
        verdict = judge_step(case, values)
        table.add_row(case.name, *_cells(values, lambda value: f"{value:.1f}"), *_judged(verdict))
        if verdict is not None:
            verdicts.append(_entry(verdict, shape=shape, dtype=dtype, case=case.name))
    rounds = {name: ledger.rounds(shape, dtype, name, "steps") for name in engines}
    peaks = {name: max((answer["peak_rss"] or 0 for answer in rounds[name]), default=None) for name in engines}
    allowed = max((answer["allowed_rss"] for answer in rounds.get(OURS, ())), default=None)
    judged = ["", "", "-", ""]
    if allowed is not None and peaks[OURS] is not None:
        judged = ["", "", f"{allowed / 2**20:.0f}", "reached" if peaks[OURS] <= allowed else "missed"]
    memory = _cells(peaks, lambda value: f"{value / 2**20:.0f}")
    table.add_row("peak memory, MiB (ours: weights + pool + 600 MB)", *memory, *judged)
    console.print(table)
    return verdicts


def _print_load(
    console: Console, ledger: Ledger, shape: str, dtype: str, engines: Sequence[str], share: float, highest: bool
) -> list[dict[str, Any]]:
    rounds = {name: ledger.rounds(shape, dtype, name, f"load {share:g}") for name in engines}
    capacity = ledger.rounds(shape, dtype, OURS, "capacity")
    if not capacity or not any(rounds.values()):
        return []
    rate, target = capacity[0]["requests_per_second"], ledger.about["config"]["target_tpot"]
    objective = f" (and no objective; here it is {1e3 * target:g} ms a token)" if target else ""
    table = _table(
        f"{shape}, {dtype}: {ledger.about['workload']} at {share * rate:.2f}/s, {share:.0%} of our {rate:.2f}/s with "
        f"all waiting{objective}; ratio: ours / best peer's of each line",
        engines,
    )
    verdicts = []
    for metric in METRICS:
        values = {name: _median(metric.of(answer) for answer in rounds[name]) for name in engines}
        verdict = judge_load(metric, dtype, highest, values)
        table.add_row(metric.label, *_cells(values, lambda value: f"{value:.1f}"), *_judged(verdict))
        if verdict is not None:
            verdicts.append(_entry(verdict, shape=shape, dtype=dtype, load=share, metric=metric.label))
    same = {name: _median(answer.get("same") for answer in rounds[name]) for name in engines}
    table.add_row("answers that begin as ours", *_cells(same, lambda value: f"{value:.0%}"), "", "", "", "")
    console.print(table)
    return verdicts


def _draw_loads(
    console: Console, out: Path, ledger: Ledger, shape: str, dtype: str, engines: Sequence[str], loads: Sequence[float]
) -> None:
    def figure(metric: Metric, name: str, share: float) -> float | None:
        return _median(metric.of(answer) for answer in ledger.rounds(shape, dtype, name, f"load {share:g}"))

    panels = {
        metric.label: {name: [figure(metric, name, share) for share in loads] for name in engines}
        for metric in METRICS
        if metric.targets
    }
    if not any(value is not None for panel in panels.values() for each in panel.values() for value in each):
        return
    path = out / f"peers-{shape}-{dtype}-load.png"
    groups = [f"{share:.0%} of our capacity" for share in loads]
    draw_loads(path, f"{shape}, {dtype}: {ledger.about['workload']}", groups, panels)
    console.print(f"written: {path}", highlight=False)


def _cells(values: Mapping[str, float | None], tell: Callable[[float], str]) -> list[str]:
    return ["-" if value is None else tell(value) for value in values.values()]


def draw_steps(path: Path, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draws milliseconds as grouped bars: one group a workload, one colour an engine; None leaves a gap."""
    figure, (axis,) = plot.new_figure(1, title, width=max(6.0, 1.3 * len(groups)))
    _grouped(axis, groups, series)
    plot.label_axis(axis, "", "ms", "")
    plot.save(figure, path)


def draw_loads(
    path: Path, title: str, groups: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float | None]]]
) -> None:
    """Draws figures of loads as grouped bars: a panel a figure, one group a load, one colour an engine."""
    figure, axes = plot.new_figure(len(panels), title)
    for axis, (figure_name, series) in zip(axes, panels.items(), strict=True):
        _grouped(axis, groups, series)
        plot.label_axis(axis, "", "", figure_name)
        values = [value for each in series.values() for value in each if value]
        if values and max(values) > 30 * min(values):
            axis.set_yscale("log")
    for axis in axes:
        axis.get_legend().remove()  # one is enough, and here it would lie over the bars
    axes[0].set_ylim(top=1.4 * axes[0].get_ylim()[1])
    axes[0].legend(fontsize=8, ncols=2)
    plot.save(figure, path)


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
