"""Folders of deploy/kustomize as objects."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

KUSTOMIZE = Path(__file__).parents[2] / "deploy" / "kustomize"


@functools.cache
def render(folder: str) -> list[dict[str, Any]]:
    """Renders a folder; skips the test where no program can."""
    if kustomize := shutil.which("kustomize"):
        command = [kustomize, "build"]
    elif kubectl := shutil.which("kubectl"):
        command = [kubectl, "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, str(KUSTOMIZE / folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # what is deprecated is told there
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
