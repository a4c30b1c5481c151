"""The setups of Orca's evaluation (OSDI'22, section 6): models, machines, trace and systems.

Two constants are fitted on the six published times of one model (101B); everything else is predicted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks import fastertransformer
from jaxserve.config import EngineConfig
from jaxserve.planning import model_catalog
from jaxserve.planning.calibration import Fit
from jaxserve.planning.cost import Roofline
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.plan import Plan
from jaxserve.planning.predict import predict
from jaxserve.scheduler.buckets import BucketCost, BucketLadder, default_sizes
from jaxserve.scheduler.policy import make_policy
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.simulate import fleet, virtual_clock
from jaxserve.simulate import workload as traffic
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.steady_scheduler import SteadyScheduler
from jaxserve.simulate.system import bucket_costs, iteration_seconds
from jaxserve.simulate.virtual_clock import Arrival, HostTimes, SimulatedDevice, SimulatedReplica
from sharding import specs
from sharding.devices import parse

PROMPT, OUTPUT = traffic.Range(low=32, high=512), traffic.Range(low=1, high=128)
# Section 6.1: batch size -> seconds for 32 tokens after prompts of 128, by 101B on 8 GPUs; read off figure 9.
MICROBENCHMARK = {1: 1.05, 2: 1.13, 4: 1.21, 8: 1.32, 16: 1.5, 32: 1.95}
OBJECTIVE = 0.19  # seconds a token at which 175B is compared in section 6.2; half of it is quick service
QUICK = 0.1
OUR_ROWS, OUR_TOKENS, OUR_BLOCK = 96, 384, 16
_ORCA_BLOCK = 8  # slots in a block where Orca has single ones: 1% more is reserved, and the simulation twice as fast
_CLOSE = 1.07  # ratio of two rates between which throughput is interpolated
_MOST = 6  # traces served to come that close to an objective
_LONGEST = PROMPT.high + OUTPUT.high

# What serves a trace.
Serve = Callable[[Sequence[Arrival]], list[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on its machines (table 1): stages of 8 A100-40GB each, or one GPU."""

    name: str
    tensor: int
    stages: int

    @property
    def plan(self) -> Plan:
        """What is predicted of it, on one machine a stage."""
        return _plan(self)

    @property
    def slots(self) -> int:
        """Slots that fit beside the weights."""
        return self.plan.slots

    def roofline(self, fit: Fit) -> Roofline:
        """The cost of iterations on these machines."""
        return self.plan.roofline(fit)


@functools.cache
def _plan(setup: Setup) -> Plan:
    name, config = model_catalog.find(f"gpt3-{setup.name.lower()}")
    engine = EngineConfig(tensor=setup.tensor, stages=setup.stages, max_rows=OUR_ROWS, token_budget=OUR_TOKENS)
    topology, spec = parse(f"a100-40g:{setup.stages}x{setup.tensor}"), specs.default(config.family)
    return predict(Deployment(name=name, config=config, topology=topology, engine=engine, spec=spec))


SETUPS = {
    setup.name: setup
    for setup in (
        Setup(name="13B", tensor=1, stages=1),
        Setup(name="101B", tensor=8, stages=1),
        Setup(name="175B", tensor=8, stages=2),
        Setup(name="341B", tensor=8, stages=4),
    )
}


def fitted(*, overlapped: bool) -> Fit:
    """The efficiency and overhead of a layer that fit MICROBENCHMARK best, by least squares."""
    rows = []
    for batch, seconds in MICROBENCHMARK.items():
        roof, both = (
            microbenchmark(SETUPS["101B"], batch, Fit(efficiency=1.0, layer_seconds=each, overlapped=overlapped))
            for each in (0.0, 1.0)
        )
        rows.append((roof / seconds, (both - roof) / seconds))
    inverse, layer_seconds = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return Fit(efficiency=float(1 / inverse), layer_seconds=float(layer_seconds), overlapped=overlapped)


def microbenchmark(setup: Setup, batch: int, fit: Fit) -> float:
    """Seconds of one batch whose requests begin and end together: prompts of 128, 32 tokens."""
    roofline = setup.roofline(fit)
    iterations = [[(0, 128)] * batch, *([(128 + step, 1)] * batch for step in range(31))]
    return sum(stage.total for chunks in iterations for stage in roofline(chunks))


def trace(rate: float, *, requests: int, seed: int) -> Sequence[Arrival]:
    """Section 6.2: uniform lengths, no end of sequence, Poisson arrivals.

    Traces of one seed at two rates differ in the scale of time alone.
    """
    return [each._replace(time=each.time / rate) for each in _trace(requests, seed)]


@functools.cache
def _trace(requests: int, seed: int) -> Sequence[Arrival]:
    """The trace at a request a second."""
    workload = traffic.uniform(requests=requests, prompt=PROMPT, output=OUTPUT, vocab_size=1, seed=seed)
    return virtual_clock.arrivals(traffic.poisson(workload, rate=1.0, seed=seed))[:]


def fastertransformer_of(setup: Setup, fit: Fit, max_batch: int) -> Serve:
    """FasterTransformer with batches of at most `max_batch` in one micro-batch."""
    seconds = fastertransformer.BatchSeconds(setup.roofline(fit))
    return lambda coming: fastertransformer.run(coming, seconds, max_batch=max_batch)


def orca_of(setup: Setup, fit: Fit, max_rows: int) -> Serve:
    """Orca: our scheduler restricted to Algorithm 1.

    Slots are reserved, one batch a stage is in flight, arrivals are seen at once, prompts are whole, and no shape is
    padded.
    """
    bucket = BucketCost(size=max_rows * _LONGEST, compile_seconds=0.0, milliseconds=1.0)

    def serve(coming: Sequence[Arrival]) -> list[Outcome]:
        scheduler = SteadyScheduler(
            SlotPool(setup.slots // _ORCA_BLOCK, _ORCA_BLOCK, policy="reserve", prefix_cache=False),
            BucketLadder([bucket]),
            max_rows=max_rows,
            max_context=_LONGEST,
            n_stages=setup.stages,
            in_flight=setup.stages,
        )
        device = SimulatedDevice(iteration_seconds(setup.roofline(fit), padded=False), setup.stages)
        replica = SimulatedReplica(scheduler, device, in_flight=setup.stages, host=HostTimes(polls=True))
        return fleet.serve(coming, [replica])

    return serve


def objective_of(setup: Setup, fit: Fit) -> float:
    """The latency at which systems are compared: twice the microbenchmark's at a batch of 32."""
    return OBJECTIVE if setup.name == "175B" else 2 * microbenchmark(setup, 32, fit) / 32


def ours_of(setup: Setup, fit: Fit) -> Serve:
    """Our engine: blocks on demand, a token budget by latency, the coarser default ladder."""
    target = objective_of(setup, fit)
    roofline = setup.roofline(fit)
    ladder = BucketLadder(bucket_costs(roofline, default_sizes(OUR_ROWS, OUR_TOKENS), OUR_ROWS))

    def serve(coming: Sequence[Arrival]) -> list[Outcome]:
        scheduler = SteadyScheduler(
            SlotPool(setup.slots // OUR_BLOCK, OUR_BLOCK, policy="grow", prefix_cache=False),
            ladder,
            max_rows=OUR_ROWS,
            max_context=_LONGEST,
            policy=make_policy(ladder, max_rows=OUR_ROWS, batches=setup.stages, target_tpot=target),
            n_stages=setup.stages,
            in_flight=setup.stages,
        )
        device = SimulatedDevice(iteration_seconds(roofline, padded=True), setup.stages)
        return fleet.serve(coming, [SimulatedReplica(scheduler, device, in_flight=setup.stages)])

    return serve


class Point(NamedTuple):
    """A trace served at one rate.

    Attributes:
      throughput: requests a second, from the first arrival to the last token.
      latency: median of the seconds from arrival to the last token, divided by the tokens generated.
      requests: of the trace.
    """

    rate: float
    throughput: float
    latency: float
    requests: int


class Survey(NamedTuple):
    """Where a curve begins: at this rate, and at ratios of `step`, with traces of so many seconds."""

    start: float
    step: float
    seconds: float


def point(serve: Serve, rate: float, *, requests: int, seed: int) -> Point:
    """Serves one trace."""
    outcomes = serve(trace(rate, requests=requests, seed=seed))
    seconds = max(each.token_times[-1] for each in outcomes) - outcomes[0].arrival
    latency = float(np.median([each.normalised for each in outcomes]))
    return Point(rate, len(outcomes) / seconds, latency, requests)


def curves(
    serve: Serve, survey: Survey, objectives: Sequence[float], *, requests: int, seeds: int
) -> list[list[Point]]:
    """A curve for each seed: the points of a survey, and of whole traces on both sides of each objective.

    Of a survey with shorter traces, the first seed's serves all, and the others have whole traces alone.
    """
    found: list[list[Point]] = []
    for seed in range(seeds):
        is_first = not found or survey.seconds == math.inf
        guide = _survey(serve, survey, 2 * max(objectives), requests, seed) if is_first else found[0]
        points = guide.copy() if is_first else []
        for objective in objectives:
            points += _around(guide, objective, requests, partial(point, serve, requests=requests, seed=seed))
            points.sort()
        found.append(points)
    return found


def _around(guide: Sequence[Point], objective: float, requests: int, served: Callable[[float], Point]) -> list[Point]:
    """New points of whole traces, with those of the guide on both sides of an objective and close to it.

    They are sought from where the guide crosses the objective, in steps that double until there is one on each side.
    """
    rate = _crossing(guide, objective)
    if rate is None:
        return []
    points, step = [], 1.04
    known = [each for each in guide if each.requests == requests] if guide[0].requests == requests else []
    for _ in range(_MOST):
        points.append(served(rate))
        both = sorted((*known, *points))
        low = max((each for each in both if each.latency <= objective), default=None)
        high = min((each for each in both if each.latency > objective and (not low or each > low)), default=None)
        if low is not None and high is not None:
            if high.rate < _CLOSE * low.rate:
                break
            rate = _between(low, high, objective)
        elif low is not None:
            rate, step = low.rate * step, step**2
        elif high is not None:
            rate, step = high.rate / step, step**2
    return points


def _crossing(points: Sequence[Point], objective: float) -> float | None:
    """The rate at which a curve crosses an objective, or its last one; None if it is always beyond."""
    before = None
    for each in points:
        if each.latency > objective:
            return None if before is None else _between(before, each, objective)
        before = each
    return None if before is None else before.rate


def _between(low: Point, high: Point, objective: float) -> float:
    """The rate of an objective between two points, on a line in logarithms."""
    share = math.log(objective / low.latency) / math.log(high.latency / low.latency)
    return low.rate * (high.rate / low.rate) ** min(max(share, 0.1), 0.9)


def _survey(serve: Serve, survey: Survey, latency: float, requests: int, seed: int) -> list[Point]:
    """Points at rising rates, until one is beyond this latency or the throughput no longer follows."""
    points: list[Point] = []
    rate = survey.start
    while not points or (points[-1].latency < latency and points[-1].throughput > 0.7 * points[-1].rate):
        count = requests if survey.seconds == math.inf else min(requests, math.ceil(rate * survey.seconds))
        points.append(point(serve, rate, requests=count, seed=seed))
        rate *= survey.step
    return points


def throughput_at(points: Sequence[Point], objective: float) -> float:
    """Requests a second at a latency, interpolated between the longest traces; 0 if none is as quick."""
    before, longest = None, max(each.requests for each in points)
    for each in points:
        if each.requests < longest:
            continue
        if each.latency > objective:
            if before is None:
                return 0.0
            share = (objective - before.latency) / (each.latency - before.latency)
            return before.throughput + share * (each.throughput - before.throughput)
        before = each
    assert before is not None
    return before.throughput
