"""The outcome of each job, and the distribution of a metric over jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Size, mean and percentiles of a sample, in the sample's unit.

    Percentiles are interpolated linearly between order statistics.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The distribution of a sample; None if it is empty."""
        sample = np.fromiter(values, dtype=np.float64)
        if not sample.size:
            return None
        p50, p95, p99 = (float(p) for p in np.percentile(sample, (50, 95, 99)))
        return cls(count=sample.size, mean=float(sample.mean()), p50=p50, p95=p95, p99=p99, max=float(sample.max()))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one job. Times are seconds on the clock of the run.

    Attributes:
      token_times: time of each generated token; tokens that came together have equal times.
      error: why the job was refused or did not finish.
    """

    arrival: float
    prompt_tokens: int
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def first_token(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival

    @property
    def normalised(self) -> float:
        """Seconds from arrival to the last token per generated token (OSDI'22 section 6.2)."""
        return (self.token_times[-1] - self.arrival) / len(self.token_times)

    @property
    def tpot(self) -> float:
        """Mean seconds between its tokens; 0 if it has only one."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
