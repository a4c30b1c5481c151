"""What another engine's figures are held against: do its outputs agree with ours, and how do the figures compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.commands.bench.step import Case

OURS = "jaxserve"
# How far logprobs may differ. llama.cpp looks GeLU up in half precision even in float32.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1}
OPENING = 4  # tokens of each request that are compared with ours under load
SAME_OPENINGS = 0.5  # of the requests at least: rounding may decide between two tokens, a broken loop loses nearly all


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a peer's outputs compare with ours: the largest difference of a logprob (None where the peer tells none), and
    clear misses of our tokens."""

    largest: float | None
    mismatches: int
    tolerance: float

    @property
    def holds(self) -> bool:
        return (self.largest or 0.0) <= self.tolerance and self.mismatches == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a load.

    Attributes:
      path: where a summary of a load has it.
      higher: whether more of it is better.
      targets: by dtype, what ours divided by the best peer's is to reach (to stay below, where less is better).
      saturated: whether only the highest load says something about the engine.
    """

    label: str
    path: tuple[str, ...]
    higher: bool = False
    targets: Mapping[str, float] | None = None
    saturated: bool = False

    def of(self, summary: Mapping[str, Any]) -> float:
        value: Any = summary
        for name in self.path:
            value = value[name]
        return value


_LEVEL = {"float32": 1.0, "bfloat16": 1.0}
METRICS = (
    Metric(
        label="generated tokens/s",
        path=("tokens_per_second",),
        higher=True,
        targets={"float32": 1.3, "bfloat16": 1.3},
        saturated=True,
    ),
    Metric(label="time to first token p50, ms", path=("first_token_ms", "p50"), targets=_LEVEL),
    Metric(label="time to first token p95, ms", path=("first_token_ms", "p95"), targets=_LEVEL),
    Metric(label="time between tokens p50, ms", path=("between_tokens_ms", "p50")),
    Metric(
        label="time between tokens p95, ms",
        path=("between_tokens_ms", "p95"),
        targets={"float32": 0.5, "bfloat16": 0.65},
    ),
    Metric(label="time between tokens p99, ms", path=("between_tokens_ms", "p99")),
    Metric(label="normalised latency p95, ms/token", path=("normalised_ms", "p95")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Our figure against the best peer's.

    Attributes:
      ratio: of a step the peer's time divided by ours (how many times as fast), of a load's figure ours divided by the
        peer's.
      target: what the ratio is held to, if anything; at least, or at most where `at_most`.
    """

    ratio: float
    against: str
    target: float | None
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def judge_step(case: Case, medians: Mapping[str, float | None]) -> Verdict | None:
    """Holds the milliseconds of one case to its target; None while ours or every peer's are missing."""
    best = _best(medians, higher=False)
    if best is None:
        return None
    target = 1.0 if case.decodes == 1 or (case.decodes and case.prompt) else 1.2
    return Verdict(ratio=best[1] / best[2], against=best[0], target=target)


def judge_load(metric: Metric, dtype: str, highest: bool, values: Mapping[str, float | None]) -> Verdict | None:
    """Holds one figure of a load to its target; None while ours or every peer's are missing.

    Args:
      highest: whether this is the highest of the loads.
    """
    best = _best(values, higher=metric.higher)
    if best is None:
        return None
    held = metric.targets is not None and (highest or not metric.saturated)
    return Verdict(
        ratio=best[2] / best[1],
        against=best[0],
        target=metric.targets[dtype] if metric.targets is not None and held else None,
        at_most=not metric.higher,
    )


def _best(values: Mapping[str, float | None], *, higher: bool) -> tuple[str, float, float] | None:
    """The best peer's name and figure, and ours."""
    mine = values.get(OURS)
    theirs = {name: value for name, value in values.items() if name != OURS and value}
    if not mine or not theirs:
        return None
    name = (max if higher else min)(theirs, key=lambda each: theirs[each])
    return name, theirs[name], mine


def agreement(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], dtype: str) -> Agreement:
    """Compares completions of ours (jobs.complete) with a peer's scores of the same sequences."""
    tolerance = TOLERANCES[dtype]
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
    same = [mine[:OPENING] == other[:OPENING] for mine, other in zip(ours, theirs, strict=True)]
    return sum(same) / len(same)
