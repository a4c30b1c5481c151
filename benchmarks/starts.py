"""`python -m benchmarks starts`: seconds from `jaxserve serve` to the first answer, with empty caches and full ones."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.free_ports import free_ports
from server.commands.bench import machine
from server.commands.console import UserError, check_positive, say, tables

HELP = """\
Starts a server several times with empty caches, as at the very first start, and each time once more with the caches
that this start filled. A time is that from the command to the first answer of 12 tokens. Prints the medians and where
they go: into what the server reports, and into the rest, which is Python's imports, the processes and the answer."""

PHASES = ("load", "compile", "measure")  # of the line that a server prints
COLUMNS = ("in all", *PHASES, "the rest")
_LINE = re.compile(r"^start +load ([\d.]+) s, compile ([\d.]+) s \((\d+ of \d+) cached\), measure ([\d.]+) s")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="starts of each kind (default: 3)")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        metavar="FILE",
        help="the Python of an environment that has jaxserve, as from a wheel (default: this one)",
    )
    parser.add_argument("--model", metavar="DIR", help="a checkpoint (default: the demo model)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit code."""
    check_positive(args, "rounds")
    model = [] if args.model is None else ["--model", args.model]
    found: dict[str, list[dict[str, float]]] = {"first": [], "later": []}
    for index in range(args.rounds):
        with tempfile.TemporaryDirectory() as caches:
            for kind, starts in found.items():
                starts.append(start(args.python, model, Path(caches)))
                say(f"{kind} start {index + 1}: {starts[-1]['in all']:.1f} s, {starts[-1]['cached']:.0%} cached")
    about = machine.environment()
    table = Table(
        title=f"Seconds to the first answer, medians of {args.rounds}: {about['cpu']}, {about['cores']} cores"
    )
    table.add_column("start")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for kind, starts in found.items():
        table.add_row(kind, *(f"{statistics.median(each[name] for each in starts):.1f}" for name in COLUMNS))
    tables().print(table)
    return 0


def start(python: Path, more: Sequence[str], caches: Path) -> dict[str, float]:
    """Seconds of one start by what they went into, and the share of programs that were cached.

    Raises:
      UserError: the server ended before it was ready; the message holds the end of its output.
    """
    port, http_port = free_ports(2)
    command = [python, "-P", "-m", "server.commands.cli", "serve", *more]
    command += ["--port", str(port), "--http-port", str(http_port)]
    began, lines = time.perf_counter(), list[str]()
    with subprocess.Popen(
        command,
        cwd=caches,  # so that an environment's own jaxserve is found rather than this checkout
        env=os.environ | {"XDG_CACHE_HOME": str(caches)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready on"):
                break
        else:
            raise UserError(f"the server ended before it was ready:\n{''.join(lines[-5:])}")
        answer(http_port)
        seconds = time.perf_counter() - began
        process.terminate()
        process.stdout.read()  # or it might wait for somebody who reads
    reported = next(filter(None, map(_LINE.match, lines)))
    loaded, programs = map(int, reported[3].split(" of "))
    phases = dict(zip(PHASES, map(float, reported.group(1, 2, 4)), strict=True))
    return {"in all": seconds, **phases, "the rest": seconds - sum(phases.values()), "cached": loaded / programs}


def answer(port: int) -> None:
    """Asks for 12 tokens, and waits for them."""
    body = json.dumps({"prompt": "It was a", "max_tokens": 12, "temperature": 0}).encode()
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 12
