"""Shapes and dtypes are checked against their annotations, as `make test` does, and the check sees wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_check_catches_wrong_shapes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "tests/shapes.py"],
        cwd=ROOT,
        env=os.environ | {"CHECK_SHAPES": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_test_checks_shapes() -> None:
    """Models of every family, the sampler, whole engines and kernels are in it."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    recipe = subprocess.run(["make", "-n", "test"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "CHECK_SHAPES=1 .venv/bin/python -m pytest" in recipe.stdout
