"""What another engine's figures are held against: do its outputs agree with ours, and how do the times compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.bench.step import Case

OURS = "jaxserve"
# How far logprobs may differ. llama.cpp looks GeLU up in half precision even in float32.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a peer's outputs compare with ours: the largest difference of a logprob, and clear misses of our tokens."""

    largest: float
    mismatches: int
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.largest <= self.tolerance and self.mismatches == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Our time against a peer's on one case.

    Attributes:
      against: the peer that counts: the fastest one, or transformers where the target is stated against it.
      limit: most that our time may be, as a multiple of the peer's.
    """

    ours: float
    against: str
    theirs: float
    limit: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def reached(self) -> bool:
        return self.ratio <= self.limit


def judge(case: Case, dtype: str, medians: Mapping[str, float | None]) -> Verdict | None:
    """Holds one case of one dtype to its target; None while ours or every peer that counts is missing."""
    ours = medians.get(OURS)
    theirs = {name: value for name, value in medians.items() if name != OURS and value is not None}
    if case.prompt:
        limit = 1.0
    else:
        limit = 1.4 if case.decodes == 1 else {"float32": 1.3, "bfloat16": 1.15}[dtype]
        if dtype == "bfloat16":
            theirs = {name: value for name, value in theirs.items() if name == "transformers"}
    if ours is None or not theirs:
        return None
    best = min(theirs, key=lambda name: theirs[name])
    return Verdict(ours=ours, against=best, theirs=theirs[best], limit=limit)


def agreement(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], dtype: str) -> Agreement:
    """Compares completions of ours (step.complete) with a peer's scores of the same sequences."""
    tolerance = TOLERANCES[dtype]
    largest, mismatches = 0.0, 0
    for mine, other in zip(ours, theirs, strict=True):
        largest = max(largest, float(np.abs(np.subtract(mine["logprobs"], other["logprobs"])).max()))
        generated = len(mine["gaps"])
        rows = zip(mine["tokens"][-generated:], other["likeliest"][-generated:], mine["gaps"], strict=True)
        # Where two tokens are about as likely, rounding decides.
        mismatches += sum(token != likeliest and gap > tolerance for token, likeliest, gap in rows)
    return Agreement(largest=largest, mismatches=mismatches, tolerance=tolerance)
