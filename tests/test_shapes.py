"""Tests that run with shapes and dtypes checked against their annotations: the check slows every trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_checked(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env=os.environ | {"CHECK_SHAPES": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_check_catches_wrong_shapes() -> None:
    run_checked("tests/shapes.py")


@pytest.mark.long
def test_annotations_hold() -> None:
    """Models, the sampler, kernels and a whole engine."""
    run_checked(
        "tests/jaxserve/models/test_models.py",
        "tests/jaxserve/models/test_layers.py",
        "tests/jaxserve/sampling",
        "tests/jaxserve/test_engine.py",
        "tests/pallas_kernels/test_conformance.py",
        "tests/pallas_kernels/test_isolation.py",
        "tests/pallas_kernels/test_long_contexts.py",
        "tests/pallas_kernels/test_cpu_product.py",
        "tests/pallas_kernels/test_int8.py",
    )
