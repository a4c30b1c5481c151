"""docs/plots/draw.py draws every bar chart of the documentation from the stored tables."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DRAW = Path(__file__).parents[2] / "docs" / "plots" / "draw.py"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_charts_show_the_stored_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = load(DRAW)
    labels: dict[str, list[str]] = {}

    def save(figure: Any, name: str) -> None:
        labels[name] = [text.get_text() for axis in figure.axes for text in axis.texts]

    monkeypatch.setattr(draw, "save", save)
    for each in (draw.peers_steps, draw.peers_load, draw.orca, draw.replay):
        each()
    assert all((DRAW.parents[1] / name).exists() for name in labels)
    assert {name: len(found) for name, found in labels.items()} == {
        "peers-steps.png": 36,
        "peers-load.png": 36,
        "orca.png": 7,
        "replay.png": 28,
    }
    assert labels["peers-steps.png"][:6] == ["1.02", "1.66", "1.36", "1.07", "1.07", "1.10"]
