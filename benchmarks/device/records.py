"""Runs cases in a process of their own, and appends a line of JSON for each as it ends.

A case that hangs or crashes costs its own time limit and nothing else: the process is killed, the failure is recorded,
and a new one goes on with the next case. So does a second run of the same command with the same file.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

Case = tuple[str, Callable[[], dict[str, Any]]]
Record = dict[str, Any]

_ENDED, _SILENT = object(), object()  # what a worker says last, or instead of a line


def read(path: Path) -> list[Record]:
    """The records of a file. A line that was cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def drop_failures(path: Path) -> None:
    """Leaves in a file only what was measured."""
    kept = [json.dumps(record) + "\n" for record in read(path) if "failed" not in record]
    path.write_text("".join(kept))


def run_cases(cases: Iterable[Case], done: set[str]) -> None:
    """The worker: runs the cases that are not done, and prints when each begins and what it measured."""
    for name, measure in cases:
        if name in done:
            continue
        print(json.dumps({"begins": name}), flush=True)
        try:
            found = measure()
        except Exception as error:  # the next case may do
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"name": name} | found), flush=True)


def collect(
    job: str, worker: list[str], path: Path, *, case_seconds: float, until: float, say: Callable[[str], None]
) -> bool:
    """Runs a job's worker until every case is recorded; returns whether it came to the end in time.

    Args:
      worker: command of the process that calls `run_cases`; it gets the names that are done as a JSON list.
      case_seconds: most seconds of one case, the start of its process included.
      until: when to stop, by `time.monotonic`.
    """
    while True:
        done = {record["name"] for record in read(path) if record["job"] == job}
        with subprocess.Popen([*worker, json.dumps(sorted(done))], stdout=subprocess.PIPE, text=True) as process:
            begun, failure = None, None
            for line in _lines(process, case_seconds, until):
                if line is _ENDED:
                    break
                if line is _SILENT:
                    failure = f"nothing for {case_seconds:.0f} s"
                    break
                if "begins" in line:
                    begun = line["begins"]
                    continue
                _append(path, {"job": job} | line)
                say(f"{line['name']}: {line.get('failed') or _brief(line)}")
                begun = None
            process.kill()
        if time.monotonic() >= until:
            return False
        if failure is None and process.returncode == 0:
            return True
        if begun is None:
            say(f"{job}: its process ended with code {process.returncode} before a case began")
            return False
        failure = failure or f"its process ended with code {process.returncode}"
        _append(path, {"job": job, "name": begun, "failed": failure})
        say(f"{begun}: {failure}")


def _lines(process: subprocess.Popen[str], seconds: float, until: float) -> Iterator[Any]:
    """What a worker prints, _SILENT once it says nothing for so long, and _ENDED at the end or the deadline."""
    said: queue.Queue[Any] = queue.Queue()
    assert process.stdout is not None
    output = process.stdout

    def follow() -> None:
        for line in output:
            if line.startswith('{"'):
                said.put(json.loads(line))
            else:
                print(line, end="", file=sys.stderr)
        process.wait()
        said.put(_ENDED)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        try:
            yield said.get(timeout=max(min(seconds, until - time.monotonic()), 0))
        except queue.Empty:
            yield _ENDED if time.monotonic() >= until else _SILENT


def _append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record | {"at": datetime.now().astimezone().isoformat(timespec="seconds")}) + "\n")


def _brief(line: Record) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in line.items()
        if key != "name"
    )
