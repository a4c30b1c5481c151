"""`jaxserve simulate --trace`: compares scheduling policies on the same traffic."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.planning import drawing
from jaxserve.planning.plan import Plan
from jaxserve.planning.tables import table
from jaxserve.simulate.outcome import Distribution, GapCounts, ShortOutcome
from jaxserve.simulate.system import (
    Objective,
    SimulatedEngine,
    SimulationResult,
    bucket_costs,
    iteration_seconds,
    slot_milliseconds,
)
from jaxserve.simulate.virtual_clock import Arrival, arrivals
from jaxserve.simulate.workload import DrawnPrompt, Workload

HOST_BANDWIDTH = 25e9  # bytes a second between a device and its host, one way: what PCIe 4.0 x16 gives of its 32e9
_NO_CLASS = ""  # of requests that are not told apart
URGENT = 1  # priority of the requests that are served first


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy to compare.

    Attributes:
      changes: changes to the engine's settings.
      urgent: share of the requests that get priority URGENT.
      flood: another tenant sends this many times as much traffic of the same kind.
      as_one: the scheduler does not know the tenants apart.
    """

    name: str
    changes: dict[str, Any]
    urgent: float = 0.0
    flood: float = 0.0
    as_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Traffic served under one policy.

    Attributes:
      classes: the class of each request, in order of arrival.
    """

    policy: Policy
    served: SimulationResult
    classes: tuple[str, ...]

    def by_class(self) -> dict[str, list[ShortOutcome]]:
        """The outcomes of each class of requests."""
        found: dict[str, list[ShortOutcome]] = {}
        for name, outcome in zip(self.classes, self.served.outcomes, strict=True):
            found.setdefault(name, []).append(outcome)
        return found


def system_of(plan: Plan, config: EngineConfig) -> SimulatedEngine:
    """The simulated engine for a plan, with the plan's slots and roofline and these settings.

    Raises ValueError if the plan's speed is unknown.
    """
    deployment, roofline = dataclasses.replace(plan.deployment, engine=config), plan.roofline()
    blocks = [_block_bytes(plan, group) for group in range(plan.groups.count)]
    return SimulatedEngine(
        config=config,
        seconds=iteration_seconds(roofline, padded=True),
        costs=bucket_costs(roofline, deployment.buckets, config.max_rows),
        slot_milliseconds=slot_milliseconds(roofline, config.max_rows),
        slots=plan.slots,
        groups=plan.groups,
        replicas=config.replicas,
        block_bytes=tuple(sum(devices * part for devices, part in parts) for parts in blocks),
        copy_seconds=tuple(max(part for _, part in parts) / HOST_BANDWIDTH for parts in blocks),
    )


def _block_bytes(plan: Plan, group: int) -> list[tuple[int, int]]:
    """Each stage's devices, and bytes of its part of a cache group's block on each of them."""
    return [
        (
            math.prod(stage.load.mesh.values()),
            plan.block_size
            * sum(each.slot_bytes for each in stage.load.attention if plan.groups.index(each.window) == group),
        )
        for stage in plan.stages
    ]


def policies(system: SimulatedEngine, objective: Objective, urgent: float, flood: float = 0.0) -> list[Policy]:
    """The policies to compare.

    These are both slot policies, no prefix cache, smaller token budgets, a budget that follows the load, two classes of
    requests, and a tenant that floods the engine, in turns and without.
    """
    grow: dict[str, Any] = {"slot_policy": "grow"}
    sizes = [cost.size for cost in system.costs]
    smaller = [size for size in sizes[-3:-1] if size > system.config.max_rows]
    made = [
        Policy(name="reserve", changes={"slot_policy": "reserve"}),
        Policy(name="grow", changes=grow),
        Policy(name="no prefix cache", changes=grow | {"prefix_cache": False, "host_cache": None}),
        *(Policy(name=f"budget {size}", changes=grow | {"token_budget": size}) for size in smaller),
        Policy(name=f"tpot {1e3 * objective.tpot:g} ms", changes=grow | {"target_tpot": objective.tpot}),
    ]
    if system.config.host_cache is not None:
        made.append(Policy(name="no host cache", changes=grow | {"host_cache": None}))
    if urgent:
        made.append(Policy(name=f"{100 * urgent:g}% urgent", changes=grow, urgent=urgent))
    if flood:
        made.append(Policy(name=f"{flood:g}x flood", changes=grow, flood=flood))
        made.append(Policy(name=f"{flood:g}x flood as one tenant", changes=grow, flood=flood, as_one=True))
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
      max_tokens: limit that clients request, if it is more than they use.
      seed: seed for the choice of urgent requests.
    """
    incoming = arrivals(workload, max_tokens=max_tokens, max_context=system.groups.max_context)
    replays = []
    for done, policy in enumerate(chosen):
        progress("simulating", done, len(chosen))
        config = dataclasses.replace(system.config, **policy.changes)
        mixed, classes = _mixed(incoming, policy, seed)
        served = dataclasses.replace(system, config=config).serve(mixed)
        replays.append(PolicyResult(policy=policy, served=served, classes=classes))
    progress("simulating", len(chosen), len(chosen))
    return replays


def _mixed(incoming: Sequence[Arrival], policy: Policy, seed: int) -> tuple[Sequence[Arrival], tuple[str, ...]]:
    """The traffic of a policy, and the class of each request."""
    if policy.urgent:
        urgent = np.random.default_rng([seed, 4]).random(len(incoming)) < policy.urgent
        mixed = [each._replace(priority=URGENT * bool(mark)) for each, mark in zip(incoming, urgent, strict=True)]
        return mixed, tuple("urgent" if mark else "others" for mark in urgent)
    if policy.flood:
        mixed = _flooded(incoming, policy.flood, seed)
        classes = tuple(each.tenant for each in mixed)
        return [each._replace(tenant="") for each in mixed] if policy.as_one else mixed, classes
    return incoming, tuple(each.tenant or _NO_CLASS for each in incoming)


def _flooded(incoming: Sequence[Arrival], times: float, seed: int) -> list[Arrival]:
    """The traffic, and another tenant's: copies with other tokens, each begun elsewhere."""
    duration = incoming[-1].time
    mixed = [each._replace(tenant="trace") for each in incoming]
    offsets = np.random.default_rng([seed, 5]).random(-int(-times // 1)) * duration
    for copy, offset in enumerate(offsets):
        part = incoming[: round(min(times - copy, 1) * len(incoming))]
        mixed += [
            each._replace(time=(each.time + offset) % duration, prompt=_shifted(each.prompt, copy + 1), tenant="flood")
            for each in part
        ]
    return sorted(mixed, key=lambda each: each.time)


def _shifted(prompt: np.ndarray | DrawnPrompt, by: int) -> np.ndarray | DrawnPrompt:
    """A prompt with other token ids; equal prefixes stay equal."""
    return prompt.shifted(by) if isinstance(prompt, DrawnPrompt) else prompt + by


def figures(replay: PolicyResult, objective: Objective) -> dict[str, Any]:
    """The reported figures of a replay: milliseconds, tokens, requests per second."""
    served = replay.served
    first, tpot, refused = array("d"), array("d"), set[str]()
    for each in served.outcomes:
        if each.error is not None:
            refused.add(each.error)
        elif each.tokens:
            first.append(each.first_token)
            tpot.extend((each.tpot,) * (each.tokens > 1))
    duration, seconds, share = served.duration or np.inf, served.seconds or np.inf, objective.share(served.outcomes)
    classes = replay.by_class() if any(replay.classes) else {}
    return {
        "policy": replay.policy.name,
        "requests": len(served.outcomes),
        "refused": len(served.outcomes) - len(first),
        "refusals": sorted(refused)[:3],
        "tokens_per_second": served.generated / duration,
        "ttft_ms": _spread(first),
        "tpot_ms": _spread(tpot),
        "gap_ms": _gaps(served.outcomes.gaps),
        "in_time": share,
        "goodput": share * len(served.outcomes) / duration,
        "slots_held": served.held / seconds / served.slots,
        "slots_promised": served.promised / seconds / served.slots,
        "cached_tokens": served.cached,
        "cached_share": served.cached / max(served.prompts, 1),
        "from_host_tokens": served.loaded,
        "preemptions": served.preemptions,
        "padding": served.padding,
        "use": served.use,
        "classes": {
            name: {
                "in_time": objective.share(outcomes),
                "ttft_ms": _spread(each.first_token for each in outcomes if each.tokens),
            }
            for name, outcomes in classes.items()
            if name != _NO_CLASS
        },
    }


_FROM_HOST = "from host"
# Column -> text of a policy's figures.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "policy": lambda values: values["policy"],
    "tokens/s": lambda values: f"{values['tokens_per_second']:,.0f}",
    "ttft ms p50 / p95": lambda values: _p50_p95(values["ttft_ms"]),
    "tpot ms p50 / p95": lambda values: _p50_p95(values["tpot_ms"]),
    "gap ms p99": lambda values: "-" if values["gap_ms"] is None else f"{values['gap_ms']['p99']:,.0f}",
    "in time": lambda values: f"{values['in_time']:.1%}",
    "goodput/s": lambda values: f"{values['goodput']:.2f}",
    "refused": lambda values: str(values["refused"]),
    "slots held": lambda values: f"{values['slots_held']:.1%}",
    "and promised": lambda values: f"{values['slots_promised']:.1%}",
    "cached": lambda values: f"{values['cached_tokens']:,}",
    _FROM_HOST: lambda values: f"{values['from_host_tokens']:,}",
    "preempted": lambda values: f"{values['preemptions']:,}",
    "padding": lambda values: f"{values['padding']:.1%}",
    "in use": lambda values: f"{values['use']:.1%}",
}


def show(values: Sequence[dict[str, Any]], objective: Objective, slots: int, out: Console) -> None:
    """Print one row per policy, and the two classes of requests if there are any."""
    from_host = any(each["from_host_tokens"] for each in values)
    columns = {name: text for name, text in _COLUMNS.items() if from_host or name != _FROM_HOST}
    out.print(table(tuple(columns), [[text(each) for text in columns.values()] for each in values]))
    for each in values:
        for name, found in each["classes"].items():
            spread = _p50_p95(found["ttft_ms"])
            out.print(f"{each['policy']}, {name}: {found['in_time']:.1%} in time, ttft ms p50 / p95 {spread}")
        for refusal in each["refusals"]:
            out.print(f"{each['policy']}: refused: {refusal}", markup=False)
    out.print(
        f"tpot: mean time between a request's tokens; gap: time between two tokens; in time: {objective}; goodput: "
        f"requests in time per second. Slots: shares of {slots:,}, over time; in use: share of the stages' time"
    )


def plot(replays: Sequence[PolicyResult], objective: Objective, title: str, path: Path) -> None:
    """Plot the distributions of both latencies, and the slots in use over time."""
    figure = drawing.figure(14, 4.2)
    figure.suptitle(title, fontsize=10)
    first, between, slots = figure.subplots(1, 3)
    for replay in replays:
        good = [each for each in replay.served.outcomes if each.tokens]
        for axis, seconds in (
            (first, [each.first_token for each in good]),
            (between, [each.tpot for each in good if each.tokens > 1]),
        ):
            shares = np.arange(1, len(seconds) + 1) / max(len(seconds), 1)
            axis.step(1e3 * np.sort(seconds), shares, where="post", linewidth=1.2, label=replay.policy.name)
        if replay.served.series:
            slots.plot(*zip(*replay.served.series, strict=True), linewidth=1)
    for axis, limit, what in (
        (first, objective.ttft, "time to first token"),
        (between, objective.tpot, "time between tokens, mean of each request"),
    ):
        axis.axvline(1e3 * limit, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="ms", ylabel="share of requests", title=what)
        axis.xaxis.get_major_locator().set_params(subs=(1, 3))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_formatter("")
        axis.tick_params(axis="x", labelsize=7)
    slots.set(xlabel="seconds", ylabel="slots", title="slots held", ylim=(0, None))
    slots.yaxis.set_major_formatter("{x:,.0f}")
    for axis in (first, between, slots):
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    first.legend(loc="lower right", fontsize=8)  # the best place takes long to find
    drawing.save(figure, path)


def _spread(seconds: Iterable[float]) -> dict[str, float] | None:
    """Percentiles in milliseconds."""
    found = Distribution.of(1e3 * each for each in seconds)
    return None if found is None else {"p50": found.p50, "p95": found.p95, "p99": found.p99}


def _gaps(counts: GapCounts) -> dict[str, float] | None:
    """Percentiles in milliseconds."""
    found = {f"p{percent}": counts.percentile(percent) for percent in (50, 95, 99)}
    return {name: 1e3 * gap for name, gap in found.items() if gap is not None} or None


def _p50_p95(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['p50']:,.0f} / {spread['p95']:,.0f}"
