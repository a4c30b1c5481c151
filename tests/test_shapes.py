"""Tests that run with shapes and dtypes checked against their annotations: the check slows every trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_checked(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *arguments],
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


KERNELS = [
    f"tests/pallas_kernels/test_{name}.py"
    for name in ("conformance", "isolation", "long_contexts", "cpu_product", "int8")
]


@pytest.mark.long
@pytest.mark.parametrize(
    "files",
    [
        ["tests/jaxserve/models/test_models.py", "tests/jaxserve/models/test_layers.py", "-m", "not exhaustive"],
        ["tests/jaxserve/sampling", "tests/jaxserve/test_engine.py"],
        KERNELS,
    ],
    ids=["models", "engine", "kernels"],
)
def test_annotations_hold(files: list[str]) -> None:
    """Models of every family, the sampler and a whole engine, kernels."""
    run_checked(*files)
