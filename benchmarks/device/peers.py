"""Times the same steps by the transformers library, where it and torch are installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.device.models import TimedModel, timed
from benchmarks.device.records import Case
from server.commands.bench import machine, shapes

_STEPS = 20


def cases(job: str, *, small: bool) -> Iterator[Case]:
    """The steps of each model, with static batches and, where the library can, with its continuous batching."""
    for model in timed(small):
        for continuous in (False, True):
            if continuous and shapes.SHAPES[model.shape]["model_type"] == "bloom":
                continue  # its attention reads no pages
            peer = f"{job}, continuous" if continuous else job
            yield f"{peer}: {model.shape}", partial(time_transformers, peer, model, 3 if small else _STEPS)


def time_transformers(peer: str, model: TimedModel, steps: int) -> dict[str, Any]:
    """Median milliseconds of each step, in a process of its own.

    Raises:
      ValueError: torch or transformers is not installed.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed")
    task = {
        "entries": shapes.SHAPES[model.shape],
        "dtype": "bfloat16",
        "cases": [dataclasses.asdict(case) for case in model.cases],
        "steps": steps,
        "continuous": peer.endswith("continuous"),
        "threads": machine.usable_cores(),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        said = json.loads(
            environments.run_script(Path(sys.executable), "run_transformers.py", file.name, name="transformers")
        )
    times = zip(model.cases, said["milliseconds"], strict=True)
    found = {f"{model.shape} {case.name}": statistics.median(each) for case, each in times if each}
    return {"peer": peer, "version": said["version"], "ms": found}
