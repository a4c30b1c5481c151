"""Failure symptoms of hosts, the choice of the cause among them, and exit codes. No jax."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace


class ExitCode(enum.IntEnum):
    """Exit codes of a host's process (docs/hosts.md has the table)."""

    OVERDUE = 71  # an iteration was not done within its deadline on this host
    LOST = 72  # another host was lost, or reported that it had failed
    BROKEN = 73  # this host's own code raised
    UNWATCHED = 75  # this host's watchdog failed


class SymptomKind(enum.IntEnum):
    """Kinds of symptoms, the likeliest cause first: one dead host makes all others late."""

    DISCONNECTED = 0  # its stream ended, or its heartbeats stopped
    RAISED = 1  # its own code raised
    DEVICE_ERROR = 2  # a program on its devices failed, perhaps because another host's did not answer
    LATE = 3  # an iteration was not done in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One symptom of a failure.

    Attributes:
      hosts: the hosts that show it.
      replicas: those that it is known to concern; empty if there is only one.
      stages: the stages of these hosts, or the one that was running.
      sequence: number of the current iteration, if there was one.
      step: step of the start, before it has ended.
    """

    kind: SymptomKind
    hosts: tuple[int, ...]
    cause: str
    replicas: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    sequence: int | None = None
    step: str | None = None

    def __str__(self) -> str:
        named = (("host", self.hosts), ("replica", self.replicas), ("stage", self.stages))
        where = [f"{name}{'s' * (len(numbers) > 1)} {_listed(numbers)}" for name, numbers in named if numbers]
        if self.sequence is not None:
            where.append(f"iteration {self.sequence}")
        if self.step is not None:
            where.append(f"while {self.step}")
        return f"{', '.join(where)}: {self.cause}"


class HostFailed(RuntimeError):
    """The hosts cannot go on together; the message is a `Symptom`'s.

    Attributes:
      code: exit code of this process.
    """

    def __init__(self, problem: Symptom, code: ExitCode) -> None:
        super().__init__(str(problem))
        self.problem, self.code = problem, code


def cause_of(problems: Iterable[Symptom]) -> Symptom:
    """The symptom that is the likeliest cause of the others.

    Of late hosts, those that work on the earliest iteration in its earliest stage: the other hosts wait for them.
    """
    found = list(problems)
    errors = (SymptomKind.RAISED, SymptomKind.DEVICE_ERROR)
    # A host that reported an error disconnects because of it.
    reported = {host for each in found if each.kind in errors for host in each.hosts}
    found = [each for each in found if each.kind != SymptomKind.DISCONNECTED or not reported.issuperset(each.hosts)]
    first = min(found, key=_rank)
    if first.kind != SymptomKind.LATE:
        return first
    alike = [each for each in found if (each.replicas, _rank(each)) == (first.replicas, _rank(first))]
    hosts = tuple(sorted({host for each in alike for host in each.hosts}))
    return replace(first, hosts=hosts)


def one_line(problem: Exception) -> str:
    """An error's message in one line: its first, or its last if it has a traceback."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    first, traceback, _ = lines[0].partition("Traceback (most recent call last)")
    return f"{first}{lines[-1]}" if traceback else first


def _rank(problem: Symptom) -> tuple[int, float, float]:
    sequence = float("inf") if problem.sequence is None else problem.sequence
    return problem.kind, sequence, min(problem.stages, default=float("inf"))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
