"""The machine that figures were measured on, and whether it was idle."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.5  # load average, as a share of the cores, at which figures are no longer trusted


def environment(**extra: Any) -> dict[str, Any]:
    """The machine, the versions and the date of a measurement."""
    packages = ("jaxserve", "jax", "jaxlib", "flax", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        **extra,
    }


def usable_cores() -> int:
    """The number of cores that this process may run on."""
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
    """The largest resident memory of this process so far, in bytes; None if unknown.

    It is read from VmHWM: getrusage would count the memory of a forking parent.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
