"""The order of requests: who gets a row and prompt tokens first."""

from __future__ import annotations

from typing import Protocol

from jaxserve.config import EngineConfig
from jaxserve.scheduler.buckets import BucketLadder

PRIORITY_SECONDS = 10.0  # one level of priority outweighs this much waiting time

# Seconds that a request lets later ones pass, for each second that its prompt takes, and at most for each second of the
# target for the first token (without one: of USUAL_TARGET). docs/simulator.md has the results of other values.
PATIENCE, LONGEST_PATIENCE, USUAL_TARGET = 100.0, 20.0, 2.0


class RequestOrder(Protocol):
    """The order of requests, by a key that never changes; the smallest is first."""

    def key(self, arrival: float, priority: int, uncached: int) -> float:
        """The key of a request.

        Args:
          arrival: seconds, on any clock.
          uncached: tokens of its prompt that are to be computed.
        """
        ...


class ArrivalOrder:
    """First come, first served; a priority level outweighs PRIORITY_SECONDS of waiting."""

    def key(self, arrival: float, priority: int, uncached: int) -> float:
        """The arrival, less what its priority outweighs."""
        return arrival - priority * PRIORITY_SECONDS


class ObjectiveOrder:
    """Short prompts first within a priority, with a bound on how long a long one is passed by.

    Under overload somebody waits longer than the target for the first token. If requests go by arrival, all do; if
    those wait whose prompts take longest, most are in time. So a request lets others pass that arrive within PATIENCE
    times the seconds that its own prompt takes, but never after the bound: LONGEST_PATIENCE times the target. From then
    on nobody who arrives goes before it.

    Priorities stay above the order: a request goes before all of a lower level that have waited PRIORITY_SECONDS less,
    whatever their lengths.
    """

    def __init__(self, ladder: BucketLadder, *, target_ttft: float | None = None) -> None:
        """
        Args:
          ladder: gives the seconds that a prompt takes.
          target_ttft: seconds to the first token.
        """
        self.bound = LONGEST_PATIENCE * (target_ttft or USUAL_TARGET)
        self._patience = PATIENCE * ladder.costs_ms[-1] / 1000 / ladder.largest  # for each token

    def key(self, arrival: float, priority: int, uncached: int) -> float:
        """The arrival, plus its patience, less what its priority outweighs."""
        patience = min(self._patience * uncached, self.bound)
        return arrival + patience - priority * (PRIORITY_SECONDS + self.bound)


def make_order(config: EngineConfig, ladder: BucketLadder) -> RequestOrder:
    """The order for an engine's settings."""
    if config.order == "fcfs" or config.scheduler == "request":
        return ArrivalOrder()
    return ObjectiveOrder(ladder, target_ttft=config.target_ttft)
