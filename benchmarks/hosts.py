"""What a second host adds to a served model: decodes through two stages of one device each, in one process and in two
over the loopback, in turn.

Beside the control channel two things differ between them. What passes between the stages is copied within a process,
and goes over sockets between two. And the processes compete for cores, with a thread pool each; so every device gets
one thread, and there should be two cores that have nothing else to do.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.control import TARGET_MS
from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.multihost import startup as start
from jaxserve.multihost.config import ClusterConfig
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from server.commands.bench import machine, report

_STAGES = 2
_WINDOW = 30  # iterations that are timed together
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """Milliseconds between two answers while every row decodes, one entry a turn: the median of its windows."""

    rows: int
    one_process: list[float]
    two_hosts: list[float]


class _Told(NamedTuple):
    """What a process is to do. Without a coordinator it has both stages."""

    model: str
    rows: int
    iterations: int
    folder: str  # for compiled programs
    host: int
    coordinator: str | None


def _config(told: _Told) -> EngineConfig:
    plans, context = _STAGES + 1, told.iterations + 32
    return EngineConfig(
        dtype="float32",
        stages=_STAGES,
        max_rows=told.rows,
        buckets=(told.rows,),
        block_size=16,
        max_context=context,
        slots=plans * told.rows * (context + 16),
        scoring=False,
        compilation_cache=told.folder,
    )


def _decode(engine: Engine, told: _Told) -> float:
    """Milliseconds of an iteration while the rows of every plan in flight decode."""
    records: list[Any] = []
    engine.record(records.append)
    sampling = SamplingParams(max_tokens=told.iterations, temperature=0.0, ignore_eos=True)
    for row in range((_STAGES + 1) * told.rows):
        engine.submit(Request(request_id=str(row), prompt=(1 + row % 100,), sampling=sampling), lambda _: None)
    while engine.step():
        pass
    ends = [record.finished_at for record in records if record.decodes == told.rows]
    return 1e3 * statistics.median(b - a for a, b in zip(ends, ends[_WINDOW:], strict=False)) / _WINDOW


def work(told: _Told) -> None:
    """A process: prints the milliseconds, unless it only follows."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print too
    config = _config(told)
    if told.coordinator is None:
        jax.config.update("jax_num_cpu_devices", _STAGES)
        engine = Engine.from_checkpoint(told.model, config)
    else:
        cluster = ClusterConfig(
            hosts=2, host=told.host, coordinator=told.coordinator, record_folder=Path(told.folder), join_timeout=300.0
        )
        if told.host:
            start.follow(told.model, config, cluster, tell=lambda _: None)
            return
        led = start.lead(told.model, config, cluster, tell=lambda _: None)
        engine = Engine(config, led.started, led.tokenizer)
    found = _decode(engine, told)
    engine.stop()
    out.write(json.dumps(found))
    out.close()


def _turn(model: Path, rows: int, iterations: int, folder: str, hosts: int) -> float:
    coordinator = None if hosts == 1 else f"127.0.0.1:{_free_port()}"
    tolds = [_Told(str(model), rows, iterations, folder, host, coordinator) for host in range(hosts)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _ONE_THREAD}
    command = [sys.executable, "-m", "benchmarks.hosts"]
    processes = [
        # Sessions of their own: Ctrl-C is ours, who end them, and not theirs to show where they were.
        subprocess.Popen(
            [*command, json.dumps(told)], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        for told in tolds
    ]
    try:
        said, _ = processes[0].communicate()
        if not processes[0].returncode:
            processes[-1].wait(60)
    finally:
        for process in processes:
            process.kill()  # those that have not ended
            process.wait()
    if processes[0].returncode:
        raise RuntimeError(f"a process with the model in it ended with {processes[0].returncode}; see above")
    return float(json.loads(said))


def _free_port() -> int:
    """With the next one free as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def run(model: Path, rows: int, iterations: int, turns: int, out: Path, console: Console) -> int:
    """`jaxserve bench hosts`: prints the periods of every turn and their medians, and writes JSON.

    Raises:
      ValueError: there is no such checkpoint, or there are too few iterations for a period.
    """
    if iterations <= _WINDOW:
        raise ValueError(f"--iterations is {iterations}; {_WINDOW} are timed together, so it must be more")
    weights.read_config(model)  # here, and not in every process
    periods = Periods(rows=rows, one_process=[], two_hosts=[])
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            periods.one_process.append(_turn(model, rows, iterations, folder, 1))
            periods.two_hosts.append(_turn(model, rows, iterations, folder, 2))
    pairs = list(zip(periods.one_process, periods.two_hosts, strict=True))
    more = statistics.median(two - one for one, two in pairs)
    table = Table(title=f"milliseconds of an iteration of {rows} decodes, two stages", title_justify="left")
    for column in ("turn", "one process", "two hosts", "more", "target"):
        table.add_column(column, justify="right")
    for turn, (one, two) in enumerate(pairs):
        table.add_row(str(turn), f"{one:.3f}", f"{two:.3f}", f"{two - one:.3f}", "")
    medians = statistics.median(periods.one_process), statistics.median(periods.two_hosts)
    table.add_row("median", *(f"{each:.3f}" for each in (*medians, more)), f"{TARGET_MS:g}")
    console.print(table)
    path = out / "hosts.json"
    report.write_json(path, {"benchmark": "hosts", "environment": machine.environment(), "results": [periods]})
    console.print(f"written: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    work(_Told(*json.loads(sys.argv[1])))
