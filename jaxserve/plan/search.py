"""Searches all layouts of a model over a set of devices and ranks them by throughput."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from rich.console import Console
from rich.table import Table

from jaxserve.plan.cost import ITEMSIZE
from jaxserve.plan.deployment import Deployment, model_of
from jaxserve.plan.predict import BucketPlan, Plan, predict
from jaxserve.weights.naming import parameters
from jaxserve.weights.quantize import is_quantized
from sharding.spec import PADDABLE, ShardingSpec

_POINT = ("rows", "milliseconds", "tokens_per_second")
_TOO_LARGE = "the weights do not fit"
_SHOWN = 20  # rows of the ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout that fits.

    Attributes:
      rules: the changes to the spec, as text.
      points: (rows, ms between a request's tokens, tokens per second of all replicas), for each number of rows that
        the slots hold at the deployment's context, ascending.
    """

    plan: Plan
    rules: str
    points: tuple[tuple[int, float, float], ...]

    @property
    def tokens_per_second(self) -> float:
        """Throughput with as many rows as fit."""
        return self.points[-1][2]

    @property
    def label(self) -> str:
        """The layout as text: tensor x stages x replicas."""
        engine = self.plan.deployment.engine
        return f"{engine.tensor} x {engine.stages} x {engine.replicas}"


def search(deployment: Deployment, progress: Callable[[str, int, int], None]) -> tuple[list[Candidate], dict[str, int]]:
    """Try all pairs of tensor and stages with all choices of rules; other devices are replicas.

    Returns:
      (candidates, fastest first; reasons why others were left out -> how many).
    """
    questions = list(_questions(deployment))
    weights = sum(
        shape.size * (1 if deployment.engine.quantize and is_quantized(name) else ITEMSIZE[deployment.dtype])
        for name, shape, _, _ in parameters(model_of(deployment.config), jnp.dtype(deployment.dtype))
    )
    found, left_out = [], Counter[str]()
    for done, (question, rules) in enumerate(questions):
        progress("searching", done, len(questions))
        if weights > question.engine.tensor * question.engine.stages * deployment.topology.device.memory:
            left_out[_TOO_LARGE] += 1  # known without a plan
            continue
        try:
            plan = predict(question)
        except ValueError as problem:
            left_out[_kind(str(problem))] += 1
            continue
        points = tuple(_points(plan))
        if points:
            found.append(Candidate(plan=plan, rules=rules, points=points))
        else:
            left_out["no slots for a single row"] += 1
    progress("searching", len(questions), len(questions))
    return sorted(found, key=lambda each: -each.tokens_per_second), dict(left_out)


def _questions(deployment: Deployment) -> Iterator[tuple[Deployment, str]]:
    devices, rows = deployment.topology.num_devices, deployment.engine.max_rows
    counts = model_of(deployment.config).axis_sizes()
    ladder = {rows, deployment.buckets[-1], *(1 << power for power in range(rows.bit_length()))}
    for tensor, stages in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (tensor * stages) or stages > deployment.config.num_layers:
            continue
        engine = dataclasses.replace(
            deployment.engine,
            tensor=tensor,
            stages=stages,
            replicas=devices // (tensor * stages),
            layers_per_stage=None,
            buckets=tuple(sorted(ladder)),
        )
        laid = dataclasses.replace(deployment, engine=engine)
        for spec, rules in _specs(deployment.spec, counts, tensor) if tensor > 1 else [(deployment.spec, "")]:
            yield dataclasses.replace(laid, spec=spec), rules


def _specs(base: ShardingSpec, counts: Mapping[str, int], tensor: int) -> Iterator[tuple[ShardingSpec, str]]:
    """The spec with each of its split axes split, padded if it does not divide, or whole."""
    axes = [axis for axis in PADDABLE if base.rules.get(axis) is not None]
    ways = [("padded" if counts[axis] % tensor else "", "none") for axis in axes]
    for choice in itertools.product(*ways):
        chosen = dict(zip(axes, choice, strict=True))
        changed = ", ".join(f"{axis} {how}" for axis, how in chosen.items() if how)
        rules = {**base.rules, **{axis: None for axis, how in chosen.items() if how == "none"}}
        pad = base.pad | {axis for axis, how in chosen.items() if how == "padded"}
        yield dataclasses.replace(base, rules=rules, pad=pad), changed


def _points(plan: Plan) -> Iterator[tuple[int, float, float]]:
    """Points for a growing number of rows per batch in flight, while the slots suffice."""
    stages = plan.deployment.engine.stages
    batches = 1 if stages == 1 else stages + 1
    for bucket in plan.buckets:
        if bucket.tokens > plan.deployment.engine.max_rows:
            break
        if batches * bucket.tokens * (plan.deployment.context + 1) <= plan.slots:
            yield bucket.tokens, 1e3 * stages * _pace(bucket), bucket.tokens_per_second


def _pace(bucket: BucketPlan) -> float:
    return bucket.stages[bucket.slowest].total


def frontier(candidates: Sequence[Candidate]) -> list[tuple[Candidate, tuple[int, float, float]]]:
    """The points that no other beats in both latency and throughput, lowest latency first."""
    points = [(each, point) for each in candidates for point in each.points]
    best, kept = 0.0, []
    for each, point in sorted(points, key=lambda pair: (pair[1][1], -pair[1][2])):
        if point[2] > best:
            best = point[2]
            kept.append((each, point))
    return kept


def show(candidates: Sequence[Candidate], left_out: dict[str, int], out: Console) -> None:
    """Print the ranking and the frontier."""
    table = _table(
        "rank", "tensor x stages x replicas", "rules", "rows", "tokens/s", "ms a token", "bound by", "requests"
    )
    for rank, each in enumerate(candidates[:_SHOWN], start=1):
        rows, latency, speed = each.points[-1]
        bucket = next(bucket for bucket in each.plan.buckets if bucket.tokens == rows)
        requests = f"{each.plan.requests * each.plan.deployment.engine.replicas:,}"
        table.add_row(
            str(rank), each.label, each.rules, str(rows), f"{speed:,.0f}", f"{latency:.1f}", bucket.bottleneck, requests
        )
    out.print("\n[bold]All that fit, by predicted tokens/s with as many rows as the slots allow[/bold]")
    out.print(table)
    if len(candidates) > _SHOWN:
        out.print(f"and {len(candidates) - _SHOWN} slower ones")
    for reason, count in sorted(left_out.items(), key=lambda item: -item[1]):
        out.print(f"left out: {count} ({reason})")
    table = _table("ms a token", "tokens/s", "rows", "tensor x stages x replicas", "rules")
    for each, (rows, latency, speed) in frontier(candidates):
        table.add_row(f"{latency:.1f}", f"{speed:,.0f}", str(rows), each.label, each.rules)
    out.print("\n[bold]The frontier: no other layout beats these in both[/bold]")
    out.print(table)


def as_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON values."""
    deployment = candidate.plan.deployment
    return {
        "tensor": deployment.engine.tensor,
        "stages": deployment.engine.stages,
        "replicas": deployment.engine.replicas,
        "rules": candidate.rules,
        "slots": candidate.plan.slots,
        "tokens_per_second": candidate.tokens_per_second,
        "points": [dict(zip(_POINT, each, strict=True)) for each in candidate.points],
    }


def plot(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Plot throughput over latency: the best rules of each layout, and the frontier of all."""
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    drawn: set[str] = set()
    for each in candidates:
        if each.label not in drawn and len(drawn) < 12:
            drawn.add(each.label)
            axis.plot(*_curve(each.points), marker=".", linewidth=1, alpha=0.8, label=each.label)
    best = [point for _, point in frontier(candidates)]
    axis.plot(*_curve(best), color="black", linewidth=3, alpha=0.25, label="frontier", zorder=0)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_xlabel("ms between a request's tokens (predicted)")
    axis.set_ylabel("tokens/s (predicted)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, title="tensor x stages x replicas", title_fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _curve(points: Sequence[tuple[int, float, float]]) -> tuple[list[float], list[float]]:
    return [latency for _, latency, _ in points], [speed for _, _, speed in points]


def _kind(problem: str) -> str:
    """The kind of an error, for counting."""
    for sign, kind in (
        ("does not divide", "a size does not divide"),
        ("the weights take", _TOO_LARGE),
        ("no room for keys", "no room for keys and values"),
    ):
        if sign in problem:
            return kind
    return problem.splitlines()[0]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("rules", "bound by") else "right", no_wrap=True)
    return table
