"""The machine that figures were measured on, and whether it was idle."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxserve

BUSY_SHARE = 0.5  # load average, as a share of the cores, above which a warning is printed
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def environment() -> dict[str, Any]:
    """The machine, the versions and the date of a measurement."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": _line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jaxserve": jaxserve.__version__,
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> str | None:
    """A warning if the machine ran something else in the last minute."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load < BUSY_SHARE * cores:
        return None
    return (
        f"the load average is {load:.1f} on {cores} cores: other work on this machine changes these figures, most of "
        "all for engines whose threads wait for each other"
    )


def peak_rss() -> int | None:
    """The largest resident memory of this process so far, in bytes; None if unknown."""
    found = _line_of("/proc/self/status", "VmHWM")  # getrusage would count the memory of a forking parent
    return int(found.split()[0]) * 1024 if found else None


def _line_of(file: str, name: str) -> str | None:
    """The value of the first line `name: value` of a file, or None."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
