"""The start of an engine from a command: its share of a GPU's memory, and jax's profiler."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.commands import cli, console
from server.commands import engine_start as start
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("chosen", [None, "0.5"])
def test_share_of_gpu_memory(monkeypatch, chosen):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if chosen:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", chosen)
    seen = []

    def load(*_, **__):
        seen.append(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
        raise ValueError("seen enough")

    monkeypatch.setattr("jaxserve.engine.Engine.from_checkpoint", load)
    assert cli.main(["generate", "--prompt", "a"]) == 2
    assert seen == [chosen or "0.93"]


def test_ctrl_c_during_the_start_ends_the_process() -> None:
    """An exception there would leave a compiler at work in the interpreter's end, which may crash."""
    code = (
        "import os, signal, sys\n"
        "from server.commands import cli, engine_start\n"
        "def made(*_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('went on')\n"
        "engine_start.make_engine = made\n"
        "try: cli.main(['generate', '--prompt', 'a'])\n"
        "finally: print('ended')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxserve: interrupted\n")


def test_padding_is_told_once_and_only_if_there_is_any(capsys: pytest.CaptureFixture[str]) -> None:
    report, padding = FakeEngine(None).report, "vocab 50,257 held as 50,258"
    console.show(report, model="a")
    assert "padding" not in capsys.readouterr().err.partition("bucket")[0]
    console.show(dataclasses.replace(report, padding=padding), model="a")
    assert capsys.readouterr().err.count(padding) == 1


def test_a_run_is_profiled_where_that_is_asked_for(tmp_path: Path) -> None:
    with start.profiling(tmp_path / "here"):
        pass
    assert list((tmp_path / "here").rglob("*.xplane.pb"))
    with start.profiling(None):
        pass
