"""Searches all layouts of a model over a set of devices and ranks them by throughput."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.planning import drawing
from jaxserve.planning.deployment import Deployment, model_of
from jaxserve.planning.plan_report import times
from jaxserve.planning.predict import Plan, predict
from jaxserve.planning.tables import as_json, table
from jaxserve.weights.int8_weights import is_quantized
from jaxserve.weights.naming import parameters
from sharding.spec import PADDABLE, ShardingSpec

_LAYOUT = "tensor x stages x replicas"
_LATENCY, _SPEED = "ms a token", "tokens/s"
_TOO_LARGE = "the weights do not fit"
_BY_EXPERT = "by expert"  # whole experts on each device, instead of a part of every expert
_SHOWN = 20  # rows of the ranking


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
    """

    plan: Plan
    rules: str
    points: tuple[Throughput, ...]

    @property
    def engine(self) -> EngineConfig:
        return self.plan.deployment.engine

    @property
    def tokens_per_second(self) -> float:
        """Throughput with as many rows as fit."""
        return self.points[-1].tokens_per_second

    @property
    def label(self) -> str:
        """The layout as text: tensor x stages x replicas."""
        return f"{self.engine.tensor} x {self.engine.stages} x {self.engine.replicas}"


def search(deployment: Deployment, progress: Callable[[str, int, int], None]) -> tuple[list[Candidate], dict[str, int]]:
    """Try all pairs of tensor and stages with all choices of rules; other devices are replicas.

    Returns:
      (candidates, fastest first; reasons why others were left out -> how many).

    Raises:
      ValueError: none fits; the message has the reasons.
    """
    deployments = list(_layouts(deployment))
    weights = sum(
        shape.size * (1 if deployment.engine.quantize and is_quantized(name) else jnp.dtype(deployment.dtype).itemsize)
        for name, shape, _, _ in parameters(model_of(deployment.config), jnp.dtype(deployment.dtype))
    )
    found, left_out = [], Counter[str]()
    for done, (candidate, rules) in enumerate(deployments):
        progress("searching", done, len(deployments))
        if weights > candidate.engine.stage_devices * candidate.engine.stages * deployment.topology.device.memory:
            left_out[_TOO_LARGE] += 1  # known without a plan
            continue
        try:
            plan = predict(candidate)
            plan.roofline()  # without it there is nothing to rank by
        except ValueError as problem:
            left_out[_kind(str(problem))] += 1
            continue
        if points := tuple(_points(plan)):
            count, held = plan.padding.get("kv_heads", (1, 1))
            repeated = f"kv heads {times(held // count)}" if held % count == 0 and held > count else ""
            told = ", ".join(filter(None, (rules, repeated)))
            found.append(Candidate(plan=plan, rules=told, points=points))
        else:
            left_out["no slots for a single row"] += 1
    progress("searching", len(deployments), len(deployments))
    if not found:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in left_out.items())
        raise ValueError(
            f"{deployment.name} does not fit on {deployment.topology} in any way{': ' if reasons else ''}{reasons}"
        )
    return sorted(found, key=lambda each: -each.tokens_per_second), dict(left_out)


def _layouts(deployment: Deployment) -> Iterator[tuple[Deployment, str]]:
    devices, rows = deployment.topology.num_devices, deployment.engine.max_rows
    counts = model_of(deployment.config).axis_sizes()
    ladder = {rows, deployment.buckets[-1], *(1 << power for power in range(rows.bit_length()))}
    for tensor, stages in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (tensor * stages) or stages > deployment.config.num_layers:
            continue
        engine = dataclasses.replace(
            deployment.engine,
            mesh=None,
            sharding=None,
            tensor=tensor,
            stages=stages,
            replicas=devices // (tensor * stages),
            layers_per_stage=None,
            buckets=tuple(sorted(ladder)),
        )
        for spec, rules in _specs(deployment.spec, counts, tensor) if tensor > 1 else [(deployment.spec, "")]:
            yield dataclasses.replace(deployment, engine=engine, spec=spec), rules


def _specs(base: ShardingSpec, counts: Mapping[str, int], tensor: int) -> Iterator[tuple[ShardingSpec, str]]:
    """The spec with each of its split axes split, padded if it does not divide, or whole."""
    axes = [axis for axis in PADDABLE if base.rules.get(axis) is not None and axis in counts]
    kv_heads = counts.get("kv_heads", counts["heads"])
    units = {**counts, "heads": 0 if tensor % kv_heads == 0 else kv_heads}  # of heads; repeated KV heads always divide
    ways = [["padded" if units[axis] % tensor else "", "none"] for axis in axes]
    if "expert" in counts and counts["expert"] % tensor == 0 and "ffn" in axes:
        ways[axes.index("ffn")].append(_BY_EXPERT)
    for choice in itertools.product(*ways):
        chosen = {axis: how for axis, how in zip(axes, choice, strict=True) if how}
        rules = {**base.rules, **{axis: None for axis, how in chosen.items() if how != "padded"}}
        if chosen.get("ffn") == _BY_EXPERT:
            rules["expert"] = base.rules["ffn"]
        pad = base.pad | {axis for axis, how in chosen.items() if how == "padded"}
        changed = ", ".join(f"{axis} {how}" for axis, how in chosen.items())
        yield dataclasses.replace(base, rules=rules, pad=pad), changed


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


def show(candidates: Sequence[Candidate], left_out: dict[str, int], out: Console) -> None:
    """Print the ranking and the frontier."""
    columns = ("rank", _LAYOUT, "rules", "rows", _SPEED, _LATENCY, "bound by", "requests")
    rows = []
    for rank, each in enumerate(candidates[:_SHOWN], start=1):
        count, latency, speed = each.points[-1]
        bucket = next(bucket for bucket in each.plan.buckets if bucket.tokens == count)
        requests = f"{each.plan.requests * each.engine.replicas:,}"
        told = (str(count), f"{speed:,.0f}", f"{latency:.1f}", bucket.bottleneck or "", requests)
        rows.append((str(rank), each.label, each.rules, *told))
    out.print("\n[bold]All that fit, by predicted tokens/s with as many rows as the slots allow[/bold]")
    out.print(table(columns, rows))
    if len(candidates) > _SHOWN:
        out.print(f"and {len(candidates) - _SHOWN} slower ones")
    for reason, count in sorted(left_out.items(), key=lambda item: -item[1]):
        out.print(f"left out: {count} ({reason})")
    rows = [
        (f"{latency:.1f}", f"{speed:,.0f}", str(count), each.label, each.rules)
        for each, (count, latency, speed) in frontier(candidates)
    ]
    out.print("\n[bold]The frontier: no other layout beats these in both[/bold]")
    out.print(table((_LATENCY, _SPEED, "rows", _LAYOUT, "rules"), rows))


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON values."""
    return {name: getattr(candidate.engine, name) for name in ("tensor", "stages", "replicas")} | {
        "rules": candidate.rules,
        "slots": candidate.plan.slots,
        "tokens_per_second": candidate.tokens_per_second,
        "points": as_json(candidate.points),
    }


def plot(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Plot throughput over latency: the best rules of each layout, and the frontier of all."""
    figure = drawing.figure(8.5, 5)
    axis = figure.subplots()
    best: dict[str, Candidate] = {}
    for each in candidates:
        best.setdefault(each.label, each)
    for label, each in list(best.items())[:12]:
        _, latencies, speeds = zip(*each.points, strict=True)
        axis.plot(latencies, speeds, marker=".", linewidth=1, alpha=0.8, label=label)
    _, latencies, speeds = zip(*(point for _, point in frontier(candidates)), strict=True)
    axis.plot(latencies, speeds, color="black", linewidth=3, alpha=0.25, label="frontier", zorder=0)
    axis.set(xlabel="ms between a request's tokens (predicted)", ylabel="tokens/s (predicted)", xlim=(0, None))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, title=_LAYOUT, title_fontsize=9)
    drawing.save(figure, path)


def _kind(problem: str) -> str:
    """The kind of an error, for counting."""
    kinds = {
        "does not divide": "a size does not divide",
        "the weights take": _TOO_LARGE,
        "no room for keys": "no room for keys and values",
        "is unknown": "collectives unknown",
    }
    return next((kind for sign, kind in kinds.items() if sign in problem), problem.splitlines()[0])
