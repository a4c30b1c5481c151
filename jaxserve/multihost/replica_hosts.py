"""The hosts of one replica, as host 0 sees them: plans go to them, and results come back."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from jax.errors import JaxRuntimeError

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.multihost.failure import Symptom, SymptomKind, one_line
from jaxserve.multihost.failure_detector import ReplicaIterations

if TYPE_CHECKING:
    from jaxserve.multihost.group import HostGroup


class ReplicaHosts:
    """Host 0's side of the control channel for one replica.

    Args:
      index: the replica's number.
      iterations: what the failure detector knows of them.
      group: all hosts. If one fails, all do.
    """

    def __init__(self, index: int, iterations: ReplicaIterations, group: HostGroup) -> None:
        self.index, self.iterations, self.group = index, iterations, group
        self._results: queue.SimpleQueue[tuple[int, IterationResult] | None] = queue.SimpleQueue()  # None: no more

    def send(self, message: pb.FromMaster) -> None:
        """Send a plan to the workers of the replica. Raises HostFailed."""
        self.group.raise_if_failed()
        sequence, its = message.plan.sequence, self.iterations
        its.sent = sequence
        its.answers.begin(sequence)
        its.local.begin(sequence)
        self.broadcast(message)

    def broadcast(self, message: pb.FromMaster) -> None:
        """Send a message to the workers of the replica."""
        message.replica = self.index
        self.group.broadcast(message, self.iterations.stages)

    def done(self, plan: IterationPlan, result: IterationResult | None) -> None:
        """Note that this host's stages have run an iteration."""
        if self.iterations.answering == 0:
            assert result is not None
            self._answer(plan.sequence, result)

    def completed(self, host: int, completed: pb.Completed) -> None:
        """Take a worker's result."""
        if host == self.iterations.answering:
            self._answer(completed.sequence, wire.decode_result(completed.result))

    def _answer(self, sequence: int, result: IterationResult) -> None:
        self.iterations.answers.end()
        self._results.put((sequence, result))

    def result(self, sequence: int) -> IterationResult:
        """Wait for the result of the next iteration. Raises HostFailed."""
        found = self._results.get()
        if found is None:
            self._results.put(None)
            self.group.raise_if_failed()
        assert found is not None
        assert found[0] == sequence, f"the result of iteration {found[0]} came instead of that of {sequence}"
        return found[1]

    def end(self) -> None:
        """End the wait for results, once the group has failed."""
        self._results.put(None)

    def report_error(self, sequence: int, stage: int | None, problem: Exception) -> None:
        """Report what an iteration raised on this host.

        Args:
          stage: the stage whose device raised it; None if the launch did.
        """
        on_device = stage is not None or isinstance(problem, JaxRuntimeError)
        self.group.report(
            Symptom(
                kind=SymptomKind.DEVICE_ERROR if on_device else SymptomKind.RAISED,
                hosts=(0,),
                replicas=self.iterations.replicas,
                stages=self.iterations.stages.get(0, ()) if stage is None else (stage,),
                sequence=sequence,
                cause=f"{'its device failed' if on_device else type(problem).__name__}: {one_line(problem)}",
            )
        )
