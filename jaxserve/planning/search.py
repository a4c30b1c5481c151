"""Searches all layouts of a model over a set of devices and ranks them by throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.planning import collectives
from jaxserve.planning.deployment import Deployment, model_of
from jaxserve.planning.plan import Plan, bucket_plan
from jaxserve.planning.plan_report import times
from jaxserve.planning.predict import predict
from jaxserve.planning.search_space import Layout

TOO_LARGE = "the weights do not fit"
WAITING = "waiting"  # the part of the time in which stages wait for the slowest


class Throughput(NamedTuple):
    """Speed of decoding: milliseconds between a request's tokens, tokens/s of all replicas."""

    rows: int
    milliseconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout that fits.

    Attributes:
      rules: the changes to the spec, as text.
      points: one for each number of rows that the slots hold at the deployment's context, ascending.
      is_bound: some collectives are unknown and left out, so it is slower than the points say.
    """

    plan: Plan
    rules: str
    points: tuple[Throughput, ...]
    is_bound: bool = False

    @property
    def engine(self) -> EngineConfig:
        return self.plan.deployment.engine

    @property
    def tokens_per_second(self) -> float:
        """Throughput with as many rows as fit."""
        return self.points[-1].tokens_per_second

    @property
    def label(self) -> str:
        """The layout as text: devices of a stage x stages x replicas."""
        return f"{self.engine.stage_devices} x {self.engine.stages} x {self.engine.replicas}"

    def spent(self) -> dict[str, float]:
        """Device milliseconds a token with as many rows as fit: by part, and waiting for a stage.

        They are what all devices spend, so they add up to devices / (tokens/s).
        """
        rows = self.points[-1].rows
        bucket = next(bucket for bucket in self.plan.buckets if bucket.tokens == rows)
        parts = self.plan.parts(bucket)
        assert parts is not None
        assert bucket.limit is not None
        waiting = sum(bucket.limit.total - stage.total for stage in bucket.stages)
        scale = 1e3 * self.engine.stage_devices / rows
        return {name: scale * seconds for name, seconds in (parts._asdict() | {WAITING: waiting}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search finds.

    Attributes:
      candidates: the layouts that fit, fastest first.
      unranked: those that may be faster than the first, because the compiler decides some of their collectives; the
        points are bounds. Those that are slower even without these collectives are among `slower`.
      slower: layouts whose bounds are below the first.
      left_out: reason -> labels of the layouts that are not possible.
    """

    candidates: list[Candidate]
    unranked: list[Candidate]
    slower: list[Candidate]
    left_out: dict[str, list[str]]


def search(
    deployment: Deployment,
    layouts: Iterable[Layout],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> SearchResult:
    """Predict all these layouts and rank them.

    Args:
      deployment: the model and the devices.
      layouts: such as `search_space.layouts`.
      progress: called with (step, done, total).

    Raises:
      ValueError: none fits; the message has the reasons.
    """
    tried, weights = list(layouts), _weights(deployment)
    found: list[Candidate] = []
    left_out: dict[str, list[str]] = {}
    for done, (candidate, rules) in enumerate(tried):
        progress("searching", done, len(tried))
        engine = candidate.engine
        label = f"{engine.stage_devices} x {engine.stages} x {engine.replicas}"
        try:
            if weights > engine.stage_devices * engine.stages * deployment.topology.device.memory:
                raise ValueError(TOO_LARGE)  # known without a plan
            found.append(_candidate(predict(candidate), rules))
        except ValueError as problem:
            left_out.setdefault(_kind(str(problem)), []).append(label)
    progress("searching", len(tried), len(tried))
    known = sorted((each for each in found if not each.is_bound), key=lambda each: -each.tokens_per_second)
    bounds = sorted((each for each in found if each.is_bound), key=lambda each: -each.tokens_per_second)
    if not known:
        left_out |= {"collectives unknown": [each.label for each in bounds]} if bounds else {}
        reasons = ", ".join(f"{len(labels)} x {reason}" for reason, labels in left_out.items())
        raise ValueError(
            f"{deployment.name} does not fit on {deployment.topology} in any way{': ' if reasons else ''}{reasons}"
        )
    best = known[0].tokens_per_second
    return SearchResult(
        candidates=known,
        unranked=[each for each in bounds if each.tokens_per_second >= best],
        slower=[each for each in bounds if each.tokens_per_second < best],
        left_out=left_out,
    )


def _weights(deployment: Deployment) -> int:
    """Bytes of one copy of the weights."""
    model, dtype = model_of(deployment.config), jnp.dtype(deployment.dtype)
    held = weights.describe(model, dtype, lambda *_: None, quantize=deployment.engine.quantize)
    return sum(map(weights.nbytes, jax.tree.leaves(held)))


def _candidate(plan: Plan, rules: str) -> Candidate:
    """The candidate of a plan. Raises ValueError if not even one row fits."""
    known = plan if plan.is_known else _bounded(plan)
    points = tuple(_points(known))
    if not points:
        raise ValueError("no slots for a single row")
    count, held = plan.padding.get("kv_heads", (1, 1))
    repeated = f"kv heads {times(held // count)}" if held % count == 0 and held > count else ""
    told = ", ".join(filter(None, (rules, repeated)))
    return Candidate(plan=known, rules=told, points=points, is_bound=not plan.is_known)


def _bounded(plan: Plan) -> Plan:
    """A plan without the collectives that are unknown, which is faster than the programs are."""
    gather, stages = plan.deployment.spec.gather, []
    for stage in plan.stages:
        certain = stage.load.collectives or collectives.gathers(stage.parameters, gather, stage.load.mesh)
        stages.append(replace(stage, load=replace(stage.load, collectives=certain)))
    bounded = replace(plan, stages=tuple(stages))
    roofline = bounded.roofline()
    buckets = tuple(bucket_plan(plan.deployment, roofline, tokens) for tokens in plan.deployment.buckets)
    return replace(bounded, buckets=buckets)


def _points(plan: Plan) -> Iterator[Throughput]:
    """Points for a growing number of rows per batch in flight, while the slots suffice."""
    stages = plan.deployment.engine.stages
    batches = 1 if stages == 1 else stages + 1
    for bucket in plan.buckets:
        fits = batches * bucket.tokens <= plan.fitting(plan.deployment.context + 1)
        if bucket.tokens <= plan.deployment.engine.max_rows and fits and bucket.limit and bucket.tokens_per_second:
            yield Throughput(bucket.tokens, 1e3 * stages * bucket.limit.total, bucket.tokens_per_second)


def frontier(candidates: Sequence[Candidate]) -> list[tuple[Candidate, Throughput]]:
    """The points that no other beats in both latency and throughput, lowest latency first."""
    points = [(each, point) for each in candidates for point in each.points]
    best, kept = 0.0, []
    for each, point in sorted(points, key=lambda pair: (pair[1].milliseconds, -pair[1].tokens_per_second)):
        if point.tokens_per_second > best:
            best = point.tokens_per_second
            kept.append((each, point))
    return kept


def _kind(problem: str) -> str:
    """The kind of an error, for counting."""
    kinds = {
        "does not divide": "a size does not divide",
        "the weights take": TOO_LARGE,
        "no memory left for keys": "no memory left for keys and values",
    }
    return next((kind for sign, kind in kinds.items() if sign in problem), problem.splitlines()[0])
