"""Failure detection on host 0: finds silent workers, late iterations and the cause."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
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
    waiting: OldestIteration | None = None


class FailureDetector:
    """Finds symptoms in what host 0 knows of all hosts. The caller holds the lock.

    Attributes:
      members: the workers by host.
      stages: pipeline stages of each host.
      local: iterations of the stages on host 0.
      answers: iterations of all stages.
      answering: the host that sends the results.
      sent: the newest plan.
      deadline: seconds until an iteration's deadline; 0 for none.
      step: step of host 0's start; None once it serves.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.members = {host: Member(host) for host in workers}
        self.stages: dict[int, tuple[int, ...]] = {}
        self.local, self.answers = IterationTracker(), IterationTracker()
        self.answering = 0
        self.sent: int | None = None
        self.deadline = 0.0
        self.step: str | None = "joining"

    def cause(self, problems: list[Symptom]) -> Symptom | None:
        """The likeliest cause; None without symptoms."""
        if not problems:
            return None
        first = cause_of(problems)
        if first.kind != SymptomKind.LATE:
            return first
        # The last heartbeats tell which host works on the earliest iteration. The others wait for it.
        waiting = [(0, self.local.waiting()), *((each.host, each.waiting) for each in self.members.values())]
        late = [
            Symptom(
                kind=SymptomKind.LATE, hosts=(host,), stages=(each.stage,), sequence=each.sequence, cause=first.cause
            )
            for host, each in waiting
            if each is not None
        ]
        return cause_of(late or [first])

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
        """An iteration past its deadline, here or on the host that sends the results."""
        if not self.deadline:
            return []
        cause = f"not done within {self.deadline:g} s"
        mine = self.local.waiting()
        if mine is not None and mine.seconds > self.deadline:
            return [
                Symptom(kind=SymptomKind.LATE, hosts=(0,), stages=(mine.stage,), sequence=mine.sequence, cause=cause)
            ]
        answer = self.answers.waiting()
        if answer is not None and answer.seconds > self.deadline:
            stages = self.stages.get(self.answering, ())[-1:]
            hosts = (self.answering,)
            return [Symptom(kind=SymptomKind.LATE, hosts=hosts, stages=stages, sequence=answer.sequence, cause=cause)]
        return []

    def of(self, member: Member, kind: SymptomKind, cause: str) -> Symptom:
        """A symptom of a worker, with its current iteration."""
        waiting, answer = member.waiting, self.answers.waiting()
        sequence = self.sent if answer is None else answer.sequence
        return Symptom(
            kind=kind,
            hosts=(member.host,),
            stages=self.stages.get(member.host, ()) if waiting is None else (waiting.stage,),
            sequence=sequence if waiting is None else waiting.sequence,
            step=member.step,
            cause=cause,
        )
