"""Iterations in flight on a host: measures how long each takes, and waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.runner.pipeline import InFlight
from jaxserve.runner.stage import wait


class OldestIteration(NamedTuple):
    """The oldest unfinished iteration and its stage.

    `seconds` counts from the end of the iteration before it, or from its own launch.
    """

    sequence: int
    stage: int
    seconds: float


class IterationTracker:
    """Iterations that have started and not ended, in order. Thread safe.

    Args:
      clock: monotonic seconds.

    Attributes:
      first: first stage on this host; an iteration counts as in this stage until `at` sets another.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: deque[int] = deque()
        self.first = 0
        self._stage: int | None = None  # the awaited stage of the oldest iteration
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, sequence: int) -> None:
        """Add an iteration. Call it before the launch, which can hang too."""
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way.append(sequence)

    def at(self, stage: int) -> None:
        """Set the stage in which the oldest iteration is awaited."""
        self._stage = stage

    def end(self) -> None:
        """Remove the oldest iteration."""
        with self._lock:
            self._under_way.popleft()
            self._stage, self._since = None, self._clock()

    def waiting(self) -> OldestIteration | None:
        """The oldest iteration; None if there is none."""
        with self._lock:
            if not self._under_way:
                return None
            stage = self.first if self._stage is None else self._stage
            return OldestIteration(self._under_way[0], stage, self._clock() - self._since)


class CompletionWaiter:
    """A thread that waits for launched iterations in order, stage by stage.

    Args:
      done: called with each plan once all stages here have run it, and with its result if the last stage is here.
      failed: called once, with the sequence number, the stage and its device's error; after that nothing is awaited.
    """

    def __init__(
        self,
        progress: IterationTracker,
        *,
        done: Callable[[IterationPlan, IterationResult | None], None],
        failed: Callable[[int, int, Exception], None],
    ) -> None:
        self._progress, self._done, self._failed = progress, done, failed
        self._launched: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxserve-waiter", daemon=True)
        self._thread.start()

    def put(self, launched: InFlight) -> None:
        """Queue a launched iteration."""
        self._launched.put(launched)

    def close(self) -> None:
        """Wait until all iterations are done."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (each := self._launched.get()) is not None:
            last, result, stage = len(each.hidden) - 1, None, 0
            try:
                for stage, hidden in enumerate(each.hidden):
                    if hidden is None:
                        continue
                    self._progress.at(stage)
                    hidden.block_until_ready()
                    if stage == last:
                        result = wait(each.launched)
            except Exception as problem:
                self._failed(each.plan.sequence, stage, problem)
                return
            self._progress.end()
            self._done(each.plan, result)
