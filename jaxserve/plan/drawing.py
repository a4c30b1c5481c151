"""Figures without pyplot: no display and no global backend is involved."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """A new figure; sizes in inches."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(picture: Figure, path: Path) -> None:
    """Write a figure; the ending of the path chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=130)
