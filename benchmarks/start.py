"""How long a server takes from its command to its being ready: with nothing compiled yet, and with all of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from server.commands.bench import machine, report
from server.commands.bench.progress import Bars
from server.commands.bench.serve import engine_flags

# What the server says when a step begins -> how the one before it is called.
_STEPS = {
    "jaxserve: reading weights": "imports",
    "jaxserve: compiling": "weights",
    "jaxserve: measuring buckets": "programs",
    "ready on ": "buckets",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start.

    Attributes:
      steps: seconds of each.
      ready: seconds of all of them.
      processor: seconds of processors, until the server had stopped again.
      said: the server's own line about it.
    """

    name: str
    steps: dict[str, float]
    ready: float
    processor: float
    said: str


def run(model: Path, config: EngineConfig, warm: int, out: Path, console: Console) -> int:
    """`jaxserve bench start`: one cold start and `warm` warm ones; prints and writes them, returns 0.

    Raises:
      ValueError: the server ended before it was ready; the message holds the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-start-") as folder, Bars() as bars:
        config = dataclasses.replace(config, compilation_cache=folder)
        starts = []
        for index in range(1 + warm):
            bars("starting", index, 1 + warm)
            starts.append(time_start("warm" if index else "cold", model, config))
        bars("starting", 1 + warm, 1 + warm)
    table = Table(title=f"{model.name}: seconds until it is ready", title_justify="left")
    table.add_column("start")
    for column in (*_STEPS.values(), "ready", "processor"):
        table.add_column(column, justify="right")
    for each in starts:
        steps = [f"{each.steps[step]:.2f}" for step in _STEPS.values()]
        table.add_row(each.name, *steps, f"{each.ready:.2f}", f"{each.processor:.2f}")
    console.print(table)
    console.print(f"cold: {starts[0].said}\nwarm: {starts[-1].said}", highlight=False)
    report.write_json(
        out / "start.json", {"benchmark": "start", "environment": machine.environment(), "starts": starts}
    )
    console.print(f"written: {out / 'start.json'}", highlight=False)
    return 0


def time_start(name: str, model: Path, config: EngineConfig) -> Start:
    """Starts a server, and ends it as soon as it is ready."""
    command = [
        sys.executable,
        "-m",
        "server.commands.cli",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        *engine_flags(config),
    ]
    times, lines = [time.monotonic()], []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith(tuple(_STEPS)):
                times.append(time.monotonic())
                if len(times) == 1 + len(_STEPS):  # once: a second one ends it before it has seen its engine end
                    process.send_signal(signal.SIGTERM)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if len(times) <= len(_STEPS):
        tail = "\n".join(lines[-5:])
        raise ValueError(f"the server ended with code {process.returncode} before it was ready:\n{tail}")
    return Start(
        name=name,
        steps=dict(zip(_STEPS.values(), (after - before for before, after in pairwise(times)), strict=True)),
        ready=times[-1] - times[0],
        processor=used.ru_utime + used.ru_stime,
        said=next(line for line in lines if line.startswith("start ")).strip(),
    )
