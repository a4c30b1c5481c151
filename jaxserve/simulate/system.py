"""A simulated engine: settings and a cost model that serve arrivals."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.iteration import IterationPlan
from jaxserve.planning.cost import Roofline
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.scheduler.factory import make_scheduler
from jaxserve.scheduler.row_parts import Pool
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulate import fleet
from jaxserve.simulate.outcome import Outcome, OutcomeTable, ShortOutcome
from jaxserve.simulate.steady_plans import SteadyPlan
from jaxserve.simulate.steady_scheduler import SteadyScheduler
from jaxserve.simulate.virtual_clock import (
    EOS,
    Arrival,
    HostTimes,
    SimulatedDevice,
    SimulatedReplica,
    StageSeconds,
    Watch,
)

# Contexts of the decodes in a bucket's cost, and for the cost of a longer one, as in the engine's measurement.
_CONTEXT, _LONG_CONTEXT = 128, 512
_SAMPLES = 1000  # most samples of `SimulationResult.series`


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """The settings and the cost model of a simulated engine.

    Attributes:
      seconds: seconds of an iteration in each stage.
      costs: the bucket costs.
      slot_milliseconds: added milliseconds of an iteration per slot that it reads.
      slots: slots of each replica, in the first cache group.
      block_bytes / copy_seconds: of a block of each cache group: bytes on all devices of a replica, and seconds between
        a device and its host.
      replicas: copies of the engine.
    """

    config: EngineConfig
    seconds: StageSeconds
    costs: tuple[BucketCost, ...]
    slot_milliseconds: float = 0.0
    slots: int
    groups: CacheGroups
    host: HostTimes | None = None
    replicas: int = 1
    block_bytes: tuple[int, ...] = ()
    copy_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.config.speculate is not None:
            raise ValueError(f"speculate is {self.config.speculate}; the simulator has no text to draft from")

    def scheduler(self, kind: type[Scheduler] = Scheduler) -> Scheduler:
        """A new scheduler with these settings, of one replica."""
        return make_scheduler(
            self.config,
            self.costs,
            kind=kind,
            slot_milliseconds=self.slot_milliseconds,
            n_blocks=self.slots // self.groups.block_size,
            groups=self.groups,
            eos_token_ids=frozenset({EOS}),
            block_bytes=self.block_bytes,
        )

    def serve(
        self,
        incoming: Sequence[Arrival],
        times: list[Outcome] | None = None,
        scaling: Callable[[Sequence[SimulatedReplica]], fleet.Scaling] | None = None,
    ) -> SimulationResult:
        """Serve every arrival (ascending in time).

        Args:
          times: gets the outcomes with the times of all tokens, instead of the result's table.
          scaling: makes what chooses the replicas that take requests over time; without it all do.
        """
        served = SimulationResult(slots=self.slots, stages=self.config.stages * self.replicas)
        replicas, devices = [], []
        for index in range(self.replicas):
            scheduler = self.scheduler(SteadyScheduler)
            devices.append(SimulatedDevice(self.seconds, self.config.stages))
            in_flight = self.config.in_flight or self.config.stages + 1
            watch = served.recorder(scheduler.pool, sampled=index == 0)
            replicas.append(
                SimulatedReplica(
                    scheduler,
                    devices[-1],
                    in_flight=in_flight,
                    host=self.host,
                    watch=watch,
                    copy_seconds=self.copy_seconds,
                )
            )
        with _rare_collections():
            if times is None:
                fleet.serve_into(served.outcomes, incoming, replicas, scaling and scaling(replicas))
            else:
                times += fleet.serve(incoming, replicas)
        served.preemptions = sum(replica.scheduler.preemptions for replica in replicas)
        hosts = [host for replica in replicas if (host := replica.scheduler.pool.host) is not None]
        served.loaded = self.groups.block_size * sum(host.loaded_blocks for host in hosts) // self.groups.count
        served.prompts = sum(each.prompt_tokens for each in served.outcomes if each.tokens)
        served.busy = sum(sum(device.busy) for device in devices)
        return served


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """The results of a simulation, over all replicas.

    Attributes:
      stages: stages of all replicas.
      sizes: number of iterations by tokens, without padding.
      rows: largest number of requests in an iteration.
      padded / carried: tokens of all buckets, and how many of them were not padding.
      prompts: prompt tokens of the requests that were served, if they are in the table.
      cached: those of them that were found in the prefix cache.
      loaded: tokens whose blocks came back from the host.
      held / promised: slots with tokens, and slots that are allocated or set aside, times seconds.
      seconds: duration over which these were recorded.
      busy: busy seconds of all stages.
      series: a few hundred samples of the first replica: (time, slots held).
    """

    slots: int
    stages: int
    outcomes: OutcomeTable = field(default_factory=OutcomeTable)
    sizes: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    padded: int = 0
    carried: int = 0
    prompts: int = 0
    cached: int = 0
    loaded: int = 0
    held: float = 0.0
    promised: float = 0.0
    seconds: float = 0.0
    busy: float = 0.0
    preemptions: int = 0
    series: list[tuple[float, int]] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        last = max((each.end for each in self.outcomes if each.tokens), default=None)
        return 0.0 if last is None else last - min(each.arrival for each in self.outcomes)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return sum(each.tokens for each in self.outcomes)

    @property
    def padding(self) -> float:
        """Share of the buckets' tokens that were padding."""
        return 1 - self.carried / self.padded if self.padded else 0.0

    @property
    def use(self) -> float:
        """Share of the time that a stage is busy."""
        return self.busy / self.stages / self.duration if self.duration else 0.0

    def recorder(self, pool: Pool, *, sampled: bool) -> Watch:
        """Returns a function that records the load of each iteration and of the pool of a replica.

        Args:
          sampled: whether it adds to `series`.
        """
        before, count, every, sizes = 0.0, 0, 1, self.sizes

        def launched(plan: IterationPlan, landing: float) -> None:
            nonlocal before, count, every
            tokens, held, promised = plan.num_tokens, pool.slots_held, pool.slots_used
            sizes[tokens] += 1
            if tokens > self.rows and (rows := plan.num_rows) > self.rows:  # there are no more rows than tokens
                self.rows = rows
            self.padded += plan.bucket
            self.carried += tokens
            if plan.admissions:
                self.cached += pool.block_size * sum([len(each.blocks) for each in plan.admissions]) // pool.n_groups
            span, before = landing - before, landing
            self.held += span * held
            self.promised += span * promised
            self.seconds += span
            count += 1
            if sampled and count % every == 0:
                self.series.append((landing, held))
                if len(self.series) == _SAMPLES:
                    self.series, every = self.series[1::2], 2 * every

        return launched


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

    def met(self, outcome: Outcome | ShortOutcome) -> bool:
        """Whether a request was served in time."""
        if outcome.error is not None or not outcome.tokens:
            return False
        return outcome.first_token <= self.ttft and outcome.tpot <= self.tpot

    def share(self, outcomes: Iterable[Outcome | ShortOutcome]) -> float:
        """Share of the requests that were served in time."""
        return float(np.mean([self.met(each) for each in outcomes]))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes garbage collections rarer: a simulation makes many values, and no cycles of them."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def bucket_costs(roofline: Roofline, sizes: Sequence[int], max_rows: int) -> tuple[BucketCost, ...]:
    """The bucket costs that the engine would measure at start: time between iterations.

    As in the engine, at most `max_rows` rows decode and the rest of the bucket is a prompt.
    """
    costs = []
    for size in sizes:
        rows = min(size, max_rows)
        chunks = [(_CONTEXT, 1)] * (rows - 1) + [(0, size - rows + 1)]
        milliseconds = 1e3 * max(stage.total for stage in roofline(chunks))
        read = sum(start for start, _ in chunks)
        costs.append(BucketCost(size=size, compile_seconds=0.0, milliseconds=milliseconds, slots_read=read))
    return tuple(costs)


def slot_milliseconds(roofline: Roofline, max_rows: int) -> float:
    """Milliseconds of an iteration per slot read, as the engine would measure at start."""
    near, far = (
        max(stage.total for stage in roofline([(context, 1)] * max_rows)) for context in (_CONTEXT, _LONG_CONTEXT)
    )
    return 1e3 * (far - near) / (max_rows * (_LONG_CONTEXT - _CONTEXT))


def iteration_seconds(roofline: Roofline, *, padded: bool) -> StageSeconds:
    """Seconds of an iteration in each stage.

    Args:
      padded: whether an iteration costs as much as its bucket, rather than as its tokens.
    """

    def seconds(plan: IterationPlan) -> list[float]:
        chunks = [(start, length) for _, start, length, _ in plan.chunks] if plan.chunks else ()
        steady = (plan.steady, plan.starts) if isinstance(plan, SteadyPlan) else (0, 0)
        return roofline.totals(chunks, plan.bucket if padded else 0, steady)

    return seconds
