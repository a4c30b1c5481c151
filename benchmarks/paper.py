"""`python -m benchmarks paper orca`: figure 10 of Orca's paper, simulated."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from rich.console import Console
from rich.table import Table

from benchmarks import orca
from benchmarks.orca import OBJECTIVE, QUICK, SETUPS, Point, Serve, Setup, Survey
from jaxserve.planning.calibration import Fit
from server.commands.bench import flags, machine, report
from server.commands.console import progress_bars, tables

HELP = """\
Repeats figure 10 of Orca's paper (OSDI'22) with the simulator and sets this scheduler beside it.

  python -m benchmarks paper orca"""

FT, OURS = "FasterTransformer", "jaxserve"
PUBLISHED = {"FT 101B peak": 0.49, "Orca 175B": 6.81, "FT 175B": 0.185, "Orca / FT 175B": 36.9}
_MODEL = "175B"  # of the headline
_SURVEY_SECONDS = 120.0
_COLORS = {FT: "#c23b22", OURS: "#1b5e20"}
_ORCA_COLORS = {8: "#9ecae1", 16: "#6baed6", 32: "#2171b5", 64: "#807dba", 128: "#bcbddc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One model under one fit.

    Attributes:
      systems: name -> a curve for each seed.
    """

    setup: Setup
    fit: Fit
    systems: dict[str, list[list[Point]]]

    def at(self, name: str, objective: float) -> list[float]:
        """Requests a second at a latency, for each seed; FasterTransformer at its better batch size."""
        if name != FT:
            return [orca.throughput_at(points, objective) for points in self.systems[name]]
        both = [[orca.throughput_at(p, objective) for p in self.systems[f"{FT} {batch}"]] for batch in (1, 8)]
        return [max(pair) for pair in zip(*both, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The results of the simulation.

    Attributes:
      fits: (fit, seconds predicted / published for each batch of the microbenchmark); added first, then overlapped.
      peaks: requests a second of FT 101B with all requests waiting from the start, by fit.
      curves: by fit, the headline's model first in each.
    """

    requests: int
    seeds: int
    fits: tuple[tuple[Fit, tuple[float, ...]], ...]
    peaks: tuple[float, ...]
    curves: tuple[list[Curves], ...] = field(default=())


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    flags.add_output_flags(parser)
    parser.add_argument("paper", choices=("orca",), help="whose evaluation")
    parser.add_argument("--requests", type=flags.positive, default=3000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--seeds", type=flags.positive, default=3, metavar="N", help="traces of each rate (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=flags.positive,
        default=machine.usable_cores(),
        metavar="N",
        help="processes (default: one a core)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulates, prints, plots and writes everything; returns 0."""
    console, picture = tables(), args.out / "orca.png"
    started = time.monotonic()
    with progress_bars() as bars:
        if args.quick:
            found = simulate(12, 1, bars)
        else:
            found = simulate(args.requests, args.seeds, bars, jobs=args.jobs)
    show(found, console)
    plot(found, picture)
    console.print(f"simulated in {time.monotonic() - started:.0f} s; written: {picture}")
    report.write_json(args.out / "orca.json", {"environment": machine.environment(), **as_json(found)}, console)
    return 0


def simulate(requests: int, seeds: int, progress: Callable[[str, int, int], None], *, jobs: int = 1) -> Paper:
    """Simulates all systems; models other than the headline's with one seed and one fit.

    Args:
      jobs: processes that draw curves.
    """
    fits = [orca.fitted(overlapped=overlapped) for overlapped in (False, True)]
    small = SETUPS["101B"]
    met = [
        tuple(orca.microbenchmark(small, batch, fit) / seconds for batch, seconds in orca.MICROBENCHMARK.items())
        for fit in fits
    ]
    peaks = [
        max(
            orca.point(orca.fastertransformer_of(small, fit, batch), 1e3, requests=requests, seed=0).throughput
            for batch in (1, 8)
        )
        for fit in fits
    ]
    asked = [(fits[0], SETUPS[_MODEL], (8, 16, 32, 64, 128), seeds), (fits[1], SETUPS[_MODEL], (32,), seeds)]
    asked += [(fits[0], setup, (8, 16, 32), 1) for setup in SETUPS.values() if setup.name != _MODEL]
    tasks = [_Task(setup, fit, name, requests, count) for fit, setup, rows, count in asked for name in _names(rows)]
    drawn: dict[_Task, list[list[Point]]] = {}
    for task, points in _drawn(tasks, jobs):
        progress("simulating", len(drawn), len(tasks))
        drawn[task] = points
    progress("simulating", len(tasks), len(tasks))
    curves = ([], [])
    for fit, setup, rows, count in asked:
        systems = {name: drawn[_Task(setup, fit, name, requests, count)] for name in _names(rows)}
        curves[fit.overlapped].append(Curves(setup=setup, fit=fit, systems=systems))
    return Paper(
        requests=requests,
        seeds=seeds,
        fits=tuple(zip(fits, met, strict=True)),
        peaks=tuple(peaks),
        curves=curves,
    )


class _Task(NamedTuple):
    """Curves to draw: of this system, on traces of so many requests."""

    setup: Setup
    fit: Fit
    name: str
    requests: int
    seeds: int


def _drawn(tasks: Sequence[_Task], jobs: int) -> Iterable[tuple[_Task, list[list[Point]]]]:
    """Each task with its curves, as they come."""
    if jobs == 1:
        yield from zip(tasks, map(_draw_curves, tasks), strict=True)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as processes:
        running = {processes.submit(_draw_curves, task): task for task in tasks}
        for done in as_completed(running):
            yield running[done], done.result()


def _draw_curves(task: _Task) -> list[list[Point]]:
    serve, survey = _system(task.setup, task.fit, task.name)
    objectives = _objectives(task.setup, task.fit)
    return orca.curves(serve, survey, objectives, requests=task.requests, seeds=task.seeds)


def _objectives(setup: Setup, fit: Fit) -> tuple[float, ...]:
    return (QUICK, OBJECTIVE) if setup.name == _MODEL else (orca.objective_of(setup, fit),)


def _names(rows: Iterable[int]) -> list[str]:
    """The systems that are compared, with these batches of Orca."""
    return [*(f"{FT} {batch}" for batch in (1, 8)), *(f"Orca {count}" for count in rows), OURS]


def _system(setup: Setup, fit: Fit, name: str) -> tuple[Serve, Survey]:
    """A system by its name, and how its curves begin."""
    family, _, count = name.partition(" ")
    if family == FT:  # it takes little time, and is read between the objectives too
        return orca.fastertransformer_of(setup, fit, int(count)), Survey(0.04, 1.3, math.inf)
    serve = orca.ours_of(setup, fit) if family == OURS else orca.orca_of(setup, fit, int(count))
    return serve, Survey(1.2, 1.5, _SURVEY_SECONDS)


def implied_slowdown(curves: Curves) -> float:
    """The slowdown of FasterTransformer's engine that the published rate of 175B implies.

    If all times are s times as long, the system serves the same trace at 1/s of the rate with s times the latency.
    """

    def rate(slowdown: float) -> float:
        return statistics.fmean(curves.at(FT, OBJECTIVE / slowdown)) / slowdown

    low, high = 0.5, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > PUBLISHED["FT 175B"] else (low, middle)
    return low


def headline(paper: Paper) -> list[dict[str, Any]]:
    """The figures of 175B under each fit."""
    rows = []
    for index, group in enumerate(paper.curves):
        curves = group[0]
        orca32, baseline = (statistics.fmean(curves.at(name, OBJECTIVE)) for name in ("Orca 32", FT))
        ours = {at: statistics.fmean(curves.at(OURS, at)) for at in (OBJECTIVE, QUICK)}
        quick = statistics.fmean(curves.at("Orca 32", QUICK))
        rows.append(
            {
                "overlapped": curves.fit.overlapped,
                "FT 101B peak": paper.peaks[index],
                "FT 175B": baseline,
                "Orca 175B": orca32,
                "Orca / FT 175B": orca32 / baseline,
                "FT slowdown implied": implied_slowdown(curves),
                "jaxserve 175B": ours[OBJECTIVE],
                "jaxserve / Orca 32 at 190 ms": ours[OBJECTIVE] / orca32,
                "jaxserve / Orca 32 at 100 ms": ours[QUICK] / quick,
            }
        )
    return rows


def show(paper: Paper, out: Console) -> None:
    """Prints the fits, the headline, and requests a second at each objective."""
    table = Table("", "efficiency", "us a layer", *(f"batch {batch}" for batch in orca.MICROBENCHMARK), **_PLAIN)
    for fit, met in paper.fits:
        how = "longer of arithmetic and memory" if fit.overlapped else "arithmetic + memory"
        layer = f"{1e6 * fit.layer_seconds:.0f}"
        table.add_row(how, f"{fit.efficiency:.3f}", layer, *(f"{100 * share - 100:+.1f}%" for share in met))
    _section(out, "Fitted on the microbenchmark of 101B: predicted against published", table)
    rows = headline(paper)
    table = Table("", "published", "arithmetic + memory", "longer of the two", **_PLAIN)
    for name in list(rows[0])[1:]:
        published = PUBLISHED.get(name)
        cells = [f"{row[name]:.3g}" + (f" ({row[name] / published - 1:+.1%})" if published else "") for row in rows]
        table.add_row(name, "" if published is None else f"{published:g}", *cells)
    _section(out, f"Requests a second (175B: at {1e3 * OBJECTIVE:.0f} ms a token), and ratios", table)
    for group in paper.curves:
        for curves in group:
            _show_curves(curves, out)
    out.print(f"{paper.requests:,} requests a trace, {paper.seeds} seeds (models other than {_MODEL}: 1)")


def _show_curves(curves: Curves, out: Console) -> None:
    objectives = _objectives(curves.setup, curves.fit)
    table = Table("", *(f"at {1e3 * each:.0f} ms a token" for each in objectives), **_PLAIN)
    for name in [FT, *(name for name in curves.systems if not name.startswith(FT))]:
        cells = []
        for objective in objectives:
            found = curves.at(name, objective)
            spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
            cells.append(f"{statistics.fmean(found):.2f}{spread}")
        table.add_row(name, *cells)
    how = "longer of arithmetic and memory" if curves.fit.overlapped else "arithmetic + memory"
    _section(out, f"{curves.setup.name}, {how}: requests a second (mean, and range over seeds)", table)


def as_json(paper: Paper) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "requests": paper.requests,
        "seeds": paper.seeds,
        "fits": [
            {"overlapped": fit.overlapped, "efficiency": fit.efficiency, "layer_seconds": fit.layer_seconds, "met": met}
            for fit, met in paper.fits
        ],
        "published": PUBLISHED,
        "headline": headline(paper),
        "curves": [
            {
                "model": curves.setup.name,
                "overlapped": curves.fit.overlapped,
                "systems": {
                    name: [[point._asdict() for point in points] for points in seeds]
                    for name, seeds in curves.systems.items()
                },
            }
            for group in paper.curves
            for curves in group
        ],
    }


def plot(paper: Paper, path: Path) -> None:
    """Draws latency over throughput like figure 10: a panel a model, published points as stars."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = dict(zip(SETUPS, figure.subplots(2, 2).flat, strict=True))
    for curves in reversed([curves for group in paper.curves for curves in group]):
        _draw(axes[curves.setup.name], curves)
    for name, axis in axes.items():
        axis.set(xscale="log", yscale="log", ylim=(25, 1000), xlim=(0.03, 60 if name == "13B" else 25))
        axis.set_title(f"{name}: {SETUPS[name].stages} x {SETUPS[name].tensor} A100-40GB", fontsize=10)
        axis.set_xlabel("requests/s served")
        axis.set_ylabel("median normalised latency, ms/token")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(StrMethodFormatter("{x:g}"))
            scale.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3, which="both")
    _star(axes["101B"], PUBLISHED["FT 101B peak"], None, "FT peak 0.49")
    _star(axes[_MODEL], PUBLISHED["FT 175B"], 1e3 * OBJECTIVE, "FT 0.185")
    _star(axes[_MODEL], PUBLISHED["Orca 175B"], 1e3 * OBJECTIVE, "Orca 6.81")
    axes[_MODEL].axhline(1e3 * OBJECTIVE, color="black", linewidth=0.6)
    handles = {
        label: line for axis in axes.values() for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle(
        "Orca's evaluation, simulated. Stars: published. Dashed: arithmetic and memory overlapped", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(axis: Any, curves: Curves) -> None:
    style = "--" if curves.fit.overlapped else "-"
    for name, seeds in curves.systems.items():
        family, _, count = name.partition(" ")
        color = _COLORS.get(family) or _ORCA_COLORS[int(count)]
        label = None if curves.fit.overlapped else f"{name}{' (max batch)' if family == 'Orca' else ''}"
        xs, ys = [p.throughput for p in seeds[0]], [1e3 * p.latency for p in seeds[0]]
        alpha = 0.5 if name.endswith(f"{FT} 8") else 1.0
        width = 2.4 if name == OURS else 1.4
        axis.plot(xs, ys, style, color=color, linewidth=width, alpha=alpha, marker=".", markersize=4, label=label)


def _star(axis: Any, x: float, y: float | None, text: str) -> None:
    if y is None:
        axis.axvline(x, color="black", linestyle=":", linewidth=1)
        axis.annotate(text, (x, 600), textcoords="offset points", xytext=(4, 0), fontsize=8)
        return
    axis.plot([x], [y], "*", color="black", markersize=11, zorder=5)
    axis.annotate(text, (x, y), textcoords="offset points", xytext=(5, 6), fontsize=8)


_PLAIN: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)}


def _section(out: Console, title: str, table: Table) -> None:
    for column in table.columns[1:]:
        column.justify = "right"
    out.print(f"\n[bold]{title}[/bold]")
    out.print(table)
