"""`jaxserve simulate --trace`: compares scheduling policies on the same traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich.console import Console
from rich.table import Table

from jaxserve.plan.cost import FITS
from jaxserve.plan.predict import Plan
from jaxserve.simulate.outcome import Distribution, Outcome
from jaxserve.simulate.roofline import Roofline
from jaxserve.simulate.system import Objective, SimulatedEngine, SimulationResult, tpot
from jaxserve.simulate.virtual_clock import Arrival, arrivals
from jaxserve.simulate.workload import Workload

URGENT = 1  # priority of the requests that are served first
_DASH = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy to compare.

    Attributes:
      changes: changes to the engine's settings.
      urgent: share of the requests that get priority URGENT.
    """

    name: str
    changes: dict[str, Any]
    urgent: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Traffic served under one policy.

    Attributes:
      urgent: whether each request had priority, in order of arrival.
    """

    policy: Policy
    served: SimulationResult
    urgent: tuple[bool, ...]

    def of(self, *, urgent: bool) -> list[Outcome]:
        """The outcomes of one class."""
        return [each for each, is_urgent in zip(self.served.outcomes, self.urgent, strict=True) if is_urgent == urgent]


def system_of(plan: Plan, *, replicas: int) -> SimulatedEngine:
    """The simulated engine for a plan, with the plan's slots and roofline."""
    deployment = plan.deployment
    fit = FITS[deployment.topology.device.platform]
    loads = [stage.load for stage in plan.stages]
    roofline = Roofline(loads, deployment.topology, dtype=deployment.dtype, fit=fit, padded=True)
    return SimulatedEngine(
        config=deployment.engine,
        seconds=roofline,
        costs=tuple(roofline.costs(deployment.buckets, deployment.engine.max_rows)),
        slots=plan.slots,
        block_size=plan.block_size,
        max_context=deployment.max_context,
        replicas=replicas,
    )


def policies(system: SimulatedEngine, objective: Objective, urgent: float) -> list[Policy]:
    """The policies to compare.

    These are both slot policies, no prefix cache, smaller token budgets, a budget that follows the load, and two
    classes of requests.
    """
    grow: dict[str, Any] = {"slot_policy": "grow"}
    sizes = [cost.size for cost in system.costs]
    smaller = [size for size in sizes[-3:-1] if size > system.config.max_rows]
    made = [
        Policy(name="reserve", changes={"slot_policy": "reserve"}),
        Policy(name="grow", changes=grow),
        Policy(name="no prefix cache", changes=grow | {"prefix_cache": False}),
        *(Policy(name=f"budget {size}", changes=grow | {"token_budget": size}) for size in smaller),
        Policy(name=f"tpot {1e3 * objective.tpot:g} ms", changes=grow | {"target_tpot": objective.tpot}),
    ]
    if urgent:
        made.append(Policy(name=f"{100 * urgent:g}% urgent", changes=grow, urgent=urgent))
    return made


def compare(
    system: SimulatedEngine,
    workload: Workload,
    chosen: Sequence[Policy],
    *,
    max_tokens: int | None,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> list[PolicyResult]:
    """Serve the workload under each policy.

    Args:
      max_tokens: tokens that clients ask for, if that is more than they use.
      seed: seed for the choice of urgent requests.
    """
    coming = arrivals(workload, max_tokens=max_tokens, max_context=system.max_context)
    draws = np.random.default_rng([seed, 4]).random(len(coming))
    replays = []
    for done, policy in enumerate(chosen):
        progress("simulating", done, len(chosen))
        urgent = draws < policy.urgent
        config = dataclasses.replace(system.config, **policy.changes)
        mixed = [Arrival(*each[:4], priority=URGENT * bool(mark)) for each, mark in zip(coming, urgent, strict=True)]
        served = dataclasses.replace(system, config=config).serve(mixed)
        replays.append(PolicyResult(policy=policy, served=served, urgent=tuple(map(bool, urgent))))
    progress("simulating", len(chosen), len(chosen))
    return replays


def figures(replay: PolicyResult, objective: Objective) -> dict[str, Any]:
    """The reported figures of a replay: milliseconds, tokens, requests per second."""
    served = replay.served
    good = [each for each in served.outcomes if each.error is None and each.token_times]
    refused = sorted({each.error for each in served.outcomes if each.error is not None})
    duration, share = served.duration, objective.share(served.outcomes)
    by_class = {}
    if replay.policy.urgent:
        for name, urgent in (("urgent", True), ("others", False)):
            theirs = replay.of(urgent=urgent)
            by_class[name] = {
                "in_time": objective.share(theirs),
                "ttft_ms": _spread(1e3 * each.first_token for each in theirs if each.token_times),
            }
    return {
        "policy": replay.policy.name,
        "requests": len(served.outcomes),
        "refused": len(served.outcomes) - len(good),
        "refusals": refused[:3],
        "tokens_per_second": served.generated / duration if duration else 0.0,
        "ttft_ms": _spread(1e3 * each.first_token for each in good),
        "tpot_ms": _spread(1e3 * tpot(each) for each in good if len(each.token_times) > 1),
        "gap_ms": _spread(1e3 * gap for each in good for gap in np.diff(each.token_times)),
        "in_time": share,
        "goodput": share * len(served.outcomes) / duration if duration else 0.0,
        "slots_held": served.held / served.seconds / served.slots if served.seconds else 0.0,
        "slots_promised": served.promised / served.seconds / served.slots if served.seconds else 0.0,
        "cached_tokens": served.cached,
        "preemptions": served.preemptions,
        "padding": 1 - served.carried / served.padded if served.padded else 0.0,
        "use": served.use,
        "classes": by_class,
    }


def show(told: Sequence[dict[str, Any]], objective: Objective, slots: int, out: Console) -> None:
    """Print one row per policy, and the two classes of requests if there are any."""
    columns = (
        "policy",
        "tokens/s",
        "ttft ms p50 / p95",
        "tpot ms p50 / p95",
        "gap ms p99",
        "in time",
        "goodput/s",
        "refused",
    )
    columns += ("slots held", "and promised", "cached", "preempted", "padding", "in use")
    table = _table(*columns)
    for each in told:
        table.add_row(
            each["policy"],
            f"{each['tokens_per_second']:,.0f}",
            _p50_p95(each["ttft_ms"]),
            _p50_p95(each["tpot_ms"]),
            _DASH if each["gap_ms"] is None else f"{each['gap_ms']['p99']:,.0f}",
            f"{each['in_time']:.1%}",
            f"{each['goodput']:.2f}",
            str(each["refused"]),
            f"{each['slots_held']:.1%}",
            f"{each['slots_promised']:.1%}",
            f"{each['cached_tokens']:,}",
            f"{each['preemptions']:,}",
            f"{each['padding']:.1%}",
            f"{each['use']:.1%}",
        )
    out.print(table)
    for each in told:
        for name, found in each["classes"].items():
            spread = _p50_p95(found["ttft_ms"])
            out.print(f"{each['policy']}, {name}: {found['in_time']:.1%} in time, ttft ms p50 / p95 {spread}")
        for refusal in each["refusals"]:
            out.print(f"{each['policy']}: refused: {refusal}", markup=False)
    out.print(
        f"tpot: mean between a request's tokens; gap: any two; in time: {objective}; goodput: requests a second "
        f"that were. Slots: shares of {slots:,}, over time; in use: of the stages' time"
    )


def plot(replays: Sequence[PolicyResult], objective: Objective, title: str, path: Path) -> None:
    """Plot the distributions of both latencies, and the slots held over time."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    first, between, slots = figure.subplots(1, 3)
    for replay in replays:
        name = replay.policy.name
        good = [each for each in replay.served.outcomes if each.token_times]
        _cumulative(first, [1e3 * each.first_token for each in good], name)
        _cumulative(between, [1e3 * tpot(each) for each in good if len(each.token_times) > 1], name)
        if replay.served.series:
            times, held, _ = zip(*replay.served.series, strict=True)
            slots.plot(times, held, linewidth=1, label=name)
    for axis, limit, what in (
        (first, objective.ttft, "time to first token"),
        (between, objective.tpot, "time between tokens, mean of each request"),
    ):
        axis.axvline(1e3 * limit, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="ms", ylabel="share of requests", title=what)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="x", labelsize=7)
    slots.set(xlabel="seconds", ylabel="slots", title="slots held", ylim=(0, None))
    slots.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axis in (first, between, slots):
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    first.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _cumulative(axis: Any, values: Sequence[float], name: str) -> None:
    ordered = np.sort(np.asarray(values))
    axis.step(ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1), where="post", linewidth=1.2, label=name)


def _spread(values: Any) -> dict[str, float] | None:
    found = Distribution.of(values)
    return None if found is None else {"p50": found.p50, "p95": found.p95, "p99": found.p99}


def _p50_p95(spread: dict[str, float] | None) -> str:
    return _DASH if spread is None else f"{spread['p50']:,.0f} / {spread['p95']:,.0f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column == "policy")
    return table
