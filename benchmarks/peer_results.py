"""Results of `python -m benchmarks peers`: kept after each turn, checked, printed as tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.environments import OURS, PeerError
from server.commands.bench import report
from server.commands.bench.step import Case

# Tolerated differences of logprobs. llama.cpp looks GeLU up in half precision even in float32.
# Weights are rounded in another way by each engine.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "int8": 0.2, "int4": 1.0}
OPENING = 4  # tokens of each request that are compared with ours under load
SAME_OPENINGS = 0.5  # the least share of equal openings: rounding changes a few, a broken engine nearly all
# Figures of a load: label -> where its answer has the figure.
METRICS = {
    "generated tokens/s": ("tokens_per_second",),
    "time to first token p50, ms": ("first_token_ms", "p50"),
    "time to first token p95, ms": ("first_token_ms", "p95"),
    "time between tokens p50, ms": ("between_tokens_ms", "p50"),
    "time between tokens p95, ms": ("between_tokens_ms", "p95"),
    "time between tokens p99, ms": ("between_tokens_ms", "p99"),
    "normalised latency p95, ms/token": ("normalised_ms", "p95"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a peer's outputs compare with ours.

    Attributes:
      largest: the largest difference of a logprob; None where the peer reports none.
      mismatches: tokens of ours that the peer finds clearly less likely than another.
    """

    largest: float | None
    mismatches: int
    tolerance: float

    @property
    def holds(self) -> bool:
        return (self.largest or 0.0) <= self.tolerance and self.mismatches == 0


def agreement(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], held: str) -> Agreement:
    """Compares our completions (jobs.complete) with a peer's scores of the same sequences.

    Args:
      held: the dtype, or how weights are quantized.
    """
    tolerance = TOLERANCES[held]
    largest, mismatches = None, 0
    for mine, other in zip(ours, theirs, strict=True):
        if other["logprobs"] is not None:
            largest = max(largest or 0.0, float(np.abs(np.subtract(mine["logprobs"], other["logprobs"])).max()))
        generated = len(mine["gaps"])
        rows = zip(mine["tokens"][-generated:], other["likeliest"][-generated:], mine["gaps"], strict=True)
        # Where two tokens are about as likely, rounding decides.
        mismatches += sum(token != likeliest and gap > tolerance for token, likeliest, gap in rows)
    return Agreement(largest=largest, mismatches=mismatches, tolerance=tolerance)


def same_openings(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of requests whose first tokens are ours."""
    return statistics.fmean(mine[:OPENING] == other[:OPENING] for mine, other in zip(ours, theirs, strict=True))


class PeerTurn(NamedTuple):
    """One piece of work that one engine does once.

    Attributes:
      work: "check", "steps", "capacity" or a load such as "load 0.8".
    """

    shape: str
    dtype: str
    engine: str
    work: str
    round: int


class PeerResults:
    """Answers by turn, and problems, written to a file after each.

    Args:
      about: the settings of the run; `resume` keeps the turns of an earlier run with the same settings.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        self.path, self.about = path, json.loads(json.dumps(about))
        self.answers: dict[PeerTurn, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        if resume and path.exists():
            kept = json.loads(path.read_text())
            if kept["about"] != self.about:
                raise ValueError(f"{path} is of a run with other settings; leave --resume out to begin anew")
            self.answers = {PeerTurn(*turn): answer for turn, answer in kept["turns"]}

    def do(self, turn: PeerTurn, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The answer of a turn, which runs unless its answer is known; None when it failed."""
        if turn not in self.answers:
            try:
                answer = work()
            except PeerError as error:
                self.problem(f"{turn.engine}, {turn.shape}, {turn.dtype}, {turn.work}: {error}")
                return None
            self.answers[turn] = answer
            self.write()
        return self.answers[turn]

    def problem(self, line: str) -> None:
        """Records what went wrong."""
        self.problems.append(line)
        self.write()

    def rounds(self, shape: str, dtype: str, engine: str, work: str) -> list[dict[str, Any]]:
        """The answers to the same work in every round so far."""
        return [answer for turn, answer in self.answers.items() if turn[:4] == (shape, dtype, engine, work)]

    def write(self, **more: Any) -> None:
        """Writes everything so far."""
        result = {"benchmark": "peers", "about": self.about, **more}
        result |= {"notes": self.notes, "problems": self.problems, "turns": list(self.answers.items())}
        report.write_json(self.path, result)


def against_best(values: Mapping[str, float | None], *, higher: bool) -> tuple[str, float] | None:
    """The best peer, and our figure divided by its; None where ours or every peer's is missing."""
    ours = values.get(OURS)
    theirs = {name: value for name, value in values.items() if name != OURS and value}
    if not ours or not theirs:
        return None
    best = (max if higher else min)(theirs, key=lambda name: theirs[name])
    return best, ours / theirs[best]


def print_all(
    console: Console, results: PeerResults, cases: Sequence[Case], loads: Sequence[float]
) -> list[dict[str, Any]]:
    """Prints the tables of every model and dtype; returns our ratios to the best peers."""
    ratios: list[dict[str, Any]] = []
    for shape, dtype in dict.fromkeys((turn.shape, turn.dtype) for turn in results.answers):
        ratios += _print_steps(console, results, shape, dtype, cases) if cases else []
        for share in loads:
            ratios += _print_load(console, results, shape, dtype, share)
    for turn, answer in results.answers.items():
        if turn.work == "check" and turn.engine != OURS:
            within = "not reported" if answer["largest"] is None else f"within {answer['largest']:.4f}"
            console.print(
                f"outputs of {turn.engine} and ours ({turn.shape}, {turn.dtype}): logprobs {within} (tolerance "
                f"{answer['tolerance']:g}), {answer['mismatches']} greedy tokens differ"
            )
    versions = dict.fromkeys(answer["version"] for answer in results.answers.values() if "version" in answer)
    for line in (*versions, *results.notes):
        console.print(line, markup=False)
    for problem in results.problems:
        console.print(problem, style="red", markup=False)
    return ratios


def _print_steps(
    console: Console, results: PeerResults, shape: str, dtype: str, cases: Sequence[Case]
) -> list[dict[str, Any]]:
    rounds = _rounds(results, shape, dtype, "steps")
    table = _table(f"{shape}, {dtype}: ms a step (medians); ratio: how many times as fast as the best peer", rounds)
    ratios = []
    for case in cases:
        values = {name: _median(each["milliseconds"].get(case.name) for each in rounds[name]) for name in rounds}
        best, ratio = against_best(values, higher=False) or (None, 0.0)
        _add_row(table, case.name, values, ".1f", best, None if best is None else 1 / ratio)
        if best is not None:
            ratios.append({"shape": shape, "dtype": dtype, "case": case.name, "ratio": 1 / ratio, "against": best})
    peaks = {name: max((each["peak_rss"] or 0 for each in rounds[name]), default=None) for name in rounds}
    mebibytes = {name: peak and peak / 2**20 for name, peak in peaks.items()}
    _add_row(table, "peak memory, MiB", mebibytes, ".0f", None, None)
    console.print(table)
    return ratios


def _print_load(console: Console, results: PeerResults, shape: str, dtype: str, share: float) -> list[dict[str, Any]]:
    rounds = _rounds(results, shape, dtype, f"load {share:g}")
    capacity = results.rounds(shape, dtype, OURS, "capacity")
    if not capacity or not any(rounds.values()):
        return []
    rate, target = capacity[0]["requests_per_second"], results.about["config"]["target_tpot"]
    objective = f" (without an objective; here it is {1e3 * target:g} ms a token)" if target else ""
    table = _table(
        f"{shape}, {dtype}: {results.about['workload']} at {share * rate:.2f}/s, {share:.0%} of our {rate:.2f}/s with "
        f"all waiting{objective}; ratio: ours / best peer's of each line",
        rounds,
    )
    ratios = []
    for metric, path in METRICS.items():
        values = {name: _median(_figure(each, path) for each in rounds[name]) for name in rounds}
        best, ratio = against_best(values, higher=metric == "generated tokens/s") or (None, None)
        _add_row(table, metric, values, ".1f", best, ratio)
        if best is not None:
            where = {"shape": shape, "dtype": dtype, "load": share, "metric": metric}
            ratios.append({**where, "ratio": ratio, "against": best})
    same = {name: _median(each.get("same") for each in rounds[name]) for name in rounds}
    _add_row(table, "answers that begin as ours", same, ".0%", None, None)
    console.print(table)
    return ratios


def _rounds(results: PeerResults, shape: str, dtype: str, work: str) -> dict[str, list[dict[str, Any]]]:
    """The answers of every engine, ours first."""
    names = dict.fromkeys(turn.engine for turn in results.answers if (turn.shape, turn.dtype) == (shape, dtype))
    return {name: results.rounds(shape, dtype, name, work) for name in sorted(names, key=lambda name: name != OURS)}


def _figure(answer: Any, path: Sequence[str]) -> float:
    for name in path:
        answer = answer[name]
    return answer


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _table(title: str, engines: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in (*engines, "ratio", "best peer"):
        table.add_column(name, justify="right")
    return table


def _add_row(
    table: Table, label: str, values: Mapping[str, float | None], form: str, best: str | None, ratio: float | None
) -> None:
    cells = ["-" if value is None else f"{value:{form}}" for value in values.values()]
    table.add_row(label, *cells, "-" if ratio is None else f"{ratio:.2f}x", best or "-")
