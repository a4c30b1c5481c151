"""What several hosts add to the host's work of an iteration: plans and answers over the loopback, with stages that
compute nothing, so that nothing else is left. The worker is a process of its own."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import machine, report
from jaxserve.cluster import control_pb2 as pb
from jaxserve.cluster import wire
from jaxserve.cluster.config import ClusterConfig
from jaxserve.cluster.group import Group
from jaxserve.cluster.links import Unconnected
from jaxserve.cluster.master import MasterPipeline
from jaxserve.cluster.recorder import FlightRecorder
from jaxserve.cluster.worker import Membership
from jaxserve.execution.batch import BatchLayout, PackedPlan, pack
from jaxserve.execution.pipeline import Pipeline
from jaxserve.execution.programs import Forward
from jaxserve.execution.stage import Launched
from jaxserve.iteration import Admission, Chunk, IterationPlan, SamplerVariant, TableChange
from jaxserve.request import SamplingParams

TARGET_MS = 0.5  # that an iteration takes longer
TARGET_BYTES = 1024  # of a decode row
_CONTEXT, _BLOCK, _BLOCKS = 2048, 16, 8192
_CHANGES = 16  # a row in as many begins a new block
_WARM_UP = 100  # iterations that are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Medians, in milliseconds.

    Attributes:
      thread: more work on the engine's own thread.
      round_trip: from a launch to its answer, by way of the worker; with plans in flight, the devices work meanwhile.
      bytes_a_row: of a plan of decodes.
    """

    rows: int
    thread: float
    round_trip: float
    bytes_a_row: float


class _Nothing:
    """A stage that computes nothing."""

    buckets = ()
    num_programs = 0

    def __init__(self, layout: BatchLayout) -> None:
        self.compile_seconds: dict[int, float] = {}
        self.params = self.pool = None
        shape = SimpleNamespace(layout=lambda bucket: layout, attention=SimpleNamespace(block_size=_BLOCK))
        self.programs: Any = SimpleNamespace(shape=shape, hidden=lambda bucket: None, everywhere=None)
        ready: Any = SimpleNamespace(block_until_ready=lambda: None)
        nothing: Any = None
        self._out = Forward(nothing, nothing, nothing, ready, nothing, nothing)
        chosen: Any = np.zeros((2, layout.points), np.int32)
        self._answer = Launched(chosen, None, None)

    def admit(self, admissions: Any) -> None: ...
    def draft(self, drafts: Any) -> None: ...
    def copy(self, copies: Any) -> None: ...
    def feed(self, points: Any, chosen: Any) -> None: ...
    def replace_params(self, params: Any) -> None: ...

    def forward(self, bucket: int, packed: Any, x: Any) -> Forward:
        return self._out

    def answer(self, plan: IterationPlan, out: Forward, allowed: Any = None) -> Launched:
        return self._answer


def _layout(rows: int) -> BatchLayout:
    return BatchLayout(bucket=rows, max_rows=rows, n_rows=3 * rows, block_size=_BLOCK, max_context=_CONTEXT)


def _stages(rows: int, here: int | None) -> list[Any]:
    """Two stages, of which one is here; or both."""
    stages: list[Any] = [_Nothing(_layout(rows)) for _ in range(2)]
    for index, stage in enumerate(stages):
        if here is not None and index != here:
            elsewhere: Any = None
            stage._out, stage._answer = Forward(*[elsewhere] * 6), Launched(None, None, None)
    return stages


def _place(host: int, coordinator: str) -> ClusterConfig:
    return ClusterConfig(hosts=2, host=host, coordinator=coordinator, join_timeout=60.0)


def measure(rows: int, iterations: int) -> Added:
    """Decodes of so many rows, one iteration at a time: without hosts, then with a worker that has the last stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "jaxserve.bench.control", coordinator, str(rows)]
    worker = subprocess.Popen(command)
    try:
        with tempfile.TemporaryDirectory() as folder:
            group = Group(_place(0, coordinator), [], tell=lambda _: None)
            group.listen()
            group.join()
            group.place({0: (0,), 1: (1,)})
            pipeline = MasterPipeline(_stages(rows, 0), [Unconnected()] * 2, group, lambda: None)
            group.agree("ready", 1)
            recorder = FlightRecorder(pb.Recording(), _BLOCK, seconds=1.0, folder=Path(folder))
            pipeline.serve(60.0, recorder)
            busy, whole = _times(pipeline, rows, iterations)
            pipeline.close()
    finally:
        worker.wait(30)
    alone = Pipeline(_stages(rows, None), [Unconnected()] * 2)
    base_busy, base_whole = _times(alone, rows, iterations)
    size = wire.encode_plan(_plan(rows, 10**6, 1000), 1).ByteSize()
    return Added(rows=rows, thread=busy - base_busy, round_trip=whole - base_whole, bytes_a_row=size / rows)


def _times(pipeline: Pipeline, rows: int, iterations: int) -> tuple[float, float]:
    """Of an iteration, the milliseconds that the calling thread works, and those that it takes."""
    plans = [_plan(rows, sequence, 100 + sequence % 1000) for sequence in range(_WARM_UP + iterations)]
    plans[0] = dataclasses.replace(plans[0], admissions=_admissions(rows))
    packed = [pack(plan, _layout(rows), _BLOCKS) for plan in plans]
    busy, whole = zip(*(_time(pipeline, *each) for each in zip(plans, packed, strict=True)), strict=True)
    return statistics.median(busy[_WARM_UP:]), statistics.median(whole[_WARM_UP:])


def _time(pipeline: Pipeline, plan: IterationPlan, packed: PackedPlan) -> tuple[float, float]:
    started, worked = time.perf_counter(), time.thread_time()
    pipeline.launch(plan, packed)
    pipeline.wait()
    return 1e3 * (time.thread_time() - worked), 1e3 * (time.perf_counter() - started)


def _plan(rows: int, sequence: int, position: int) -> IterationPlan:
    return IterationPlan(
        sequence=sequence,
        bucket=rows,
        admissions=(),
        chunks=tuple(Chunk(row, position, 1, 1) for row in range(rows)),
        table_changes=tuple(
            TableChange(row, position // _BLOCK, row) for row in range(sequence % _CHANGES, rows, _CHANGES)
        ),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )


def _admissions(rows: int) -> tuple[Admission, ...]:
    sampling = SamplingParams(temperature=0.0)
    return tuple(
        Admission(row=row, request_id=str(row), tokens=(1,) * 100, prompt_length=100, blocks=(), sampling=sampling)
        for row in range(rows)
    )


def run(rows: list[int], iterations: int, out: Path, console: Console) -> int:
    """`jaxserve bench control`: prints what hosts add, against the targets, and writes JSON."""
    results = [measure(count, iterations) for count in rows]
    table = Table(title="what a second host adds to an iteration (medians, loopback)", title_justify="left")
    for column in ("rows", "engine's thread, ms", "round trip, ms", "target, ms", "plan, bytes a row", "target"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.rows),
            f"{result.thread:.3f}",
            f"{result.round_trip:.3f}",
            f"{TARGET_MS:g}",
            f"{result.bytes_a_row:.1f}",
            str(TARGET_BYTES),
        )
    console.print(table)
    report.write_json(
        out / "control.json", {"benchmark": "control", "environment": machine.environment(), "results": results}
    )
    console.print(f"written: {out / 'control.json'}", highlight=False)
    return 0


def work(coordinator: str, rows: int) -> None:
    """The worker's process."""
    membership = Membership(_place(1, coordinator), [], tell=lambda _: None)
    membership.join()
    pipeline = Pipeline(_stages(rows, 1), [Unconnected()] * 2)
    membership.agree("ready", 1)
    membership.follow(pipeline, _BLOCKS, answers=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
