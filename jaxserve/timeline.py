"""When each stage ran which iteration, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import jax

from jaxserve.iteration import IterationPlan
from jaxserve.runner.pipeline import Pipeline


class Slice(NamedTuple):
    """One iteration in one stage of a replica. Times in seconds of `time.perf_counter`."""

    replica: int
    stage: int
    sequence: int
    start: float
    end: float


class _TracedLaunch(NamedTuple):
    bucket: int
    tokens: int
    decodes: int
    at: float


class Timeline:
    """Watches the pipelines of all replicas while in a `with` block."""

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self._pipelines = [_PipelineTimeline(pipeline) for pipeline in pipelines]

    def __enter__(self) -> Self:
        for each in self._pipelines:
            each.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._pipelines:
            each.end()

    def slices(self) -> list[Slice]:
        """What has run, by replica and stage and in order; after the `with` block."""
        return [Slice(replica, *part) for replica, each in enumerate(self._pipelines) for part in each.slices()]

    def write(self, path: str | Path) -> None:
        """Writes the trace: a process a replica, one track a stage, one slice an iteration."""
        slices = self.slices()
        first = min((each.start for each in slices), default=0.0)
        events: list[dict] = []
        for replica, each in enumerate(self._pipelines):
            name = "jaxserve" if len(self._pipelines) == 1 else f"replica {replica}"
            events.append({"ph": "M", "name": "process_name", "pid": replica, "args": {"name": name}})
            for index, stage in enumerate(each.pipeline.stages):
                layers, devices = stage.programs.layers, stage.programs.mesh.size
                name = f"stage {index}: layers {layers.start} to {layers.stop - 1}"
                name += f", {devices} device{'s' * (devices > 1)}"
                events.append({"ph": "M", "name": "thread_name", "pid": replica, "tid": index, "args": {"name": name}})
        for replica, stage, sequence, start, end in slices:
            launch = self._pipelines[replica].launches[sequence]
            events.append(
                {
                    "ph": "X",
                    "name": f"iteration {sequence}",
                    "pid": replica,
                    "tid": stage,
                    "ts": 1e6 * (start - first),
                    "dur": 1e6 * (end - start),
                    "args": {"bucket": launch.bucket, "tokens": launch.tokens, "decodes": launch.decodes},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


class _PipelineTimeline:
    """Records when the stages of one pipeline run.

    A device runs what it is given in order, so an iteration starts in a stage when its input is there (for the first
    stage: when it is launched) and the iteration before it has left; it ends when its output is there, which a thread a
    stage waits for.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.launches: dict[int, _TracedLaunch] = {}
        self._ends: list[dict[int, float]] = [{} for _ in pipeline.stages]
        self._queues = [queue.SimpleQueue() for _ in pipeline.stages]
        self._threads = [
            threading.Thread(target=self._wait, args=(stage,), name=f"jaxserve-timeline-{stage}", daemon=True)
            for stage in range(len(pipeline.stages))
        ]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()
        self.pipeline.watchers.append(self._launched)

    def end(self) -> None:
        self.pipeline.watchers.remove(self._launched)
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _launched(self, plan: IterationPlan, outputs: Sequence[jax.Array]) -> None:
        self.launches[plan.sequence] = _TracedLaunch(
            plan.bucket, plan.num_tokens, plan.num_decodes, time.perf_counter()
        )
        for waiting, output in zip(self._queues, outputs, strict=True):
            waiting.put((plan.sequence, output))

    def _wait(self, stage: int) -> None:
        while (entry := self._queues[stage].get()) is not None:
            sequence, output = entry
            output.block_until_ready()
            self._ends[stage][sequence] = time.perf_counter()

    def slices(self) -> Iterator[tuple[int, int, float, float]]:
        """(stage, sequence, start, end) of what has run."""
        arrived = {sequence: launch.at for sequence, launch in self.launches.items()}
        for stage, ends in enumerate(self._ends):
            before = 0.0
            for sequence, end in ends.items():
                yield stage, sequence, max(before, arrived[sequence]), end
                before = end
            arrived = ends
