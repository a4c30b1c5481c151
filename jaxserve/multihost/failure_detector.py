"""Failure detection on host 0: finds silent workers, late iterations and the cause."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.failure import Symptom, SymptomKind, cause_of
from jaxserve.multihost.in_flight import IterationTracker, OldestIteration

STARTING_SILENCE = 60.0  # seconds without a heartbeat during the start: compiling may keep other threads from running
LEAST_SILENCE = 2.0  # seconds without a heartbeat that are normal on a busy machine


@dataclass(slots=True, eq=False)
class Member:
    """Host 0's view of a worker: the messages to send to it, and its last messages."""

    host: int
    queue: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    joined: bool = False
    left: bool = False
    heard: float = 0.0
    step: str | None = "joining"
    votes: dict[str, pb.Vote] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ReplicaIterations:
    """Host 0's view of the iterations of a replica.

    Attributes:
      replicas: its number, as a `Symptom` has it: empty if there is only one replica.
      stages: its pipeline stages on each of its hosts.
      local: iterations of the stages on host 0.
      answers: iterations of all stages.
      sent: the newest plan.
      sampling: the hosts of the last stage.
      answering: the one of them that has the results for host 0.
      waiting: by worker, its oldest unfinished iteration at its last heartbeat.
    """

    replicas: tuple[int, ...]
    stages: Mapping[int, tuple[int, ...]]
    local: IterationTracker = field(default_factory=IterationTracker)
    answers: IterationTracker = field(default_factory=IterationTracker)
    sent: int | None = None
    sampling: tuple[int, ...] = field(init=False)
    answering: int = field(init=False)
    waiting: dict[int, OldestIteration | None] = field(init=False)

    def __post_init__(self) -> None:
        last = max(map(max, self.stages.values()))
        self.sampling = tuple(host for host, stages in self.stages.items() if last in stages)
        self.answering = min(self.sampling)
        self.waiting = dict.fromkeys(self.stages)

    def heard(self, host: int, oldest: pb.Unfinished | None) -> None:
        """Record a worker's oldest unfinished iteration."""
        self.waiting[host] = None if oldest is None else OldestIteration(oldest.sequence, oldest.stage, 0.0)

    def at(self, host: int) -> tuple[tuple[int, ...], int | None]:
        """The stages at which a worker is, and its iteration."""
        if (waiting := self.waiting[host]) is not None:
            return (waiting.stage,), waiting.sequence
        answer = self.answers.waiting()
        return self.stages[host], self.sent if answer is None else answer.sequence

    def late(self, deadline: float) -> Symptom | None:
        """An iteration past its deadline, on host 0 or on the host that has the results."""
        host, stages, oldest = 0, (), self.local.waiting()
        if oldest is not None and oldest.seconds > deadline:
            stages = (oldest.stage,)
        else:
            host, oldest = self.answering, self.answers.waiting()
            stages = self.stages[host][-1:]
        if oldest is None or oldest.seconds <= deadline:
            return None
        return self._late(host, stages, oldest.sequence, f"not done within {deadline:g} s")

    def first_late(self, late: Symptom) -> Symptom:
        """The symptom of the host that works on the earliest iteration, for which the others wait."""
        waiting = [(0, self.local.waiting()), *self.waiting.items()]
        found = [self._late(host, (it.stage,), it.sequence, late.cause) for host, it in waiting if it is not None]
        return cause_of(found or [late])

    def _late(self, host: int, stages: tuple[int, ...], sequence: int, cause: str) -> Symptom:
        kind, replicas = SymptomKind.LATE, self.replicas
        return Symptom(kind=kind, hosts=(host,), replicas=replicas, stages=stages, sequence=sequence, cause=cause)


class FailureDetector:
    """Finds symptoms in what host 0 knows of all hosts. The caller holds the lock.

    Attributes:
      members: the workers by host.
      replicas: once they are placed on the hosts.
      deadline: seconds until an iteration's deadline; 0 for none.
      step: step of host 0's start; None once it serves.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.members = {host: Member(host) for host in workers}
        self.replicas: list[ReplicaIterations] = []
        self.deadline = 0.0
        self.step: str | None = "joining"

    def cause(self, problems: list[Symptom]) -> Symptom | None:
        """The likeliest cause; None without symptoms."""
        if not problems:
            return None
        first = cause_of(problems)
        if first.kind != SymptomKind.LATE:
            return first
        (replica,) = [each for each in self.replicas if each.replicas == first.replicas]
        return replica.first_late(first)

    def silent(self) -> list[Symptom]:
        """Workers that have stopped sending heartbeats."""
        now = time.monotonic()
        most = STARTING_SILENCE if self.step is not None else max(self.deadline, LEAST_SILENCE)
        return [
            self.of(member, SymptomKind.DISCONNECTED, f"it sent nothing for {now - member.heard:.1f} s")
            for member in self.members.values()
            if member.joined and now - member.heard > most
        ]

    def late(self) -> list[Symptom]:
        """A symptom of each replica with an iteration past its deadline."""
        if not self.deadline:
            return []
        return [late for replica in self.replicas if (late := replica.late(self.deadline)) is not None]

    def of(self, member: Member, kind: SymptomKind, cause: str) -> Symptom:
        """A symptom of a worker, with its current iteration unless it has several replicas."""
        its = [replica for replica in self.replicas if member.host in replica.stages]
        stages, sequence = its[0].at(member.host) if len(its) == 1 else ((), None)
        return Symptom(
            kind=kind,
            hosts=(member.host,),
            replicas=tuple(number for replica in its for number in replica.replicas),
            stages=stages,
            sequence=sequence,
            step=member.step,
            cause=cause,
        )
