"""Health that is true: it follows the iterations that engines complete, not what they say of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_LEAST_SECONDS = 2.0
_COSTS = 4  # an iteration may take this many times what its bucket was measured to take


class Watchdog:
    """Says whether an engine serves; to be asked every `interval` seconds.

    A replica that has work and completes no iteration within the deadline is wedged, and serves again once it completes
    one. The time counted is the watchdog's own: a process that was stopped as a whole, or a machine that slept, is not
    taken for a wedged engine.

    Args:
      deadline: seconds; None goes by what an iteration of the largest bucket was measured to take.
      interval: seconds between two questions, as intended.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deadline: float | None = None,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slowest = max(cost.milliseconds for cost in engine.report.buckets) / 1000
        self.deadline = max(_LEAST_SECONDS, _COSTS * slowest) if deadline is None else deadline
        self._engine, self._interval, self._clock = engine, interval, clock
        self._asked = clock()
        self._iterations: list[int] = []
        self._still: list[float] = []  # seconds that each replica had work and did none

    def problem(self) -> str | None:
        """What keeps the engine from serving, or None."""
        now = self._clock()
        passed = min(now - self._asked, 2 * self._interval)
        self._asked = now
        if not self._engine.is_healthy:
            return "the engine has failed"
        loads = self._engine.loads()
        before = self._iterations or [-1] * len(loads)
        still = self._still or [0.0] * len(loads)
        self._iterations = [load.iterations for load in loads]
        self._still = [
            seconds + passed if load.iterations == last and load.running + load.waiting else 0.0
            for load, last, seconds in zip(loads, before, still, strict=True)
        ]
        worst = max(self._still)
        if worst <= self.deadline:
            return None
        which = f"replica {self._still.index(worst)}" if len(loads) > 1 else "the engine"
        return f"{which} has completed no iteration for {worst:.1f} s though it has work"
