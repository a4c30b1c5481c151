"""Draws the pictures of docs/ from the tables that are stored: `python docs/plots/draw.py`.

Drawn for a width of about 830 pixels (GitHub's): bars relative to one line, small multiples, linear axes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
BETTER, WORSE, OTHER = "#2e6f95", "#d1733b", "#9aa5b1"
WIDTH = 8.3


def tables(page: Path) -> dict[str, list[list[list[str]]]]:
    """The tables of a page by the heading they are under; each is a list of rows, the first one the names."""
    found: dict[str, list[list[list[str]]]] = {}
    heading, inside = "", False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|") and not inside:
            found.setdefault(heading, []).append([])
        if line.startswith("|") and set(line) - set("|-: "):
            found[heading][-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return found


def number(cell: str) -> float:
    """The first number of a cell: `1.02x` is 1.02, `2,247` is 2247."""
    match = re.search(r"-?[\d,]+(?:\.\d+)?", cell)
    assert match is not None, cell
    return float(match.group().replace(",", ""))


def bars(
    axis: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str], colours: Sequence[str]
) -> None:
    """Horizontal bars from top to bottom, each with its label behind it."""
    container = axis.barh(range(len(values)), values, color=colours, height=0.7)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.bar_label(container, labels, fontsize=8, padding=3, bbox=box)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def new_figure(rows: int, columns: int, height: float, title: str, **shared: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def save(figure: Figure, name: str) -> None:
    figure.savefig(DOCS / name, dpi=180)


def peers_steps() -> None:
    """How many times as fast a step is as the best peer's, on each machine."""
    found = tables(RESULTS / "2026-11-23-peers.md")
    panels = [  # title, heading, table under it, column of the ratio
        ("GPT-2, float32, AVX2", "Steps with AVX2", 0, 4),
        ("GPT-2, float32, AVX-512", "Steps with AVX-512", 0, 4),
        ("GPT-2, float32, Intel", "Steps on Intel", 0, 5),
        ("GPT-2, bfloat16, AVX2", "Steps with AVX2", 1, 3),
        ("BLOOM-560m, float32, AVX-512", "Steps with AVX-512 (BLOOM-560m)", 0, 4),
        ("BLOOM-560m, bfloat16, Intel", "Steps on Intel, bfloat16", 0, 4),
    ]
    figure, axes = new_figure(2, 3, 4.4, "Speed of a step relative to the best peer (line: equal; more is faster)")
    for place, (axis, (title, heading, index, column)) in enumerate(zip(axes.flat, panels, strict=True)):
        rows = [row for row in found[heading][index][1:] if not row[0].startswith("peak memory")]
        values = [number(row[column]) for row in rows]
        names = [row[0].replace(" at 100", "").replace(" prompt tokens", " prompt") for row in rows]
        colours = [BETTER if value >= 1 else WORSE for value in values]
        bars(axis, names if place % 3 == 0 else [""] * len(rows), values, [f"{value:.2f}" for value in values], colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 2.6)
        axis.set_title(title, fontsize=9)
    save(figure, "peers-steps.png")


def peers_load() -> None:
    """Loads relative to the best peer: throughput, first token, time between tokens."""
    found = tables(RESULTS / "2026-11-23-peers.md")
    experiments = [
        ("GPT-2, float32, AVX2\nobjective 57 ms", "Loads with AVX2, float32, objective 57 ms", 5),
        ("GPT-2, float32, AVX2\nno objective", "Loads with AVX2, float32, no objective", 5),
        ("BLOOM-560m, float32\nAVX-512, objective 100 ms", "Loads with AVX-512, float32, objective 100 ms", 5),
        ("BLOOM-560m, bfloat16\nIntel, objective 110 ms", "Loads on Intel, bfloat16, objective 110 ms", 4),
    ]
    metrics = [
        ("tokens/s\n(more is better)", "generated tokens/s", 3.0),
        ("time to first token, p50\n(less is better)", "first token p50, ms", 1.3),
        ("time between tokens, p95\n(less is better)", "between tokens p95, ms", 3.4),
    ]
    figure, axes = new_figure(4, 3, 7.2, "Under load, relative to the best peer (line: equal)")
    for place, (row, (name, heading, column)) in enumerate(zip(axes, experiments, strict=True)):
        for axis, (title, metric, limit) in zip(row, metrics, strict=True):
            lines = [line for line in found[heading][0] if line[0] == metric]
            values = [number(line[column]) for line in lines]
            more = metric.startswith("generated")
            colours = [BETTER if (value >= 1) == more else WORSE for value in values]
            names = [f"{line[1]} load" if axis is row[0] else "" for line in lines]
            bars(axis, names, values, [f"{value:.2f}" for value in values], colours)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set_xlim(0, limit)
            axis.set_xticks([0, 0.5, 1] if limit < 2 else [0, 1, 2, 3])
            if place == 0:
                axis.set_title(title, fontsize=9)
            if axis is row[0]:
                axis.set_ylabel(name, fontsize=8)
    save(figure, "peers-load.png")


def orca() -> None:
    """Requests/s of the 175B model: published, and predicted under both ways of counting time."""
    found = tables(RESULTS / "2026-11-23-simulator.md")["Orca's evaluation, simulated"]
    published, served = {row[0]: row for row in found[0]}, {row[0]: row for row in found[1]}
    ft, batch32 = published["FasterTransformer, requests/s"], published["Orca, max batch 32, requests/s"]
    ours = served["jaxserve"]
    lines = [
        ("FasterTransformer, published", number(ft[1]), OTHER),
        ("FasterTransformer, predicted", number(ft[2]), BETTER),
        ("Orca (batch 32), published", number(batch32[1]), OTHER),
        ("Orca (batch 32), predicted, times added", number(batch32[2]), BETTER),
        ("Orca (batch 32), predicted, longer of the two", number(batch32[3]), BETTER),
        ("jaxserve, predicted, times added", number(ours[2]), BETTER),
        ("jaxserve, predicted, longer of the two", number(ours[4]), BETTER),
    ]
    figure, axes = new_figure(1, 1, 2.6, "Requests/s at a median of 190 ms a token: 175B on 16 A100-40GB (simulated)")
    names, values, colours = zip(*lines, strict=True)
    bars(axes[0][0], names, values, [f"{value:g}" for value in values], colours)
    axes[0][0].set_xlim(0, 19)
    save(figure, "orca.png")


def replay() -> None:
    """Recorded traffic under several policies, from the output shown in simulator.md."""
    text = (DOCS / "simulator.md").read_text(encoding="utf-8")
    output = text.split("\npolicy ")[1].splitlines()[1:8]
    rows = [re.split(r"\s{2,}", re.sub(r" / ", "/", line).strip()) for line in output]
    panels = [
        ("in time, %", [number(row[5]) for row in rows]),
        ("first token p95, s", [number(row[2].split("/")[1]) / 1000 for row in rows]),
        ("between tokens p95, ms", [number(row[3].split("/")[1]) for row in rows]),
        ("slots held, %", [number(row[8]) for row in rows]),
    ]
    figure, axes = new_figure(1, 4, 2.4, "One trace, seven settings (simulated)")
    for axis, (title, values) in zip(axes[0], panels, strict=True):
        names = [row[0] for row in rows] if axis is axes[0][0] else [""] * len(rows)
        bars(axis, names, values, [f"{value:.0f}" for value in values], [BETTER] * len(rows))
        axis.set_xlim(0, 1.25 * max(values))
        axis.set_title(title, fontsize=9)
    save(figure, "replay.png")


if __name__ == "__main__":
    peers_steps()
    peers_load()
    orca()
    replay()
