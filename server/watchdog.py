"""Health checks of the engine by the iterations that it completes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.stats import Load
    from server.engine_client import EngineClient

_LEAST_SECONDS = 2.0
_COSTS = 4  # an iteration may take this many times what its bucket was measured to take
_LONGEST_WAIT = 3.0  # seconds beyond the expected time, at most: slow iterations vary less


class EngineWatchdog:
    """Checks whether an engine serves; call `problem` every `interval` seconds.

    A replica that has work and completes no iteration within its deadline does not serve until it completes one. The
    deadline follows from the next iteration: the measured time of its bucket, and the time to read all used slots. Time
    counts only while the watchdog itself runs. So an engine does not count as hanging after the whole process was
    stopped, or the machine slept.

    Args:
      deadline: seconds for any iteration; None computes them as above.
      interval: intended seconds between two checks.
      clock: monotonic seconds.

    Attributes:
      overdue: seconds by which the replica that is latest has missed its deadline; 0 if none has.
      still: seconds since that replica completed an iteration; 0 if none is late.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        deadline: float | None = None,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.overdue = self.still = 0.0
        self._deadline = deadline
        self._engine, self._interval, self._clock = engine, interval, clock
        self._asked = clock()
        self._iterations: list[int] = []
        self._still: list[float] = []  # seconds that each replica had work and completed none

    def problem(self) -> str | None:
        """Why the engine does not serve, or None."""
        now = self._clock()
        passed = min(now - self._asked, 2 * self._interval)
        self._asked = now
        self.overdue = self.still = 0.0
        if self._engine.problem is not None:
            self._iterations, self._still = [], []
            return self._engine.problem
        loads = self._engine.loads()
        if len(loads) != len(self._iterations):
            self._iterations, self._still = [-1] * len(loads), [0.0] * len(loads)
        self._still = [
            seconds + passed if load.iterations == last and load.running + load.waiting else 0.0
            for load, last, seconds in zip(loads, self._iterations, self._still, strict=True)
        ]
        self._iterations = [load.iterations for load in loads]
        late = [seconds - self._allowed(load) for load, seconds in zip(loads, self._still, strict=True)]
        worst = max(range(len(late)), key=late.__getitem__)
        if late[worst] <= 0:
            return None
        self.overdue, self.still = late[worst], self._still[worst]
        which = f"replica {worst}" if len(loads) > 1 else "the engine"
        return f"{which} has completed no iteration for {self.still:.1f} s though it has work"

    def _allowed(self, load: Load) -> float:
        """Seconds within which a replica must complete its next iteration."""
        if self._deadline is not None:
            return self._deadline
        expected = load.expected_seconds + self._engine.report.slot_milliseconds / 1000 * load.slots_used
        return max(_LEAST_SECONDS, min(_COSTS * expected, expected + _LONGEST_WAIT))
