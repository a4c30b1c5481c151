"""The machine that figures belong to, and whether it had nothing else to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.5  # load average, as a share of the cores, at which figures are no longer trusted


def environment(**extra: Any) -> dict[str, Any]:
    """The machine, the versions and the date that figures belong to."""
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
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> str | None:
    """What to tell somebody who measures on a machine that was doing something else in the last minute, if it was."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load < BUSY_SHARE * cores:
        return None
    return (
        f"the load average is {load:.1f} on {cores} cores: what else runs here changes these figures, above all those "
        "of engines whose threads wait for each other"
    )


def peak_rss() -> int | None:
    """Most bytes of memory this process ever held resident; None where the system does not tell.

    Read from VmHWM: getrusage would count what a forking parent held.
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
