"""When each stage ran which iteration, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import jax

from jaxserve.iteration import IterationPlan
from jaxserve.pipeline import Pipeline


class Slice(NamedTuple):
    """One iteration in one stage. Times in seconds of `time.perf_counter`."""

    stage: int
    sequence: int
    start: float
    end: float


class _Launch(NamedTuple):
    bucket: int
    tokens: int
    decodes: int
    at: float


class Timeline:
    """Watches a pipeline while in a `with` block.

    A device runs what it is given in order, so an iteration starts in a stage when its input is there (for the first
    stage: when it is launched) and the iteration before it has left; it ends when its output is there, which a thread a
    stage waits for.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._launches: dict[int, _Launch] = {}
        self._ends: list[dict[int, float]] = [{} for _ in pipeline.stages]
        self._queues = [queue.SimpleQueue() for _ in pipeline.stages]
        self._threads = [
            threading.Thread(target=self._wait, args=(stage,), name=f"jaxserve-timeline-{stage}", daemon=True)
            for stage in range(len(pipeline.stages))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._pipeline.watchers.append(self._launched)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipeline.watchers.remove(self._launched)
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _launched(self, plan: IterationPlan, outputs: Sequence[jax.Array]) -> None:
        decodes = sum(chunk.length == 1 and chunk.samples for chunk in plan.chunks)
        self._launches[plan.sequence] = _Launch(plan.bucket, plan.num_tokens, decodes, time.perf_counter())
        for waiting, output in zip(self._queues, outputs, strict=True):
            waiting.put((plan.sequence, output))

    def _wait(self, stage: int) -> None:
        while (entry := self._queues[stage].get()) is not None:
            sequence, output = entry
            output.block_until_ready()
            self._ends[stage][sequence] = time.perf_counter()

    def slices(self) -> list[Slice]:
        """What has run, by stage and in order; after the `with` block."""
        found, arrived = [], {sequence: launch.at for sequence, launch in self._launches.items()}
        for stage, ends in enumerate(self._ends):
            before = 0.0
            for sequence, end in ends.items():
                found.append(Slice(stage, sequence, max(before, arrived[sequence]), end))
                before = end
            arrived = ends
        return found

    def write(self, path: str | Path) -> None:
        """Writes the trace: one track a stage, one slice an iteration."""
        slices = self.slices()
        first = min((each.start for each in slices), default=0.0)
        events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "jaxserve"}}]
        for index, stage in enumerate(self._pipeline.stages):
            layers, devices = stage.programs.layers, stage.programs.mesh.size
            name = f"stage {index}: layers {layers.start} to {layers.stop - 1}, {devices} device{'s' * (devices > 1)}"
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": name}})
        for stage, sequence, start, end in slices:
            launch = self._launches[sequence]
            events.append(
                {
                    "ph": "X",
                    "name": f"iteration {sequence}",
                    "pid": 0,
                    "tid": stage,
                    "ts": 1e6 * (start - first),
                    "dur": 1e6 * (end - start),
                    "args": {"bucket": launch.bucket, "tokens": launch.tokens, "decodes": launch.decodes},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
