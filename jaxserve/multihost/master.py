"""Host 0's pipeline of a replica: sends plans to the workers and runs the stages here."""

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
from jaxserve.multihost.in_flight import CompletionWaiter
from jaxserve.multihost.replica_hosts import ReplicaHosts
from jaxserve.runner.batch import PackedPlan
from jaxserve.runner.links import Link
from jaxserve.runner.pipeline import Pipeline, Stage, Unsampled
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.matcher import CompiledGrammar


class MasterPipeline(Pipeline):
    """Launches iterations on a replica's hosts; one host of the last stage returns the results.

    Args:
      hosts: the replica's.
      leave: leaves the jax job after a normal end.
    """

    def __init__(
        self, stages: Sequence[Stage], links: Sequence[Link], hosts: ReplicaHosts, leave: Callable[[], None]
    ) -> None:
        super().__init__(stages, links)
        self._hosts, self._leave = hosts, leave
        self._numbers = 0
        self._plans: deque[IterationPlan] = deque()
        self._waiter = CompletionWaiter(hosts.iterations.local, done=hosts.done, failed=hosts.report_error)
        self.recorder: FlightRecorder | None = None

    @property
    def problem(self) -> str | None:
        """Why the group of hosts has failed; None if it has not."""
        failure = self._hosts.group.failure
        return None if failure is None else str(failure)

    @property
    def strangers(self) -> int:
        return self._hosts.group.reception.strangers if self._hosts.index == 0 else 0  # those of all replicas

    @property
    def spans_hosts(self) -> bool:
        return True

    @property
    def _has_sampled(self) -> bool:
        return len(self._plans) > (self._unsampled is not None)

    @property
    def _is_idle(self) -> bool:
        """Always False: the other hosts already have each row in its iteration, so it cannot move."""
        return False

    @property
    def in_flight(self) -> int:
        return len(self._plans)

    def _enqueue_layers(self, plan: IterationPlan, packed: PackedPlan) -> Unsampled:
        """Sends an iteration to the workers and enqueues its layers on this host. Raises HostFailed."""
        feeds = self.take_landed()
        # Workers need sequence numbers without gaps. The scheduler's have none, but those of measurements may.
        numbered = plan if plan.sequence == self._numbers else dataclasses.replace(plan, sequence=self._numbers)
        self._numbers += 1
        message = pb.FromMaster()
        wire.write_plan(message.plan, numbered, feeds)
        self._hosts.send(message)
        if self.recorder is not None:
            self.recorder.launched(message.plan)
        self._plans.append(plan)
        with self._reporting(numbered):
            return self._forward(numbered, packed, feeds)

    def _enqueue_sampling(self, allowed: np.ndarray | None = None) -> None:
        """Enqueues the sampler if the last stage is on this host. Raises HostFailed."""
        assert self._unsampled is not None
        unsampled, self._unsampled = self._unsampled, None
        with self._reporting(unsampled.plan):
            self._waiter.put(self._sampled(unsampled, allowed))

    @contextlib.contextmanager
    def _reporting(self, plan: IterationPlan) -> Iterator[None]:
        """Reports an exception to the group, which then ends all hosts."""
        try:
            yield
        except Exception as problem:
            self._hosts.report_error(plan.sequence, None, problem)
            self._hosts.group.raise_failure()
            raise

    def prepare(self, grammar: Grammar) -> Callable[[], str | None]:
        return self._hosts.group.preparations.ask(grammar)

    def tell_profile(self, running: bool) -> None:
        self._hosts.group.broadcast(pb.FromMaster(profile=running))

    def add_grammar(
        self, request_id: str, sampling: SamplingParams, compiled: CompiledGrammar, generated: Sequence[int] = ()
    ) -> None:
        super().add_grammar(request_id, sampling, compiled, generated)
        hold = pb.Hold(request_id=request_id, sampling=wire.encode_sampling(sampling))
        self._hosts.broadcast(pb.FromMaster(hold=hold))

    def remove_grammar(self, request_id: str) -> None:
        if self._masks.end(request_id):
            self._hosts.broadcast(pb.FromMaster(release=pb.Release(request_id=request_id)))

    def _take_oldest(self) -> tuple[IterationPlan, IterationResult]:
        """Waits until the oldest iteration has run on its last stage. Raises HostFailed."""
        plan = self._plans.popleft()
        result = self._hosts.result(self._numbers - len(self._plans) - 1)
        self.landed(plan)
        if self.recorder is not None:
            self.recorder.landed(result)
        return plan, result

    def serve(self, recorder: FlightRecorder) -> None:
        """Starts serving, after `HostGroup.phase`: plans are numbered from 0, and recorded."""
        assert not self._plans
        self._numbers = 0
        self.recorder = recorder

    def close(self) -> None:
        """Stops the workers normally. With several replicas, the first call does."""
        if self._hosts.group.stop():
            self._leave()
