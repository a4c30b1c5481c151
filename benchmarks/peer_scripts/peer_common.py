"""Functions that the scripts of this folder share; their environments have no jaxserve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps that are not counted


def read_job(path: str) -> dict[str, Any]:
    """A job (see engines.py)."""
    return json.loads(Path(path).read_text())


def peak_rss() -> int | None:
    """The largest resident memory of this process so far, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
