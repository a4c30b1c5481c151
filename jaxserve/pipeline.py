"""Stages in a row and the batches in flight. With one stage: two iterations, the second launched before the first's
tokens are known (its decodes read them on the device)."""

from __future__ import annotations

from collections import deque

from jaxserve.batch import PackedPlan
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.stage import Launched, StageRunner, wait

IN_FLIGHT = 2  # one running, one ahead of it


class Pipeline:
    """Launches iterations in order and hands their answers back in the same order."""

    def __init__(self, stage: StageRunner) -> None:
        self.stage = stage
        self._in_flight: deque[tuple[IterationPlan, Launched]] = deque()

    @property
    def in_flight(self) -> int:
        """Iterations launched whose answers were not taken."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may be launched."""
        return len(self._in_flight) < IN_FLIGHT

    def launch(self, plan: IterationPlan, packed: PackedPlan) -> None:
        """Enqueues an iteration; returns before it has run."""
        assert self.has_room
        self._in_flight.append((plan, self.stage.launch(plan, packed)))

    def wait(self) -> tuple[IterationPlan, IterationResult]:
        """Blocks until the oldest iteration has run, and takes its answers."""
        plan, launched = self._in_flight.popleft()
        return plan, wait(launched)
