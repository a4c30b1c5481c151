"""The judge of the regression guard, with figures made up here."""

import argparse
import itertools
import json

import pytest

from benchmarks import regression as guard
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
def test_a_figure_holds_up_to_what_it_may_be(now, holding):
    assert [finding.holds for finding in guard.judge(now, KEPT)] == holding


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
    assert guard.measure(figures, yardsticks, silent, "now") == {"step": 3.0, "text": 0.25}
    assert order[:6] == ["read", "step", "read", "python", "text", "python"]
    assert len(order) == 6 * guard.ROUNDS


def run(monkeypatch, tmp_path, seconds, *, write=False, kind="narrow"):
    """The guard over one figure that takes these seconds, a measurement each, by a yardstick of one second."""
    values = iter(seconds)
    monkeypatch.setattr(guard, "KEPT", tmp_path / "guard.json")
    monkeypatch.setattr(guard, "ROUNDS", 1)
    monkeypatch.setattr(guard, "cpu_kind", lambda: kind)
    figure = GuardedTime(name="step", yardstick="read", seconds=lambda: next(values))
    monkeypatch.setattr(guard, "make_figures", lambda bars: [figure])
    monkeypatch.setattr(guard, "make_yardsticks", lambda: {"read": lambda: 1.0})
    return guard.run(argparse.Namespace(write=write))


def test_a_slowdown_is_told_by_name_when_it_shows_twice(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, [2.0], write=True) == 0
    assert guard.read(tmp_path / "guard.json", "narrow") == {"step": KeptFigure(multiple=2.0, allowed=guard.ALLOWED)}
    assert run(monkeypatch, tmp_path, [2.9]) == 0
    assert run(monkeypatch, tmp_path, [8.0, 2.0]) == 0  # once only: it was the machine
    capsys.readouterr()
    assert run(monkeypatch, tmp_path, [8.0, 7.0]) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if "step" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["step", "2", "7", "3.50x", "1.5x", "SLOWER"]


def test_writing_keeps_what_each_figure_may_be(monkeypatch, tmp_path):
    narrow = {"narrow": {"figures": {"step": {"multiple": 2.0, "allowed": 1.1}}}}
    (tmp_path / "guard.json").write_text(json.dumps(narrow))
    assert run(monkeypatch, tmp_path, [9.0], write=True) == 0
    assert guard.read(tmp_path / "guard.json", "narrow") == {"step": KeptFigure(multiple=9.0, allowed=1.1)}


def test_each_kind_of_cpu_has_figures_of_its_own(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, [2.0], write=True)
    assert run(monkeypatch, tmp_path, [9.0], kind="wide") == 0
    assert "nothing is kept for CPUs like this one (wide)" in capsys.readouterr().out
    run(monkeypatch, tmp_path, [9.0], write=True, kind="wide")
    assert run(monkeypatch, tmp_path, [9.0], kind="wide") == 0
    assert run(monkeypatch, tmp_path, [9.0, 9.0]) == 1


@pytest.mark.parametrize("kind", ["x86-64-v3", "x86-64-v4"])
def test_what_is_kept_names_the_figures_that_are_measured(kind):
    kept = guard.read(guard.KEPT, kind)
    assert len(kept) == 5
    assert all(each.multiple > 0 and 1 < each.allowed <= 2 for each in kept.values())


def test_the_host_s_figures_are_times_of_a_pass():
    assert 0 < guard.scheduler_seconds(rows=4, iterations=20) < 1
    assert 0 < guard.text_seconds(Tokenizer.from_directory(DEMO_MODEL))() < 1
