"""What the front door costs and stands: overload, and what it takes from the engine. The server is another process and
is reached over the wire only; what this process, the load generator, needs for itself is reported apart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Job, Workload
from server.commands.bench import machine, offline, report, serve, wire
from server.commands.bench.progress import Bars

REFUSAL_TARGET = 0.020  # seconds, p99
LATENCY_TARGET = 1.10  # p95 of what is accepted under overload, as a multiple of the un-overloaded one
ITERATION_TARGET = 1.05  # iterations served, as a multiple of those offline, where the front door has its own core
FRONTS = ("process", "thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Calls of one phase.

    Attributes:
      accepted / refused: seconds from a call's time to its end.
      seconds: that the phase took.
      server / door / generator: seconds of CPU of the server's processes, of its event loop's thread (the front door),
        and of this process.
      failed: how calls ended that were neither answered nor told that too much waits.
    """

    accepted: list[float]
    refused: list[float]
    seconds: float
    server: float
    handler: float
    generator: float
    failed: list[str]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.accepted) / self.seconds


def run(
    model: Path,
    config: EngineConfig,
    workload: Workload,
    *,
    queue: int,
    overload: float,
    seconds: float,
    turns: int,
    fronts: Sequence[str],
    out: Path,
    console: Console,
) -> int:
    """`jaxserve bench surface`: prints and writes the result.

    Args:
      workload: as many jobs as there are streams, of equal length, all at once.
      queue: requests that may wait; as many as there are streams at least, which come at once.
      overload: times the sustainable load.
      seconds: that each phase of load lasts.
      turns: times that the streams are sent; an engine without a server and the fronts take turns.
      fronts: of the server (its --front), each a column.

    Returns:
      The exit code: 1 when a call failed.
    """
    config = dataclasses.replace(config, scoring=False, max_rows=len(workload.jobs), max_queued_requests=queue)
    streams: dict[str, list[_Streams]] = {front: [] for front in fronts}
    loads: dict[str, _Loads] = {}
    alone: list[np.ndarray] = []
    with Bars() as bars:
        for turn in range(turns):
            engine = offline.make_engine(model, offline.benchmark_config(config, workload), bars)
            load.fit(workload, engine.max_context)
            alone.append(_gaps(offline.serve_all(engine, workload, "offline", bars).outcomes))
            del engine
            for front in fronts:
                log = out / f"server-{front}.log"
                bars.say(f"starting a server with --front {front}; its output goes to {log}")
                with serve.started_server(model, config, log, front) as (address, pid):
                    known = wire.methods(address)
                    streams[front].append(_streamed(address, pid, known, workload, bars))
                    if turn == turns - 1:
                        callers = config.max_rows + queue
                        loads[front] = _loads(address, pid, known, workload, seconds, callers, overload, bars)
    figures = {front: _figures(workload, np.concatenate(alone), streams[front], loads[front]) for front in fronts}
    failed = [text for front in fronts for text in _failures(streams[front], loads[front])]
    _print(console, f"{model.name}: {workload.name}", figures)
    for text, count in ((text, failed.count(text)) for text in sorted(set(failed))):
        console.print(f"failed: {count} x {text}", highlight=False)
    result = {
        "benchmark": "surface",
        "workload": workload.name,
        "overload": overload,
        "queue": queue,
        "turns": turns,
        "environment": machine.environment(),
        "figures": figures,
        "targets": _TARGETS,
        "failed": failed,
    }
    report.write_json(out / "surface.json", result)
    console.print(f"written: {out / 'surface.json'}", highlight=False)
    return 1 if failed else 0


class _Streams(NamedTuple):
    """All streams at once: what came of them, and seconds of CPU (server, front door, this process)."""

    outcomes: list[Outcome]
    cpu: list[float]


class _Loads(NamedTuple):
    """The load that can be sustained, and a multiple of it."""

    steady: Load
    heavy: Load
    rate: float


_TARGETS = {
    "growth of iteration time": ITERATION_TARGET,
    "refusal latency, ms (p99)": 1000 * REFUSAL_TARGET,
    "growth of accepted latency (p95)": LATENCY_TARGET,
}


def _streamed(address: str, pid: int, known: Mapping[str, wire.Method], workload: Workload, bars: Bars) -> _Streams:
    wire.send(address, workload, known, lambda _: None)  # connections, first-use costs
    before = _cpu(pid)
    sent = wire.send(address, workload, known, lambda n: bars("streams", n, len(workload.jobs)))
    return _Streams(sent.outcomes, [b - a for a, b in zip(before, _cpu(pid), strict=True)])


def _loads(
    address: str,
    pid: int,
    known: Mapping[str, wire.Method],
    workload: Workload,
    seconds: float,
    callers: int,
    overload: float,
    bars: Bars,
) -> _Loads:
    bars("sustainable load", 0, 2)
    steady = asyncio.run(_loaded(address, pid, known["Generate"], workload.jobs, seconds, callers=callers))
    bars("overload", 1, 2)
    rate = overload * steady.rate
    heavy = asyncio.run(_loaded(address, pid, known["Generate"], workload.jobs, seconds, rate=rate))
    bars("overload", 2, 2)
    return _Loads(steady, heavy, rate)


def _figures(workload: Workload, alone: np.ndarray, streams: list[_Streams], loads: _Loads) -> dict[str, float]:
    served = np.concatenate([_gaps(each.outcomes) for each in streams])
    tokens = workload.output_tokens
    cpu = [1000 * float(np.median([each.cpu[part] for each in streams])) / tokens for part in range(3)]
    steady, heavy, rate = loads
    return {
        "streams": len(workload.jobs),
        "offline iteration, ms (p50)": 1000 * float(np.median(alone)),
        "served iteration, ms (p50)": 1000 * float(np.median(served)),
        "growth of iteration time": float(np.median(served) / np.median(alone)),
        "server CPU, ms a token": cpu[0],
        "front door CPU, ms a token": cpu[1],
        "generator CPU, ms a token": cpu[2],
        "sustainable load, requests/s": steady.rate,
        "offered under overload, requests/s": rate,
        "accepted under overload, requests/s": heavy.rate,
        "refused under overload": len(heavy.refused),
        "refusal latency, ms (p50)": 1000 * _percentile(heavy.refused, 50),
        "refusal latency, ms (p99)": 1000 * _percentile(heavy.refused, 99),
        "accepted latency un-overloaded, s (p95)": _percentile(steady.accepted, 95),
        "accepted latency overloaded, s (p95)": _percentile(heavy.accepted, 95),
        "growth of accepted latency (p95)": _percentile(heavy.accepted, 95) / _percentile(steady.accepted, 95),
        "front door CPU under overload, share of a core": heavy.handler / heavy.seconds,
        "generator CPU under overload, share of a core": heavy.generator / heavy.seconds,
    }


def _failures(streams: list[_Streams], loads: _Loads) -> list[str]:
    lost = [outcome.error for each in streams for outcome in each.outcomes if outcome.error]
    return [*loads.steady.failed, *loads.heavy.failed, *lost]


def _print(console: Console, title: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("", *(f"--front {front}" for front in figures), "at most", box=None, title=title)
    for name in next(iter(figures.values())):
        values = [f"{each[name]:.3g}" for each in figures.values()]
        table.add_row(name, *values, f"{_TARGETS[name]:g}" if name in _TARGETS else "")
    console.print(table)


async def _loaded(
    address: str,
    pid: int,
    method: wire.Method,
    jobs: tuple[Job, ...],
    seconds: float,
    *,
    callers: int = 0,
    rate: float = 0.0,
) -> Load:
    """Load for a while: callers who call again once they are answered, or calls at a rate whoever is answered."""
    messages = [wire.encode(index, job, method) for index, job in enumerate(jobs)]
    accepted: list[float] = []
    refused: list[float] = []
    failed: list[str] = []
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        unary = channel.unary_unary(method.path, response_deserializer=method.response.FromString)
        before, start = _cpu(pid), time.monotonic()

        async def one(index: int, due: float) -> None:
            try:
                await unary(messages[index % len(messages)])
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    refused.append(time.monotonic() - due)
                else:
                    failed.append(f"{error.code().name}: {error.details()}")
            else:
                accepted.append(time.monotonic() - due)

        async def again(index: int) -> None:
            while time.monotonic() < start + seconds:
                await one(index, time.monotonic())

        if callers:
            await asyncio.gather(*(again(index) for index in range(callers)))
        else:
            alive = [asyncio.create_task(one(index, due)) async for index, due in _arrivals(start, seconds, rate)]
            await asyncio.gather(*alive)
        passed = time.monotonic() - start
        server, handler, generator = (b - a for a, b in zip(before, _cpu(pid), strict=True))
    return Load(
        accepted=accepted,
        refused=refused,
        seconds=passed,
        server=server,
        handler=handler,
        generator=generator,
        failed=failed,
    )


async def _arrivals(start: float, seconds: float, rate: float) -> AsyncIterator[tuple[int, float]]:
    """(index, when it is due) of a Poisson process, each at its time."""
    rng = np.random.default_rng(0)
    due, index = start, 0
    while (due := due + rng.exponential(1 / rate)) < start + seconds:
        if (early := due - time.monotonic()) > 0:
            await asyncio.sleep(early)
        yield index, due
        index += 1


def _cpu(pid: int) -> tuple[float, float, float]:
    """Seconds of CPU of the server with its child processes, of its first thread (which runs its event loop), and of
    this process.

    Raises:
      ValueError: the system does not tell.
    """
    tick = os.sysconf("SC_CLK_TCK")

    def seconds(path: str) -> float:
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
        except OSError:
            raise ValueError(f"{path} cannot be read; this benchmark needs Linux") from None
        return (int(fields[11]) + int(fields[12])) / tick  # utime, stime: proc(5)

    server = sum(seconds(f"/proc/{each}/stat") for each in (pid, *_children(pid)))
    return server, seconds(f"/proc/{pid}/task/{pid}/stat"), time.process_time()


def _children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def _gaps(outcomes: list[Outcome]) -> np.ndarray:
    """Seconds between the tokens of each stream; while all of them run, that is an iteration."""
    return np.concatenate([np.diff(outcome.token_times) for outcome in outcomes])


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")
