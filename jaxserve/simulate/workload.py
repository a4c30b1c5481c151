"""Workloads: requests and their arrival times.

They are drawn from distributions or replayed from a trace file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.simulate import trace_formats

MOONCAKE_BLOCK = 512  # tokens per entry of hash_ids (Mooncake, FAST'25, section 4)


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt whose token ids are drawn when asked for: a million of them fit in memory.

    Attributes:
      number: its place in the workload, which is part of its seed.
      blocks: prompts with the same leading block ids have the same leading tokens.
      shift: prompts of different shift have other token ids; those of one shift that have equal prefixes keep them.
    """

    length: int
    vocab_size: int
    seed: int
    number: int
    blocks: tuple[int, ...] = ()
    shift: int = 0

    def __len__(self) -> int:
        return self.length

    def tokens(self) -> np.ndarray:  # int32[length]
        """The token ids."""
        if not self.blocks:
            return _drawn(self._key, self.length, self.vocab_size)
        known = self.blocks[: -(-self.length // MOONCAKE_BLOCK)]
        parts = [_drawn(f"{self.seed} block {block}", MOONCAKE_BLOCK, self.vocab_size) for block in known]
        rest = max(self.length - MOONCAKE_BLOCK * len(parts), 0)
        parts.append(_drawn(f"{self.seed} {self.number} 0", rest, self.vocab_size))
        return (np.concatenate(parts)[: self.length] + np.int32(self.shift)) % np.int32(self.vocab_size)

    @property
    def _key(self) -> str:
        return f"{self.seed} {self.number} {self.shift}"

    def ids(self) -> tuple[int, ...]:
        """The token ids as Python's integers."""
        if self.vocab_size == 256 and not self.blocks:
            return tuple(_drawn_bytes(self._key, self.length))
        return tuple(self.tokens().tolist())

    def tolist(self) -> list[int]:
        """The token ids as a list."""
        return list(self.ids())

    def shifted(self, by: int) -> DrawnPrompt:
        """The prompt with other token ids; equal prefixes stay equal."""
        return dataclasses.replace(self, shift=self.shift + by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One request of a workload.

    Attributes:
      arrival: seconds after the start of the workload.
      prompt: its token ids.
      tenant: whom it counts for; "" where the trace does not say.
      max_tokens: tokens to generate; benchmarks ignore the end of sequence, so exactly this many.
    """

    arrival: float
    prompt: DrawnPrompt
    max_tokens: int
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs in the order of arrival.

    Attributes:
      name: name in reports.
      notes: remarks for reports, such as how many requests were clipped.
      clipped: requests that the trace has longer.
    """

    name: str
    jobs: Sequence[Job]
    notes: tuple[str, ...] = ()
    clipped: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def longest(self) -> int:
        """Tokens of the longest job, prompt and generated."""
        return max(len(job.prompt) + job.max_tokens for job in self.jobs)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.jobs[-1].arrival


class RepeatedJobs(Sequence[Job]):
    """Repeated jobs, with other token ids each time, copied when asked for.

    The first job comes again one mean gap after the last.
    """

    def __init__(self, jobs: Sequence[Job], count: int) -> None:
        """Take the jobs, and how many there are to be with copies."""
        self._jobs, self._count = jobs, count
        self._period = jobs[-1].arrival * len(jobs) / max(len(jobs) - 1, 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        number = index % self._count
        copy, place = divmod(number, len(self._jobs))
        job = self._jobs[place]
        if not copy:
            return job
        first = job.prompt
        prompt = DrawnPrompt(first.length, first.vocab_size, first.seed, number, first.blocks, copy)
        return Job(
            arrival=job.arrival + copy * self._period, prompt=prompt, max_tokens=job.max_tokens, tenant=job.tenant
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A uniform distribution over the whole numbers low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Parse `LOW:HIGH`, or one number for a constant."""
        low, colon, high = text.partition(":")
        try:
            parsed = cls(low=int(low), high=int(high if colon else low))
        except ValueError:
            raise ValueError(f"{text!r} is not a length range; write LOW:HIGH, for instance 32:256") from None
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"{text!r} is not a length range; LOW must be at least 1 and at most HIGH")
        return parsed

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, size=count, endpoint=True)

    def __str__(self) -> str:
        return f"U({self.low},{self.high})"


def uniform(*, requests: int, prompt: Range, output: Range, vocab_size: int, seed: int) -> Workload:
    """Requests with uniform lengths and random token ids that all arrive at once.

    Orca's trace is like this (OSDI'22 section 6.2).
    """
    if requests < 1:
        raise ValueError(f"requests is {requests}; a workload needs at least one")
    rng = np.random.default_rng(seed)
    jobs = tuple(
        Job(arrival=0.0, prompt=DrawnPrompt(int(prompt_length), vocab_size, seed, number), max_tokens=int(generated))
        for number, (prompt_length, generated) in enumerate(
            zip(prompt.draw(rng, requests), output.draw(rng, requests), strict=True)
        )
    )
    return Workload(name=f"{requests} requests, prompts {prompt}, outputs {output}", jobs=jobs)


def poisson(workload: Workload, *, rate: float, seed: int) -> Workload:
    """The same jobs, arriving as a Poisson process of `rate` requests per second."""
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate:g}; it must be above 0 requests per second, and finite")
    gaps = np.random.default_rng([seed, 1]).exponential(1.0 / rate, size=len(workload.jobs))
    jobs = tuple(
        dataclasses.replace(job, arrival=float(arrival))
        for job, arrival in zip(workload.jobs, np.cumsum(gaps), strict=True)
    )
    return dataclasses.replace(workload, name=f"{workload.name}, Poisson {rate:g}/s", jobs=jobs)


def fit(workload: Workload, max_context: int) -> None:
    """Raise ValueError if a request is too long for an engine with this context."""
    if workload.longest > max_context:
        raise ValueError(
            f"the workload's longest request holds {workload.longest} tokens, the engine at most {max_context}; "
            "give shorter --prompt and --output, or a larger --max-context"
        )


def read_trace(
    path: str | Path,
    *,
    max_context: int,
    vocab_size: int,
    seed: int,
    limit: int | None = None,
    seconds: float | None = None,
    speed: float = 1.0,
    columns: Mapping[str, str] | None = None,
) -> Workload:
    """Read a trace: recorded arrivals and lengths, with generated token ids.

    Two formats are known: the Azure LLM inference traces (CSV; TIMESTAMP,ContextTokens,GeneratedTokens) and Mooncake's
    (one JSON object per line; timestamp in ms, input_length, output_length, hash_ids). Azure's may lack the header, if
    the columns are in this order. Requests with equal hash_ids share prefixes. A request longer than `max_context`
    keeps its output and the start of its prompt; the workload's notes say how many were clipped.

    Args:
      limit: number of requests to take from the start of the trace, which is repeated if it has fewer; None takes all.
      seconds: takes the requests of so many seconds instead, from a trace that is repeated as often as it takes.
      speed: 2 replays the arrivals twice as fast.
      columns: for CSV with another header: the columns of `time` (a date or seconds), `prompt` and `output` (tokens)
        and, if there is one, `tenant`.

    Raises:
      ValueError: the file has another format; the message names file and line.
    """
    path = Path(path)
    if not speed > 0:
        raise ValueError(f"speed is {speed:g}; it must be above 0")
    records = trace_formats.read(path, limit, columns)
    count = limit or len(records)
    if seconds is not None:
        times = [(record.time - records[0].time) / speed for record in records]
        period = times[-1] * len(records) / max(len(records) - 1, 1)
        if not period > 0:
            raise ValueError(f"{path}: all requests come at once; they have no rate to fill {seconds:g} s with")
        copies, rest = divmod(seconds, period)
        count = int(copies) * len(records) + bisect_right(times, rest)
        del records[count:]
    jobs, clipped, lost, total = [], 0, 0, 0
    for number, record in enumerate(records):
        times = (count - number - 1) // len(records) + 1  # it comes so often
        generated = min(record.output_length, max_context - 1)
        prompt_length = min(record.prompt_length, max_context - generated)
        wanted = record.prompt_length + record.output_length
        cut = wanted - prompt_length - generated
        clipped, lost, total = clipped + times * (cut > 0), lost + times * cut, total + times * wanted
        prompt = DrawnPrompt(prompt_length, vocab_size, seed, number, record.blocks)
        arrival = (record.time - records[0].time) / speed
        jobs.append(Job(arrival=arrival, prompt=prompt, max_tokens=generated, tenant=record.tenant))
    notes = []
    if clipped:
        share = f"{100 * lost / total:.1f}% of the trace's tokens left out"
        notes.append(f"{clipped} of {count} requests were clipped to a context of {max_context} tokens ({share})")
    if count > len(jobs):
        notes.append(f"the trace has {len(jobs)} requests, and is repeated with other tokens")
        jobs = RepeatedJobs(jobs, count)
    name = f"{count} requests of {path.name}" + (f", {speed:g} times as fast" if speed != 1 else "")
    return Workload(name=name, jobs=jobs, notes=tuple(notes), clipped=clipped)


def _drawn(key: str, count: int, vocab_size: int) -> np.ndarray:  # int32[count]
    """Token ids that follow from a key, in less time than a seeded generator takes to make."""
    if vocab_size == 256:
        return np.frombuffer(_drawn_bytes(key, count), np.uint8).astype(np.int32)
    return (np.frombuffer(_drawn_bytes(key, 4 * count), np.uint32) % np.uint32(vocab_size)).view(np.int32)


def _drawn_bytes(key: str, count: int) -> bytes:
    return hashlib.shake_128(key.encode()).digest(count)
