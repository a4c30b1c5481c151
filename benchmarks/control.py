"""What several hosts add to the host's work of an iteration: plans and answers over the loopback, to a worker that is a
process of its own, with stages that are made up.

Two cases, each in turn with a pipeline that has both stages in one process. One iteration at a time through stages that
compute nothing: what is left is the round trip. And as many in flight as the engine has, through stages that take a
fixed time each, asleep, so that the cores are free: what a deployment pays is by how much the period grows. The second
stage begins an iteration once the first has run it; between processes it is told so beside the control channel, as by
a link that takes no time.

A bare stream that carries as many bytes tells how much of it is gRPC's own.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import echo
from jaxserve.iteration import Admission, Chunk, IterationPlan, IterationResult, SamplerVariant, TableChange
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.links import NoLink
from jaxserve.multihost.master import MasterPipeline
from jaxserve.multihost.worker import MasterConnection
from jaxserve.runner.batch import BatchLayout, PackedPlan, pack
from jaxserve.runner.pipeline import Pipeline
from jaxserve.runner.programs import Forward
from jaxserve.runner.stage import Launched
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import machine, report

TARGET_MS = 0.5  # that an iteration takes longer
TARGET_BYTES = 1024  # of a decode row
STAGE_MS = 5.0  # of each stage, with iterations in flight
_STAGES = 2
_CONTEXT, _BLOCK, _BLOCKS = 2048, 16, 8192
_CHANGES = 16  # a row in as many begins a new block
_TURNS = 20  # of each side; the first of them is not counted
_PAUSES_MS = (0.0, 15.0)  # of a bare stream: threads that have just been awake, and those that have slept meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a second host adds to an iteration: medians of turns, in milliseconds.

    Attributes:
      thread: more work on the engine's own thread, one iteration at a time.
      round_trip: more time from a launch to its answer, one iteration at a time through stages that compute nothing.
      period: more time between two answers with iterations in flight and stages of `STAGE_MS`.
      period_alone: that time in one process.
      bytes_a_row: of a plan of decodes.
      bare: a stream that does nothing but carry as many bytes, with each pause.
    """

    rows: int
    thread: float
    round_trip: float
    period: float
    period_alone: float
    bytes_a_row: float
    bare: list[echo.Echo]


class _Nothing:
    """A stage that computes nothing."""

    num_programs = 0

    def __init__(self, layout: BatchLayout) -> None:
        self.buckets = (layout.bucket,)
        self.compile_seconds: dict[int, float] = {}
        self.params = self.pool = None
        shape = SimpleNamespace(
            layout=lambda bucket: layout,
            point_counts=lambda buckets: (layout.points,),
            attention=SimpleNamespace(block_size=_BLOCK),
        )
        self.programs: Any = SimpleNamespace(shape=shape, hidden=lambda bucket: None, everywhere=None)
        ready: Any = SimpleNamespace(block_until_ready=lambda: None)
        nothing: Any = None
        self._out = Forward(nothing, nothing, nothing, ready, nothing, nothing)
        self._chosen: Any = np.zeros((2, layout.points), np.int32)

    def admit(self, admissions: Any) -> None: ...
    def draft(self, drafts: Any) -> None: ...
    def copy(self, copies: Any) -> None: ...
    def feed(self, points: Any, chosen: Any) -> None: ...
    def replace_params(self, params: Any) -> None: ...

    def forward(self, bucket: int, packed: Any, x: Any) -> Forward:
        return self._out

    def answer(self, plan: IterationPlan, out: Forward, allowed: Any = None) -> Launched:
        return Launched(self._chosen, None, None)


class _Elsewhere(_Nothing):
    """A stage of another process."""

    def __init__(self, layout: BatchLayout) -> None:
        super().__init__(layout)
        self._chosen = None
        self._out = self._out._replace(hidden=self._chosen)


class _Link(NamedTuple):
    """A pipe by which the second stage hears when the first will have run each iteration: monotonic seconds, which
    processes of a machine share."""

    receiving: int
    sending: int


class _Asleep(_Nothing):
    """A stage whose device runs iterations in order, each for a fixed time."""

    def __init__(self, layout: BatchLayout, link: _Link, is_first: bool) -> None:
        super().__init__(layout)
        self._link, self._is_first = link, is_first
        self._free = 0.0  # when the device has run what it was given

    def forward(self, bucket: int, packed: Any, x: Any) -> Forward:
        launched = time.monotonic()
        if self._is_first:
            done = self._run(launched)
            os.write(self._link.sending, struct.pack("d", done))
            hidden = _Output(self._chosen, lambda: done)
        else:
            hidden = _Output(self._chosen, lambda: self._run(max(launched, self._received())))
        value: Any = hidden
        return self._out._replace(hidden=value)

    def answer(self, plan: IterationPlan, out: Forward, allowed: Any = None) -> Launched:
        return Launched(out.hidden, None, None)

    def _run(self, begins: float) -> float:
        """When it will have run what can begin then."""
        self._free = max(self._free, begins) + STAGE_MS / 1e3
        return self._free

    def _received(self) -> float:
        return struct.unpack("d", os.read(self._link.receiving, 8))[0]


class _Output:
    """An array that is there at a time, which whoever waits for it may be the first to know."""

    def __init__(self, value: np.ndarray, when: Callable[[], float]) -> None:
        self._value, self._when = value, when
        self._there = False

    def block_until_ready(self) -> None:
        if not self._there:
            time.sleep(max(0.0, self._when() - time.monotonic()))
            self._there = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.block_until_ready()
        return self._value


def _layout(rows: int) -> BatchLayout:
    n_rows = (_STAGES + 1) * rows
    return BatchLayout(bucket=rows, max_rows=rows, n_rows=n_rows, block_size=_BLOCK, max_context=_CONTEXT)


def _stages(rows: int, here: tuple[int, ...], link: _Link | None) -> list[Any]:
    """All stages, of which some are here; with a link they take their time."""
    layout, stages = _layout(rows), []
    for index in range(_STAGES):
        if index not in here:
            stages.append(_Elsewhere(layout))
        else:
            stages.append(_Nothing(layout) if link is None else _Asleep(layout, link, index == 0))
    return stages


def _place(host: int, coordinator: str) -> ClusterConfig:
    return ClusterConfig(hosts=2, host=host, coordinator=coordinator, join_timeout=60.0)


@contextmanager
def _two_hosts(rows: int, link: _Link | None) -> Iterator[Pipeline]:
    """A pipeline whose last stage a worker has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.control", coordinator, str(rows), *map(str, link or ())]
    group = HostGroup(_place(0, coordinator), [], tell=lambda _: None)
    # A session of its own: Ctrl-C is ours, and the worker ends with us.
    worker = subprocess.Popen(command, pass_fds=link or (), start_new_session=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            group.listen()
            group.join()
            group.place({0: (0,), 1: (1,)})
            pipeline = MasterPipeline(_stages(rows, (0,), link), [NoLink()] * _STAGES, group, lambda: None)
            group.agree("ready", 1)
            recorder = FlightRecorder(pb.Recording(), _BLOCK, seconds=1.0, folder=Path(folder))
            pipeline.serve(60.0, recorder)
            yield pipeline
            pipeline.close()
            worker.wait(30)
    finally:
        group.stop()  # before its watchdog misses the worker, and ends this process
        worker.kill()
        worker.wait()


class _Compared(NamedTuple):
    """A figure without a second host, and how much more it is with one; milliseconds."""

    alone: float
    more: float


class _Side:
    """One of the two that take turns: a pipeline, and the decodes that it goes on with."""

    def __init__(self, pipeline: Pipeline, rows: int) -> None:
        self._pipeline, self._rows = pipeline, rows
        self._sequence = 0

    def one_at_a_time(self, iterations: int) -> tuple[float, float]:
        """Of an iteration, the milliseconds that the calling thread works, and those from launch to answer."""
        busy, whole = [], []
        for plan, packed in self._next(iterations):
            started, worked = time.perf_counter(), time.thread_time()
            self._pipeline.launch(plan, packed)
            self._pipeline.wait()
            busy.append(1e3 * (time.thread_time() - worked))
            whole.append(1e3 * (time.perf_counter() - started))
        return statistics.median(busy), statistics.median(whole)

    def in_flight(self, iterations: int) -> float:
        """Milliseconds between answers, while there are as many iterations in flight as may be."""
        answered = []
        for plan, packed in self._next(iterations + _STAGES + 2):
            if not self._pipeline.has_room:
                self._pipeline.wait()
                answered.append(time.perf_counter())
            self._pipeline.launch(plan, packed)
        while self._pipeline.in_flight:
            self._pipeline.wait()
        return 1e3 * (answered[-1] - answered[0]) / (len(answered) - 1)

    def _next(self, iterations: int) -> list[tuple[IterationPlan, PackedPlan]]:
        plans = [_plan(self._rows, self._sequence + index) for index in range(iterations)]
        self._sequence += iterations
        return [(plan, pack(plan, _layout(self._rows), _BLOCKS)) for plan in plans]


def measure(rows: int, iterations: int) -> Added:
    """Decodes of so many rows, in one process and in two."""
    each = max(1, iterations // _TURNS)
    turns = _take_turns(rows, False, lambda side: side.one_at_a_time(each))
    thread, round_trip = (_compared([(a[i], b[i]) for a, b in turns]) for i in range(2))
    period = _compared(_take_turns(rows, True, lambda side: side.in_flight(each)))
    size = wire.encode_plan(_plan(rows, 1000), 1).ByteSize()
    answers = IterationResult(tokens=np.full(rows, 1000, np.int32), logprobs=np.full(rows, -1.0, np.float32))
    back = wire.encode_result(answers, rows).ByteSize()
    return Added(
        rows=rows,
        thread=thread.more,
        round_trip=round_trip.more,
        period=period.more,
        period_alone=period.alone,
        bytes_a_row=size / rows,
        bare=[echo.measure(size, back, max(1, iterations // len(_PAUSES_MS)), pause) for pause in _PAUSES_MS],
    )


def _take_turns(rows: int, asleep: bool, turn: Callable[[_Side], Any]) -> list[tuple[Any, Any]]:
    """What a turn gives without a second host and with one, pairs."""
    links = [_Link(*os.pipe()) if asleep else None for _ in range(2)]
    alone = Pipeline(_stages(rows, tuple(range(_STAGES)), links[0]), [NoLink()] * _STAGES)
    try:
        with _two_hosts(rows, links[1]) as pipeline:
            sides = [_Side(each, rows) for each in (alone, pipeline)]
            return [(turn(sides[0]), turn(sides[1])) for _ in range(_TURNS)][1:]
    finally:
        for end in (end for link in links if link is not None for end in link):
            os.close(end)


def _compared(turns: list[tuple[float, float]]) -> _Compared:
    return _Compared(statistics.median(a for a, _ in turns), statistics.median(b - a for a, b in turns))


def _plan(rows: int, sequence: int) -> IterationPlan:
    """Decodes of the rows whose turn it is, which the first such plan admits."""
    turn, group = divmod(sequence, _STAGES + 1)
    position, theirs = 100 + turn % 1000, range(group * rows, (group + 1) * rows)
    return IterationPlan(
        sequence=sequence,
        bucket=rows,
        admissions=tuple(map(_admission, theirs)) if turn == 0 else (),
        chunks=tuple(Chunk(row, position, 1, 1) for row in theirs),
        table_changes=tuple(TableChange(row, position // _BLOCK, row) for row in theirs[turn % _CHANGES :: _CHANGES]),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )


def _admission(row: int) -> Admission:
    sampling = SamplingParams(temperature=0.0)
    return Admission(row=row, request_id=str(row), tokens=(1,) * 100, prompt_length=100, blocks=(), sampling=sampling)


def run(rows: list[int], iterations: int, out: Path, console: Console) -> int:
    """`jaxserve bench control`: prints what hosts add, against the targets, and writes JSON."""
    if min(rows) < 1:
        raise ValueError(f"--rows has {min(rows)}; a batch has at least 1")
    results = [measure(count, iterations) for count in rows]
    title = "what a second host adds to an iteration (loopback, medians of turns; milliseconds)"
    caption = (
        "thread: work of the engine's own; round trip: launch to answer, one at a time, nothing to compute; "
        f"period: between answers, {_STAGES + 1} in flight, {_STAGES} stages of {STAGE_MS:g} ms"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for column in ("rows", "thread", "round trip", "period", "target", "period alone", "plan, bytes a row", "target"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.rows),
            f"{result.thread:.3f}",
            f"{result.round_trip:.3f}",
            f"{result.period:.3f}",
            f"{TARGET_MS:g}",
            f"{result.period_alone:.3f}",
            f"{result.bytes_a_row:.1f}",
            str(TARGET_BYTES),
        )
    console.print(table)
    for result in results:
        for bare in result.bare:
            console.print(
                f"a bare stream of as many bytes, {result.rows} rows, {bare.pause:g} ms in between: round trip "
                f"{bare.round_trip:.3f} ms, processor time of both sides {bare.processor:.3f} ms",
                highlight=False,
            )
    report.write_json(
        out / "control.json", {"benchmark": "control", "environment": machine.environment(), "results": results}
    )
    console.print(f"written: {out / 'control.json'}", highlight=False)
    return 0


def work(coordinator: str, rows: int, link: _Link | None) -> None:
    """The worker's process."""
    membership = MasterConnection(_place(1, coordinator), [], tell=lambda _: None)
    membership.join()
    pipeline = Pipeline(_stages(rows, (1,), link), [NoLink()] * _STAGES)
    membership.agree("ready", 1)
    membership.follow(pipeline, _BLOCKS, stages=(1,), answers=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), _Link(*map(int, sys.argv[3:])) if sys.argv[3:] else None)
