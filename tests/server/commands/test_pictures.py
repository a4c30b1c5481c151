"""Commands without matplotlib, which only pictures need."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxserve.planning import drawing
from jaxserve.simulate.outcome import Outcome
from server.commands import cli
from server.commands.bench import report


def test_a_picture_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(drawing, "is_installed", lambda: False)
    assert cli.main(["size", "--trace", "t", "--model", "gpt3-13b", "--topology", "h100:1", "--plot", "x.png"]) == 2
    assert "--plot x.png: pictures need matplotlib" in (told := capfd.readouterr().err)
    assert "pip install 'jaxserve[plots]'" in told


def test_a_benchmark_goes_on_without_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drawing, "is_installed", lambda: False)
    console = Console(record=True, width=200)
    report.plot(tmp_path / "a.png", "title", {"run": [Outcome(arrival=0.0, prompt_tokens=1)]}, console)
    assert "pictures need matplotlib" in console.export_text()
    assert not list(tmp_path.iterdir())


def test_nothing_that_draws_imports_it() -> None:
    names = "jaxserve.planning.search, jaxserve.simulate.sizing, jaxserve.simulate.policy_comparison"
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['matplotlib'] = None; import {names}"], check=True)
