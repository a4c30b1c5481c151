"""Host 0's pipeline: it sends each plan to the workers and runs the stages on this host."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.multihost.flight_recorder import FlightRecorder
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.in_flight import CompletionWaiter
from jaxserve.request import Request
from jaxserve.runner.batch import PackedPlan
from jaxserve.runner.links import Link
from jaxserve.runner.pipeline import Pipeline, Stage
from jaxserve.sampling_params import Grammar


class MasterPipeline(Pipeline):
    """Launches iterations on all hosts; one host of the last stage returns the results.

    Args:
      leave: leaves the jax job at a normal end.
    """

    def __init__(
        self, stages: Sequence[Stage], links: Sequence[Link], group: HostGroup, leave: Callable[[], None]
    ) -> None:
        super().__init__(stages, links)
        self._group, self._leave = group, leave
        self._numbers = 0
        self._plans: deque[IterationPlan] = deque()
        self._waiter = CompletionWaiter(group.progress, done=self._done, failed=self._failed)
        self.recorder: FlightRecorder | None = None

    @property
    def problem(self) -> str | None:
        """Why the group of hosts has failed; None if it has not."""
        failure = self._group.failure
        return None if failure is None else str(failure)

    @property
    def spans_hosts(self) -> bool:
        return True

    @property
    def has_answers(self) -> bool:
        return len(self._plans) > (self._unanswered is not None)

    @property
    def is_idle(self) -> bool:
        """Always False: a row must stay in its iteration because the other hosts have it there."""
        return False

    @property
    def in_flight(self) -> int:
        return len(self._plans)

    @property
    def has_room(self) -> bool:
        return len(self._plans) <= len(self.stages)

    def launch(self, plan: IterationPlan, packed: PackedPlan, *, answer: bool = True) -> None:
        """Sends an iteration to the workers and enqueues it on this host. Raises HostFailed."""
        assert self.has_room
        assert self._unanswered is None
        feeds = self.take_landed()
        # Numbered without a gap for the workers; those of a scheduler are so already, those of measurements are not.
        numbered = plan if plan.sequence == self._numbers else dataclasses.replace(plan, sequence=self._numbers)
        self._numbers += 1
        message = pb.FromMaster()
        wire.write_plan(message.plan, numbered, feeds)
        self._group.send(message)
        if self.recorder is not None:
            self.recorder.launched(message.plan)
        self._plans.append(plan)
        with self._reporting(numbered):
            self._unanswered = self._forward(numbered, packed, feeds)
        if answer:
            self.answer()

    def answer(self, allowed: np.ndarray | None = None) -> None:
        """Enqueues the sampler if the last stage is on this host. Raises HostFailed."""
        assert self._unanswered is not None
        unanswered, self._unanswered = self._unanswered, None
        with self._reporting(unanswered.plan):
            self._waiter.put(self._answered(unanswered, allowed))

    @contextlib.contextmanager
    def _reporting(self, plan: IterationPlan) -> Iterator[None]:
        """Reports an exception to the group, which then ends all hosts."""
        try:
            yield
        except Exception as problem:
            self._group.report_error(problem, sequence=plan.sequence)
            self._group.raise_failure()
            raise

    def prepare(self, grammar: Grammar) -> Callable[[], str | None]:
        return self._group.preparations.ask(grammar)

    def hold(self, request: Request) -> None:
        hold = pb.Hold(request_id=request.request_id, sampling=wire.encode_sampling(request.sampling))
        self._group.broadcast(pb.FromMaster(hold=hold))

    def release(self, request_id: str) -> None:
        self._group.broadcast(pb.FromMaster(release=pb.Release(request_id=request_id)))

    def wait(self) -> tuple[IterationPlan, IterationResult]:
        """Blocks until the oldest iteration has run on its last stage. Raises HostFailed."""
        plan = self._plans.popleft()
        result = self._group.result(self._numbers - len(self._plans) - 1)
        self.landed(plan)
        if self.recorder is not None:
            self.recorder.landed(result)
        return plan, result

    def serve(self, deadline: float, recorder: FlightRecorder) -> None:
        """Starts serving: plans are numbered from 0 and each has a deadline."""
        assert not self._plans
        self._numbers = 0
        self._group.phase(deadline, serving=True)
        self.recorder = recorder

    def close(self) -> None:
        """Stops the workers normally."""
        if self._group.stop():
            self._leave()

    def _done(self, plan: IterationPlan, result: IterationResult | None) -> None:
        self._group.done(plan.sequence, result)

    def _failed(self, sequence: int, stage: int, problem: Exception) -> None:
        self._group.report_error(problem, sequence=sequence, stage=stage)
