"""Figures without pyplot: no display, no global state. Needs matplotlib (`jaxserve[plots]`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "pictures need matplotlib, which is not installed: pip install 'jaxserve[plots]'"


def is_installed() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(width: float, height: float) -> Figure:
    """A new figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(picture: Figure, path: Path) -> None:
    """Write a figure; the ending of the path chooses the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=130)
