"""The regression benchmark, with made-up figures."""

import argparse
import itertools
import json

import pytest

from benchmarks import regression
from benchmarks.regression import GuardedTime, KeptFigure
from jaxserve.demo import DEMO_MODEL
from jaxserve.text.tokenizer import Tokenizer

KEPT = {"step": KeptFigure(multiple=2.0, allowed=1.5), "host": KeptFigure(multiple=10.0, allowed=1.2)}


@pytest.mark.parametrize(
    ("now", "holding"),
    [
        ({"step": 2.0, "host": 10.0}, [True, True]),
        ({"step": 3.0, "host": 12.0}, [True, True]),
        ({"step": 3.1, "host": 12.1}, [False, False]),
        ({"step": 0.1, "new": 99.0}, [True, True]),
    ],
)
def test_figure_holds_up_to_its_limit(now, holding):
    assert [finding.holds for finding in regression.judge(now, KEPT)] == holding


def silent(what, done, total):
    pass


def test_figures_are_measured_between_runs_of_their_yardstick():
    order = []

    def clock(name, seconds):
        values = itertools.cycle(seconds)

        def once():
            order.append(name)
            return next(values)

        return once

    figures = [
        GuardedTime(name="step", yardstick="read", seconds=clock("step", [6.0, 6.0, 600.0])),
        GuardedTime(name="text", yardstick="python", seconds=clock("text", [1.0])),
    ]
    yardsticks = {"read": clock("read", [1.0, 3.0]), "python": clock("python", [4.0])}
    assert regression.measure(figures, yardsticks, silent, "now") == {"step": 3.0, "text": 0.25}
    assert order[:6] == ["read", "step", "read", "python", "text", "python"]
    assert len(order) == 6 * regression.ROUNDS


def run(monkeypatch, tmp_path, seconds, *, write=False, kind="narrow"):
    """Runs the benchmark on one figure with these seconds, over a yardstick of one second."""
    values = iter(seconds)
    monkeypatch.setattr(regression, "KEPT", tmp_path / "regression.json")
    monkeypatch.setattr(regression, "ROUNDS", 1)
    monkeypatch.setattr(regression, "cpu_kind", lambda: kind)
    figure = GuardedTime(name="step", yardstick="read", seconds=lambda: next(values))
    monkeypatch.setattr(regression, "make_figures", lambda bars: [figure])
    monkeypatch.setattr(regression, "make_yardsticks", lambda: {"read": lambda: 1.0})
    return regression.run(argparse.Namespace(write=write))


def test_slowdown_must_show_twice(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, [2.0], write=True) == 0
    assert regression.read(tmp_path / "regression.json", "narrow") == {
        "step": KeptFigure(multiple=2.0, allowed=regression.ALLOWED)
    }
    assert run(monkeypatch, tmp_path, [2.9]) == 0
    assert run(monkeypatch, tmp_path, [8.0, 2.0]) == 0  # once only: it was the machine
    capsys.readouterr()
    assert run(monkeypatch, tmp_path, [8.0, 7.0]) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if "step" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["step", "2", "7", "3.50x", "1.5x", "SLOWER"]


def test_writing_keeps_limits(monkeypatch, tmp_path):
    narrow = {"narrow": {"figures": {"step": {"multiple": 2.0, "allowed": 1.1}}}}
    (tmp_path / "regression.json").write_text(json.dumps(narrow))
    assert run(monkeypatch, tmp_path, [9.0], write=True) == 0
    assert regression.read(tmp_path / "regression.json", "narrow") == {"step": KeptFigure(multiple=9.0, allowed=1.1)}


def test_each_kind_of_cpu_has_figures_of_its_own(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, [2.0], write=True)
    assert run(monkeypatch, tmp_path, [9.0], kind="wide") == 0
    assert "nothing is kept for CPUs like this one (wide)" in capsys.readouterr().out
    run(monkeypatch, tmp_path, [9.0], write=True, kind="wide")
    assert run(monkeypatch, tmp_path, [9.0], kind="wide") == 0
    assert run(monkeypatch, tmp_path, [9.0, 9.0]) == 1


@pytest.mark.parametrize("kind", ["x86-64-v3", "x86-64-v4"])
def test_kept_figures_are_the_measured_ones(kind):
    kept = regression.read(regression.KEPT, kind)
    assert len(kept) == 5
    assert all(each.multiple > 0 and 1 < each.allowed <= 2 for each in kept.values())


def test_host_figures_are_times():
    assert 0 < regression.scheduler_seconds(rows=4, iterations=20) < 1
    assert 0 < regression.text_seconds(Tokenizer.from_directory(DEMO_MODEL))() < 1
