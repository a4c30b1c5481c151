"""`python -m benchmarks regression`: compares a few times with those in regression.json.

Each time is a multiple of a yardstick's.

A yardstick is work of the same kind that no change of ours affects, so a slower or busier machine slows both down.
Single-threaded work is measured in processor time, which excludes the time when other processes have the core.
regression.json has the multiples for each kind of CPU, since wider instructions speed up a step and its yardstick
differently, and how much larger each may become.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, host
from jaxserve import startup
from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.iteration import IterationResult
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.factory import make_scheduler
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.cpu import build
from server.commands.bench import machine, report, shapes, step
from server.commands.console import Progress, progress_bars, tables

HELP = """\
Measures a few figures as multiples of a calibration loop that runs between them (a matmul, a read of memory, a loop of
plain Python), and compares them with those kept in the repository, so that another machine or a busy one does not look
like a slowdown. Exits with 1 when a figure is too large in two measurements."""

KEPT = Path(__file__).with_name("regression.json")
ALLOWED = 1.5  # the default for a figure that is new in regression.json
ROUNDS = 5
SHAPE = "gpt2"

Clock = Callable[[], float]  # does its work once; returns the seconds that count


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedTime:
    """A piece of work whose time is guarded.

    Attributes:
      yardstick: the name of the work that its time is divided by.
    """

    name: str
    yardstick: str
    seconds: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFigure:
    """A figure in regression.json.

    Attributes:
      multiple: the time divided by the yardstick's when it was written.
      allowed: how many times as large it may be now.
    """

    multiple: float
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A figure now beside the kept one; `kept` is None for a new figure."""

    name: str
    now: float
    kept: KeptFigure | None

    @property
    def holds(self) -> bool:
        return self.kept is None or self.now <= self.kept.multiple * self.kept.allowed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this benchmark."""
    parser.add_argument("--write", action="store_true", help="keep what is measured now")


def run(args: argparse.Namespace) -> int:
    """Measures, and compares with what is kept or, with --write, keeps it.

    Returns:
      The exit code: 1 when a figure is larger than allowed in two measurements.
    """
    write, console = args.write, tables()
    kind = cpu_kind()
    kept = read(KEPT, kind)
    with progress_bars() as bars:
        figures, yardsticks = make_figures(bars), make_yardsticks()
        now = measure(figures, yardsticks, bars, "measuring")
        late = [figure for figure in figures if not judge({figure.name: now[figure.name]}, kept)[0].holds]
        if late and not write:  # a real slowdown shows in a second measurement as well
            again = measure(late, yardsticks, bars, "measuring again what looks slower")
            now |= {name: min(now[name], multiple) for name, multiple in again.items()}
    found = judge(now, kept)
    print_findings(console, found)
    if write:
        figures = {f.name: {"multiple": f.now, "allowed": f.kept.allowed if f.kept else ALLOWED} for f in found}
        this_kind = {"environment": machine.environment(), "figures": figures}
        report.write_json(KEPT, _all_kinds(KEPT) | {kind: this_kind}, console)
        return 0
    if not kept:
        console.print(f"nothing is kept for CPUs like this one ({kind}); --write keeps these figures", highlight=False)
    return 0 if all(finding.holds for finding in found) else 1


def cpu_kind() -> str:
    """The kind of this CPU, as far as figures in float32 depend on it."""
    return build.level().removesuffix("-bf16")


def read(path: Path, kind: str) -> dict[str, KeptFigure]:
    """The figures kept for a kind of CPU by name; empty where there is no such file or kind."""
    this_kind = _all_kinds(path).get(kind, {"figures": {}})
    return {name: KeptFigure(**fields) for name, fields in this_kind["figures"].items()}


def _all_kinds(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def judge(now: Mapping[str, float], kept: Mapping[str, KeptFigure]) -> list[Finding]:
    """Sets the figures beside those that are kept."""
    return [Finding(name=name, now=multiple, kept=kept.get(name)) for name, multiple in now.items()]


def print_findings(console: Console, found: Sequence[Finding]) -> None:
    """Prints a table of the figures."""
    table = Table(title="figures as multiples of their yardsticks", title_justify="left")
    for column in ("figure", "kept", "now", "now / kept", "allowed", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for finding in found:
        kept = finding.kept
        if kept is None:
            table.add_row(finding.name, "-", f"{finding.now:.4g}", "-", "-", "new")
            continue
        verdict = "holds" if finding.holds else "SLOWER"
        growth = f"{finding.now / kept.multiple:.2f}x"
        table.add_row(finding.name, f"{kept.multiple:.4g}", f"{finding.now:.4g}", growth, f"{kept.allowed:g}x", verdict)
    console.print(table)


def measure(
    figures: Sequence[GuardedTime], yardsticks: Mapping[str, Clock], bars: Callable[[str, int, int], None], name: str
) -> dict[str, float]:
    """Each figure as a multiple of its yardstick before and after it; the median over rounds."""
    multiples: dict[str, list[float]] = {figure.name: [] for figure in figures}
    for done in range(ROUNDS):
        bars(name, done, ROUNDS)
        for figure in figures:
            yardstick = yardsticks[figure.yardstick]
            before, seconds, after = yardstick(), figure.seconds(), yardstick()
            multiples[figure.name].append(2 * seconds / (before + after))
    bars(name, ROUNDS, ROUNDS)
    return {name: statistics.median(each) for name, each in multiples.items()}


def make_yardsticks() -> dict[str, Clock]:
    """The yardsticks by name: a matmul, a read of memory and a loop of plain Python."""
    rng = np.random.default_rng(0)
    square = rng.standard_normal((1024, 1024), np.float32)
    large, vector = rng.standard_normal((8192, 8192), np.float32), np.ones(8192, np.float32)

    def python() -> None:
        table: dict[int, list[int]] = {}
        for number in range(30_000):
            table.setdefault(number & 255, []).append(number)

    return {
        "matmul": lambda: _least(lambda: square @ square, time.perf_counter),
        "read": lambda: _least(lambda: large @ vector, time.perf_counter),  # 256 MiB, once
        "python": lambda: _least(python, time.thread_time),
    }


def _least(work: Callable[[], Any], clock: Clock) -> float:
    """The seconds of some work by a clock, from a few runs."""
    times = []
    for _ in range(6):
        started = clock()
        work()
        times.append(clock() - started)
    return _quicker(times)


def make_figures(bars: Progress) -> list[GuardedTime]:
    """The guarded figures, with their programs compiled."""
    decode, prefill = step.Case(decodes=8, context=100), step.Case(prompt=256)
    model_config, params = shapes.random_params(SHAPE, "float32")
    cached = EngineConfig(compilation_cache=str(checkpoints.cache_folder() / "xla"))
    settings = dataclasses.replace(cached, dtype="float32", max_rows=8, buckets=(8, 256), slots=8 * 256, scoring=False)
    (replica,) = startup.from_params(model_config, params, settings, bars).loops

    def a_step(case: step.Case, steps: int) -> Clock:
        return lambda: _quicker(step.time_case(replica, case, steps)) / 1000

    load = host.BusyEngine(8, [0], cached, bars)
    text = text_seconds(Tokenizer.from_directory(DEMO_MODEL))

    def host_seconds() -> float:
        return load.run(0, 100).median / 1000

    return [
        GuardedTime(name="decode step, 8 rows", yardstick="read", seconds=a_step(decode, 8)),
        GuardedTime(name="prefill step, 256 tokens", yardstick="matmul", seconds=a_step(prefill, 3)),
        GuardedTime(name="host, an iteration of 8 rows", yardstick="python", seconds=host_seconds),
        GuardedTime(name="scheduler, an iteration of 64 rows", yardstick="python", seconds=scheduler_seconds),
        GuardedTime(name="text, a token", yardstick="python", seconds=text),
    ]


def _quicker(times: Sequence[float]) -> float:
    """The mean of the quicker half: other processes slow the machine in bursts."""
    return statistics.fmean(sorted(times)[: max(1, len(times) // 2)])


def scheduler_seconds(rows: int = 64, iterations: int = 200) -> float:
    """Seconds of schedule and complete with all rows decoding and as many requests waiting."""
    costs = [BucketCost(size=size, compile_seconds=0.0, milliseconds=10.0 + size) for size in (16, 64, 128, 512)]
    config = EngineConfig(max_rows=rows, prefix_cache=False)
    groups = CacheGroups(block_size=16, max_context=1024, n_rows=rows, most_tokens=costs[-1].size)
    scheduler = make_scheduler(config, costs, n_blocks=64 * rows, groups=groups, eos_token_ids=frozenset())
    for number in range(2 * rows):
        sampling = SamplingParams(max_tokens=50 + number, temperature=0.0, ignore_eos=True)
        prompt = tuple(range(number + 1, number + 65))
        scheduler.submit(Request(request_id=str(number), prompt=prompt, sampling=sampling))
    times = []
    for _ in range(iterations):
        started = time.thread_time()
        plan = scheduler.schedule()
        if plan is None:
            break
        count = len(plan.chunks)
        scheduler.complete(plan, IterationResult(tokens=np.full(count, 7, np.int32), logprobs=np.zeros(count)))
        times.append(time.thread_time() - started)
    return _quicker(times)


def text_seconds(tokenizer: Tokenizer | None) -> Clock:
    """Measures the seconds to turn one token of a stream into text."""
    assert tokenizer is not None
    tokens = tokenizer.encode("The scheduler may admit, drop or return requests after every iteration. " * 40)

    def once() -> float:
        stream = tokenizer.stream()
        times = []
        for begin in range(0, len(tokens), 16):
            part = tokens[begin : begin + 16]
            started = time.thread_time()
            for token in part:
                stream.push([token])
            times.append((time.thread_time() - started) / len(part))
        return _quicker(times)

    return once
