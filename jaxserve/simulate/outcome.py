"""The outcome of each job, and the distribution of a metric over jobs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, log2
from typing import NamedTuple

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

    def add(self, now: float, count: int) -> None:
        """Tokens have come."""
        self.token_times += (now,) * count

    def advance(self, times: Iterable[float]) -> None:
        """A token has come at each of these times."""
        self.token_times.extend(times)

    def ended(self, error: str | None = None) -> None:
        """The job has ended, or was refused."""
        self.error = error

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_times)

    @property
    def end(self) -> float:
        """Time of the last token."""
        return self.token_times[-1]

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


class ShortOutcome(NamedTuple):
    """A job's outcome without the times of its inner tokens (see `Outcome`).

    Attributes:
      tokens: number of generated tokens; without any, `start` and `end` say nothing.
      start / end: times of the first token and of the last.
    """

    arrival: float
    prompt_tokens: int
    tokens: int
    start: float
    end: float
    error: str | None

    @property
    def first_token(self) -> float:
        """Seconds from arrival to the first token."""
        return self.start - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds between its tokens; 0 if it has only one."""
        return (self.end - self.start) / (self.tokens - 1) if self.tokens > 1 else 0.0


class GapCounts:
    """The distribution of the seconds between two tokens, in classes that are 0.14% wide.

    A percentile is the middle of its class, within 0.07%.

    Attributes:
      last / run: the newest gap, and how often it came in a row; these are not in the classes yet.
    """

    _CLASSES = 512  # for a factor of two

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.last, self.run = 0.0, 0

    def count(self, gap: float) -> None:
        """Counts a gap that is not `last`; a run of equal ones, as an iteration has, at once."""
        if self.run:
            self.add(self.last, self.run)
        self.last, self.run = gap, 1

    def add(self, gap: float, count: int) -> None:
        """Count a gap several times."""
        kind = floor(self._CLASSES * log2(gap)) if gap > 0 else -(1 << 62)
        self._counts[kind] = self._counts.get(kind, 0) + count

    def percentile(self, percent: float) -> float | None:
        """The gap, in seconds, that this share does not exceed; None if there is no gap."""
        if self.run:
            self.add(self.last, self.run)
            self.run = 0
        left = percent / 100 * sum(self._counts.values())
        for each in sorted(self._counts):
            left -= self._counts[each]
            if left <= 0:
                return 2.0 ** ((each + 0.5) / self._CLASSES)
        return None


class OutcomeTable:
    """The outcomes of many jobs, in 40 bytes each, and the gaps between their tokens."""

    def __init__(self) -> None:
        self.gaps = GapCounts()
        self._arrivals, self._starts, self._ends = array("d"), array("d"), array("d")
        self._prompts, self._tokens = array("q"), array("q")
        self._errors: dict[int, str] = {}

    def add(self, arrival: float, prompt_tokens: int) -> int:
        """Add a job. Returns its number."""
        self._arrivals.append(arrival)
        self._prompts.append(prompt_tokens)
        self._tokens.append(0)
        self._starts.append(0.0)
        self._ends.append(0.0)
        return len(self._arrivals) - 1

    def ended(self, number: int, *, tokens: int, start: float, end: float) -> None:
        """Note how a job was served."""
        self._tokens[number], self._starts[number], self._ends[number] = tokens, start, end

    def refused(self, number: int, error: str) -> None:
        """Note why a job was refused."""
        self._errors[number] = error

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[ShortOutcome]:
        columns = (self._arrivals, self._prompts, self._tokens, self._starts, self._ends)
        for number, values in enumerate(zip(*columns, strict=True)):
            yield ShortOutcome(*values, self._errors.get(number))


class TableOutcome:
    """Writes the outcome of a live request into a table, as `Outcome` keeps it."""

    __slots__ = ("_end", "_gaps", "_number", "_start", "_table", "tokens")

    def __init__(self, table: OutcomeTable, number: int) -> None:
        self._table, self._gaps, self._number, self.tokens = table, table.gaps, number, 0
        self._start = self._end = 0.0

    def add(self, now: float, count: int) -> None:
        """Tokens have come."""
        if not self.tokens:
            self._start = now
        elif (gap := now - self._end) == self._gaps.last:
            self._gaps.run += 1
        else:
            self._gaps.count(gap)
        if count > 1:
            self._gaps.add(0.0, count - 1)
        self._end = now
        self.tokens += count

    def advance(self, times: Sequence[float]) -> None:
        """A token has come at each of these times; the gaps are counted."""
        self.tokens += len(times)
        self._end = times[-1]

    def ended(self, error: str | None = None) -> None:
        """The request has ended, or was refused."""
        if error is not None:
            self._table.refused(self._number, error)
        elif self.tokens:
            self._table.ended(self._number, tokens=self.tokens, start=self._start, end=self._end)
