"""A simulated engine: settings, a cost model and a topology that serve arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.iteration import IterationPlan
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.factory import make_scheduler
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulate import virtual_clock
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.virtual_clock import EOS, Arrival, HostTimes, SimulatedDevice, StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """Everything that decides how arrivals are served.

    Attributes:
      seconds: seconds of an iteration in each stage.
      costs: the bucket costs.
      slots: slots of each replica.
      replicas: copies of the engine.
    """

    config: EngineConfig
    seconds: StageSeconds
    costs: tuple[BucketCost, ...]
    slots: int
    block_size: int
    max_context: int
    host: HostTimes | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.config.speculate is not None:
            raise ValueError(f"speculate is {self.config.speculate}; the simulator has no text to draft from")

    def serve(self, coming: Sequence[Arrival]) -> SimulationResult:
        """Serve every arrival (ascending in time)."""
        served = SimulationResult(slots=self.slots, stages=self.config.stages * self.replicas)
        replicas, devices, watchers = [], [], []
        for _ in range(self.replicas):
            scheduler = make_scheduler(
                self.config,
                self.costs,
                n_blocks=self.slots // self.block_size,
                block_size=self.block_size,
                max_context=self.max_context,
                eos_token_ids=frozenset({EOS}),
            )
            devices.append(SimulatedDevice(self.seconds, self.config.stages))
            watchers.append(_UsageRecorder(served, scheduler))
            replica = virtual_clock.SimulatedReplica(
                scheduler,
                devices[-1],
                in_flight=self.config.in_flight or self.config.stages + 1,
                host=self.host,
                watch=watchers[-1].launched,
            )
            replicas.append(replica)
        served.outcomes = virtual_clock.serve(coming, replicas)
        served.preemptions = sum(replica.scheduler.preemptions for replica in replicas)
        served.busy = sum(sum(device.busy) for device in devices)
        served.series = watchers[0].series
        return served


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """The results of a simulation, over all replicas.

    Attributes:
      stages: stages of all replicas.
      sizes: number of iterations by tokens, without padding.
      rows: most requests in an iteration.
      padded / carried: tokens of all buckets, and how many of them were not padding.
      cached: prompt tokens found in the prefix cache.
      held / promised: slots with tokens, and slots that are allocated or set aside, times seconds.
      seconds: duration over which these were recorded.
      busy: busy seconds of all stages.
      series: a few hundred samples of the first replica: (time, slots held, slots held and promised).
    """

    slots: int
    stages: int
    outcomes: list[Outcome] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    padded: int = 0
    carried: int = 0
    cached: int = 0
    held: float = 0.0
    promised: float = 0.0
    seconds: float = 0.0
    busy: float = 0.0
    preemptions: int = 0
    series: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        served = [each for each in self.outcomes if each.token_times]
        if not served:
            return 0.0
        return max(each.token_times[-1] for each in served) - min(each.arrival for each in self.outcomes)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return sum(len(each.token_times) for each in self.outcomes)

    @property
    def use(self) -> float:
        """Share of the time that a stage is busy."""
        return self.busy / self.stages / self.duration if self.duration else 0.0


class _UsageRecorder:
    """Records what each iteration of a replica carried, and how full the pool was."""

    def __init__(self, served: SimulationResult, scheduler: Scheduler) -> None:
        self._served = served
        self._pool = scheduler.pool
        self._before = 0.0
        self._every = 1
        self._count = 0
        self.series: list[tuple[float, int, int]] = []

    def launched(self, plan: IterationPlan, landing: float) -> None:
        served, pool = self._served, self._pool
        tokens, held, promised = plan.num_tokens, pool.slots_held, pool.slots_used
        served.sizes[tokens] += 1
        served.rows = max(served.rows, len(plan.chunks))
        served.padded += plan.bucket
        served.carried += tokens
        served.cached += pool.block_size * sum(len(each.blocks) for each in plan.admissions)
        span, self._before = landing - self._before, landing
        served.held += span * held
        served.promised += span * promised
        served.seconds += span
        self._count += 1
        if self._count % self._every == 0:
            self.series.append((landing, held, promised))
            if len(self.series) == 1000:
                self.series, self._every = self.series[1::2], 2 * self._every


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The latency limits that a request must meet, in seconds.

    Attributes:
      ttft: time from arrival to the first token.
      tpot: mean time between the tokens of a request.
    """

    ttft: float
    tpot: float

    def __str__(self) -> str:
        return f"ttft {1e3 * self.ttft:g} ms, tpot {1e3 * self.tpot:g} ms"

    def met(self, outcome: Outcome) -> bool:
        """Whether a request was served in time."""
        if outcome.error is not None or not outcome.token_times:
            return False
        return outcome.first_token <= self.ttft and tpot(outcome) <= self.tpot

    def share(self, outcomes: Sequence[Outcome]) -> float:
        """Share of the requests that were served in time."""
        return float(np.mean([self.met(each) for each in outcomes]))


def tpot(outcome: Outcome) -> float:
    """Mean seconds between the tokens of a request; 0 if it has only one."""
    times = outcome.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
