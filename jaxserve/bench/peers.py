"""Our step against other engines' on this machine: the same checkpoint, the same dtype, one process at a time, in turn.

Every engine runs jobs, which are JSON files: `model` (a checkpoint in its own format), `dtype`, `threads`, and either
  * `cases` (decodes, context, prompt; see step.Case) and `steps`: it prints `milliseconds`, a list for each case, and
    may print `settings` that it found best and will be told in its next job, or
  * `sequences` of equal length and `prompt_length`: it scores them, the prompts as a whole and the rest token by token
    through its cache, and prints `scores`: of every sequence the `logprobs` of its tokens and the `likeliest` ones.
Ours takes `prompts` and `steps` in place of sequences, and generates them (step.complete).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import environments, machine, plot, report
from jaxserve.bench.environments import PEERS, PeerError
from jaxserve.bench.judge import OURS, Agreement, agreement, judge
from jaxserve.bench.progress import Bars
from jaxserve.bench.step import Case

MEMORY_MARGIN = 600 * 10**6  # bytes that a process may hold beside weights and pool
CHECK_PROMPTS, CHECK_LENGTH, CHECK_STEPS = 3, 24, 8

Runner = Callable[[dict[str, Any]], dict[str, Any]]  # job -> what the engine printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine in one dtype."""

    engine: str
    dtype: str
    model: Path
    run: Runner

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}"


@dataclass(slots=True, kw_only=True)
class Figures:
    """What one contender did: for each case the median milliseconds of every round, and its memory in bytes."""

    rounds: dict[Case, list[float]] = field(default_factory=dict)
    peak_rss: int = 0
    allowed_rss: int | None = None
    version: str = ""
    settings: Any = None

    def as_json(self) -> dict[str, Any]:
        """The same with cases by name."""
        return {
            "version": self.version,
            "settings": self.settings,
            "rounds_ms": {case.name: values for case, values in self.rounds.items()},
            "peak_rss": self.peak_rss,
            "allowed_rss": self.allowed_rss,
        }

    def median(self, case: Case) -> float | None:
        return statistics.median(self.rounds[case]) if self.rounds.get(case) else None


def run(
    checkpoint: Path,
    peers: Sequence[str],
    dtypes: Sequence[str],
    cases: Sequence[Case],
    *,
    steps: int,
    rounds: int,
    env_dir: Path,
    compilation_cache: str | None,
    out: Path,
    console: Console,
) -> int:
    """`jaxserve bench peers`: checks the engines' outputs against each other, times them in turn, and judges.

    Returns:
      The exit code: 1 when a peer could not be made or run, or its outputs differ from ours; a missed target is a
      finding, not a failure.
    """
    problems: list[str] = []
    with Bars() as bars, tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as scratch:
        contenders = [
            Contender(
                engine=OURS,
                dtype=dtype,
                model=checkpoint,
                run=lambda job: _run_ours({**job, "compilation_cache": compilation_cache}, Path(scratch)),
            )
            for dtype in dtypes
        ]
        for name in peers:
            try:
                contenders += _contenders(name, checkpoint, dtypes, env_dir, Path(scratch), bars)
            except PeerError as error:
                problems.append(str(error))
                bars.say(str(error))
        contenders, agreements = _check(contenders, problems, bars)
        figures = _measure(contenders, cases, steps, rounds, problems, bars)

    verdicts = _print(console, checkpoint, contenders, figures, cases)
    for name, found in agreements.items():
        console.print(
            f"outputs of {name} and ours: logprobs within {found.largest:.4f} (tolerance {found.tolerance:g}), "
            f"{found.mismatches} greedy tokens differ",
            highlight=False,
        )
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    report.write_json(
        out / "peers.json",
        {
            "benchmark": "peers",
            "environment": machine.environment(),
            "model": str(checkpoint),
            "steps": steps,
            "engines": {contender.name: figures[contender.name].as_json() for contender in contenders},
            "agreement": agreements,
            "verdicts": verdicts,
            "problems": problems,
        },
    )
    series = {c.name: [figures[c.name].median(case) for case in cases] for c in contenders}
    plot.bars(out / "peers.png", f"{checkpoint.name}: ms a step", [case.name for case in cases], series)
    console.print(f"written: {out / 'peers.json'}, {out / 'peers.png'}", highlight=False)
    return 1 if problems else 0


def _run_ours(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "jaxserve.bench.step", str(path)]
    return json.loads(environments.run_command(command, OURS))


def _contenders(
    name: str, checkpoint: Path, dtypes: Sequence[str], env_dir: Path, scratch: Path, bars: Bars
) -> list[Contender]:
    """A peer in every dtype, its environment made and its checkpoints converted."""
    peer = PEERS[name]
    python = environments.ensure(peer, env_dir, bars.say)

    def run_peer(job: dict[str, Any]) -> dict[str, Any]:
        path = scratch / "job.json"
        path.write_text(json.dumps(job))
        return json.loads(environments.run_script(python, peer.script, str(path), name=name))

    contenders = []
    for dtype in dtypes:
        model = checkpoint
        if peer.converter is not None:
            model = env_dir / f"{checkpoint.name}-{_fingerprint(checkpoint)}-{dtype}.gguf"
            if not model.exists():
                bars.say(f"converting the checkpoint for {name}: {model}")
                # Written aside and renamed, so that what bears the name is whole.
                partial = model.with_suffix(".partial")
                environments.run_script(python, peer.converter, str(checkpoint), str(partial), dtype, name=name)
                partial.rename(model)
        contenders.append(Contender(engine=name, dtype=dtype, model=model, run=run_peer))
    return contenders


def _fingerprint(checkpoint: Path) -> str:
    """Changes when a checkpoint's files do."""
    files = sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((checkpoint.resolve(), seen)).encode()).hexdigest()[:10]


def _job(contender: Contender, **fields: Any) -> dict[str, Any]:
    return {
        "model": str(contender.model),
        "dtype": contender.dtype,
        "threads": machine.usable_cores(),
        **fields,
    }


def _check(
    contenders: Sequence[Contender], problems: list[str], bars: Bars
) -> tuple[list[Contender], dict[str, Agreement]]:
    """Keeps the contenders whose outputs agree with ours in their dtype."""
    from jaxserve import weights

    kept, agreements, ours = [], {}, {}
    for done, contender in enumerate(sorted(contenders, key=lambda c: c.engine != OURS)):
        bars("checking outputs against each other", done, len(contenders))
        try:
            if contender.engine == OURS:
                vocab_size = weights.read_config(contender.model).vocab_size
                prompts = np.random.default_rng(0).integers(vocab_size, size=(CHECK_PROMPTS, CHECK_LENGTH)).tolist()
                job = _job(contender, prompts=prompts, steps=CHECK_STEPS)
                ours[contender.dtype] = contender.run(job)["completions"]
            elif contender.dtype in ours:
                sequences = [completion["tokens"] for completion in ours[contender.dtype]]
                job = _job(contender, sequences=sequences, prompt_length=CHECK_LENGTH)
                found = agreement(ours[contender.dtype], contender.run(job)["scores"], contender.dtype)
                agreements[contender.name] = found
                if not found.holds:
                    raise PeerError(f"the outputs of {contender.name} are not ours: {found}; it is left out")
            kept.append(contender)
        except PeerError as error:
            problems.append(str(error))
            bars.say(str(error))
    bars("checking outputs against each other", len(contenders), len(contenders))
    return kept, agreements


def _measure(
    contenders: Sequence[Contender], cases: Sequence[Case], steps: int, rounds: int, problems: list[str], bars: Bars
) -> dict[str, Figures]:
    """Runs the contenders in turn, round after round, each alone in a fresh process."""
    figures = {contender.name: Figures() for contender in contenders}
    total = rounds * len(contenders)
    for turn in range(total):
        contender = contenders[turn % len(contenders)]
        bars(f"timing in turn, {rounds} rounds", turn, total)
        mine = figures[contender.name]
        try:
            asked = [dataclasses.asdict(case) for case in cases]
            job = _job(contender, cases=asked, steps=steps, settings=mine.settings)
            answer = contender.run(job)
        except PeerError as error:
            problems.append(str(error))
            bars.say(str(error))
            continue
        for case, milliseconds in zip(cases, answer["milliseconds"], strict=True):
            mine.rounds.setdefault(case, []).append(statistics.median(milliseconds))
        mine.peak_rss = max(mine.peak_rss, answer["peak_rss"] or 0)
        mine.version = answer.get("version", "")
        mine.settings = answer.get("settings")
        if contender.engine == OURS:
            mine.allowed_rss = answer["weights"] + answer["pool"] + MEMORY_MARGIN
    bars(f"timing in turn, {rounds} rounds", total, total)
    return figures


def _print(
    console: Console,
    checkpoint: Path,
    contenders: Sequence[Contender],
    figures: Mapping[str, Figures],
    cases: Sequence[Case],
) -> list[dict[str, Any]]:
    """Prints one table a dtype; returns the verdicts."""
    verdicts = []
    for dtype in dict.fromkeys(contender.dtype for contender in contenders):
        group = [contender for contender in contenders if contender.dtype == dtype]
        table = Table(title=f"{checkpoint.name}, {dtype}: ms a step (medians)", title_justify="left")
        table.add_column("")
        for contender in group:
            table.add_column(contender.engine, justify="right")
        for column in ("ratio", "against", "target", ""):
            table.add_column(column, justify="right")
        for case in cases:
            medians = {contender.engine: figures[contender.name].median(case) for contender in group}
            cells = ["-" if value is None else f"{value:.1f}" for value in medians.values()]
            verdict = judge(case, dtype, medians)
            if verdict is None:
                table.add_row(case.name, *cells, "-", "-", "-", "")
                continue
            verdicts.append(
                {
                    "case": case.name,
                    "dtype": dtype,
                    "ratio": verdict.ratio,
                    "against": verdict.against,
                    "limit": verdict.limit,
                    "reached": verdict.reached,
                }
            )
            told = "reached" if verdict.reached else "missed"
            table.add_row(case.name, *cells, f"{verdict.ratio:.2f}x", verdict.against, f"{verdict.limit:.2f}x", told)
        memory = [f"{figures[contender.name].peak_rss / 2**20:.0f}" for contender in group]
        allowed, told = "-", ""
        mine = next((figures[contender.name] for contender in group if contender.engine == OURS), None)
        if mine is not None and mine.allowed_rss is not None:
            allowed = f"{mine.allowed_rss / 2**20:.0f}"
            told = "reached" if mine.peak_rss <= mine.allowed_rss else "missed"
        table.add_row("peak memory, MiB (ours: weights + pool + 600 MB)", *memory, "", "", allowed, told)
        console.print(table)
    for version in dict.fromkeys(figure.version for figure in figures.values() if figure.version):
        console.print(version, highlight=False)
    return verdicts
