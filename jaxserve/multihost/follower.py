"""A replica on a worker host: launches its plans in the order of their numbers."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from typing import Protocol

from jax.errors import JaxRuntimeError

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.multihost.failure import one_line
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.in_flight import CompletionWaiter, IterationTracker
from jaxserve.multihost.remote_grammars import WorkerGrammars
from jaxserve.runner import batch
from jaxserve.runner.pipeline import Pipeline

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """What a follower needs of `worker.MasterConnection`."""

    def send(self, message: pb.FromWorker) -> None: ...
    def fail(self, cause: str, *, replica: int, sequence: int, stage: int | None = None) -> None: ...


class ReplicaFollower:
    """Launches a replica's plans on this host, without waiting for one before the next.

    Args:
      replica: its number, and how many there are.
      n_blocks: blocks of the pool.
      stages: the stages on this host.
      answers: whether the master takes the results from this host.
      recorder: the flight recorder, on a host of the last stage.
      grammars: the grammar states, on a host of the last stage.

    Attributes:
      replicas: the number as a `Symptom` has it: empty if there is only one replica.
    """

    def __init__(
        self,
        replica: tuple[int, int],
        pipeline: Pipeline,
        n_blocks: int,
        connection: Connection,
        *,
        stages: Sequence[int],
        answers: bool,
        recorder: FlightRecorder | None = None,
        grammars: WorkerGrammars | None = None,
    ) -> None:
        self._index = replica[0]
        self.replicas = replica[:1] if replica[1] > 1 else ()
        self._pipeline, self._n_blocks, self._connection = pipeline, n_blocks, connection
        self._answers, self._recorder, self.grammars = answers, recorder, grammars
        self._messages: queue.SimpleQueue[pb.Plan | pb.Phase | pb.Hold | pb.Release | None] = queue.SimpleQueue()
        self._newest: int | None = None  # the newest plan received
        self.progress = IterationTracker()
        self.progress.first = min(stages)

    def put(self, message: pb.Plan | pb.Phase | pb.Hold | pb.Release | None) -> None:
        """Queue a message of host 0; None ends `run`."""
        self._messages.put(message)

    def run(self) -> None:
        """Launch plans until the end. An iteration that fails ends the process."""
        waiter, expected, sequence = CompletionWaiter(self.progress, done=self._done, failed=self._failed), 0, 0
        # Host 0 allows half as many. The others may be done already, and only not removed yet.
        most = 2 * (len(self._pipeline.stages) + 1)
        try:
            while (message := self._messages.get()) is not None:
                if isinstance(message, pb.Phase):
                    expected, self._newest = 0, None
                    if self._recorder is not None:
                        self._recorder.forget()
                    continue
                if isinstance(message, pb.Hold):
                    if self.grammars is not None:
                        self.grammars.hold(message)
                    continue
                if isinstance(message, pb.Release):
                    if self.grammars is not None:
                        self.grammars.release(message)
                    continue
                sequence = message.sequence
                assert sequence == expected, f"plan {sequence} came instead of plan {expected}"
                expected, self._newest = expected + 1, sequence
                assert len(self.progress) < most, f"plan {sequence} came with {len(self.progress)} under way"
                self._launch(message, waiter)
        except Exception as problem:
            _log.exception("iteration %d cannot be launched", sequence)
            if isinstance(problem, JaxRuntimeError):  # an earlier program failed; this launch takes its result
                self._failed(sequence, self.progress.first, problem)
            else:
                cause = f"{type(problem).__name__}: {one_line(problem)}"
                self._connection.fail(cause, replica=self._index, sequence=sequence)
        waiter.close()

    def _launch(self, message: pb.Plan, waiter: CompletionWaiter) -> None:
        self.progress.begin(message.sequence)
        if self._recorder is not None:
            self._recorder.launched(message)
        plan = wire.decode_plan(message)
        packed = batch.pack(plan, self._pipeline.shape.layout(plan.bucket), self._n_blocks)
        allowed = (lambda: None) if self.grammars is None else self.grammars.launched(plan)
        waiter.put(self._pipeline.enqueue(plan, packed, message.feeds, allowed))

    def _done(self, plan: IterationPlan, result: IterationResult | None) -> None:
        if self._answers:
            assert result is not None
            message = pb.FromWorker(replica=self._index)
            message.completed.sequence = plan.sequence
            wire.write_result(message.completed.result, result, plan)
            self._connection.send(message)
        if self.grammars is not None:
            assert result is not None
            self.grammars.landed(plan, result)
        if self._recorder is not None:  # after the result is sent, because host 0 waits for it
            assert result is not None
            self._recorder.landed(result)

    def _failed(self, sequence: int, stage: int, problem: Exception) -> None:
        cause = f"its device failed: {one_line(problem)}"
        self._connection.fail(cause, replica=self._index, sequence=sequence, stage=stage)

    def now(self) -> str:
        """Where it is, for messages; empty before the first plan."""
        if (waiting := self.progress.waiting()) is not None:
            return f"{self.where(waiting.sequence, waiting.stage)} here"
        return "" if self._newest is None else self._named(f"after iteration {self._newest}")

    def where(self, sequence: int, stage: int | None) -> str:
        """An iteration and perhaps its stage, for messages."""
        at = "" if stage is None else f", stage {stage}"
        return self._named(f"iteration {sequence}{at}")

    def _named(self, what: str) -> str:
        return "".join(f"replica {index}, " for index in self.replicas) + what
