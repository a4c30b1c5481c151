"""Every test runs somewhere: `make test-all` and `make test-weekly` together select all of them."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import pythons

ROOT = Path(__file__).parents[1]
COLLECT = """
import json, pathlib, sys, pytest

class Plugin:
    def pytest_collection_finish(self, session):
        found = [(item.nodeid, sorted({mark.name for mark in item.iter_markers()})) for item in session.items]
        pathlib.Path(sys.argv[1]).write_text(json.dumps(found))

sys.exit(pytest.main(["-n", "0", "-m", "", "--collect-only", "-qq"], plugins=[Plugin()]))
"""


def selections() -> list[tuple[list[str], str]]:
    """Of each command that runs pytest: the files and folders, and the expression over markers."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    default = shlex.split(settings["addopts"])
    printed = subprocess.run(
        ["make", "-n", "PYTHON312=python3.12", "test-all", "test-weekly"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for line in printed.splitlines():
        _, runs_pytest, arguments = line.partition("-m pytest")
        if runs_pytest:
            words = shlex.split(arguments)
            whole = default + words
            expression = whole[len(whole) - whole[::-1].index("-m")]
            # `-k` selects some of what another command runs whole.
            if "-k" not in words:
                found.append(([word for word in words if word.startswith("tests/")], expression))
    return found


def test_other_pythons_run_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path for path in pythons.QUICK if not (ROOT / path).exists()] == []
    monkeypatch.setattr(pythons, "interpreter", lambda version: None)
    monkeypatch.setattr(sys, "argv", ["pythons", "3.14"])
    assert pythons.versions() == ["3.11", "3.12", "3.13", "3.14"]
    assert pythons.run("3.14", pythons.QUICK) == "NOT TESTED: it is not here"
    assert pythons.main() == 0
    python = Path(sys.executable)
    monkeypatch.setattr(pythons, "interpreter", lambda version: str(python))
    monkeypatch.setattr(pythons, "environment", lambda version, found: python)
    monkeypatch.setattr(pythons, "QUICK", ["--no-such-flag"])
    assert pythons.run("3.14", pythons.QUICK) == "FAILED (exit code 4)"
    assert pythons.main() == 1


@pytest.mark.long
def test_every_test_is_in_a_target(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tests = tmp_path / "tests.json"
    subprocess.run([sys.executable, "-c", COLLECT, str(tests)], cwd=ROOT, check=True, capture_output=True)
    names = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    targets = selections()
    assert len(targets) >= 8
    nowhere = [
        name
        for name, markers in json.loads(tests.read_text())
        if not any(
            (not paths or any(name.startswith(path) for path in paths))
            and eval(expression, {each: each in markers for each in names})
            for paths, expression in targets
        )
    ]
    assert nowhere == []
