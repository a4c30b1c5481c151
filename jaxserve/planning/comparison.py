"""Compares two plans and shows the values that differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.planning.hlo import KINDS
from jaxserve.planning.plan import Plan, StagePlan
from jaxserve.planning.plan_report import layout, padding, parameters_of, partition, payloads
from jaxserve.planning.tables import UNKNOWN, Section, number, shape, size
from sharding.spec import shown


class PlanDifference(NamedTuple):
    """A value that differs between two plans.

    Attributes:
      ours / theirs: the value as text; None in a plan without it.
      change: relative change in percent, or "".
    """

    what: str
    ours: str | None
    theirs: str | None
    change: str = ""


def differences(ours: Plan, theirs: Plan) -> list[PlanDifference]:
    """The values in which two plans differ, in the report's order; like stages share one."""
    one, other, found = _facts(ours), _facts(theirs), []
    for what in dict.fromkeys([*one, *other]):
        (text, before), (new, after) = one.get(what, _missing(ours, what)), other.get(what, _missing(theirs, what))
        if text != new:
            change = f"{100 * (after / before - 1):+.1f}%" if before and after is not None else ""
            found.append(PlanDifference(what, text, new, change))
    return _merged(found)


def _merged(found: Sequence[PlanDifference]) -> list[PlanDifference]:
    """The differences, with one entry for all stages of equal ones, at the place of the first."""
    alike: dict[PlanDifference, list[int]] = {}  # without its stage -> its stages; none for what is of no stage
    for each in found:
        stage = _STAGE.match(each.what)
        places = alike.setdefault(each._replace(what=each.what[stage.end() :]) if stage else each, [])
        places += [int(stage[1])] if stage else []
    return [
        each._replace(what=f"stage{'s' * (len(places) > 1)} {_shortened(places)}: {each.what}") if places else each
        for each, places in alike.items()
    ]


def _shortened(places: Sequence[int]) -> str:
    """Ascending numbers as text: "0-3, 5"."""
    firsts = [place for place in places if place - 1 not in places]
    lasts = [place for place in places if place + 1 not in places]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def section(found: Sequence[PlanDifference], names: tuple[str, str]) -> Section:
    """The differences of two plans under the names of their specs."""
    rows = [tuple(cell or "-" for cell in each[:3]) + each[3:] for each in found]
    notes = [] if rows else [f"{names[0]} and {names[1]} give the same plan"]
    return Section(f"{names[1]} against {names[0]}, differences only", ("", *names, "change"), rows, notes)


_STAGE = re.compile(r"stage (\d+): ")
_BAR = 60  # characters of a bar


def memory(plans: tuple[Plan, Plan], names: tuple[str, str]) -> Section:
    """A device's memory as bars, for each stage of both plans, under the names of their specs."""
    rows = [
        (name, str(index), _bar(stage, plan.memory[0]), f"{100 * stage.total / plan.memory[0]:.1f}%", size(stage.free))
        for plan, name in zip(plans, names, strict=True)
        for index, stage in enumerate(plan.stages)
    ]
    note = "w: weights, p: pool of keys and values, a: activations and row state, dots: free or left to the runtime"
    return Section("Memory of each device", ("", "stage", "bar", "in use", "free"), rows, [note])


def _bar(stage: StagePlan, whole: int) -> str:
    """A bar with a letter for each use; ends are rounded, not lengths, so that the sum is right."""
    uses = (("w", stage.weights), ("p", stage.pool), ("a", stage.activations + stage.state))
    bar, held = "", 0
    for letter, nbytes in uses:
        held += nbytes
        bar += letter * (round(_BAR * held / whole) - len(bar))
    return bar.ljust(_BAR, ".")


_Fact = tuple[str | None, float | None]  # a value as text and, if it is numeric, as a number


def _missing(plan: Plan, what: str) -> _Fact:
    """The fact of a plan under a name that only the other plan has."""
    depends = " after " in what or ": ms of " in what or what.rpartition(": ")[2] in KINDS
    return (UNKNOWN if depends and not plan.is_known else None, None)


def _facts(plan: Plan) -> dict[str, _Fact]:
    """Every value of a plan by name."""
    named = {axis for part in parameters_of(plan).values() for axis in part.axes}
    facts: dict[str, _Fact] = {
        f"[{title}] {axis}": (shown(target), None)
        for title, rules in plan.deployment.spec.sections().items()
        for axis, target in rules.items()
        if title != "axes" or axis in named  # a rule that no parameter follows changes nothing
    }
    facts |= {name: (text, None) for name, text in {"layout": layout(plan), **padding(plan)}.items()}
    for name, part in parameters_of(plan).items():
        facts[name] = (f"{partition(part)} {shape(part.local)}, {size(part.nbytes)}", part.nbytes)
    for index, stage in enumerate(plan.stages):
        for name in ("weights", "pool", "activations", "state"):
            nbytes = getattr(stage, name) if name != "activations" or stage.activations_known else None
            facts[f"stage {index}: {name}"] = (UNKNOWN if nbytes is None else size(nbytes), nbytes)
        for each in stage.load.collectives or ():
            text = f"{each.times} x {size(each.nbytes)} a {'row' if each.per_row else 'token'} over {each.group}"
            facts[f"stage {index}: {each.kind} after {each.what}"] = (text, each.times * each.nbytes)
    facts["slots"] = (f"{plan.slots:,}", plan.slots)
    facts["requests of 2,048 tokens"] = (f"{plan.requests:,}", plan.requests)
    for bucket in plan.buckets:
        name = f"bucket {bucket.tokens}"
        facts[f"{name}: ms"] = (number(bucket.milliseconds, ".2f"), bucket.milliseconds)
        facts[f"{name}: tokens/s"] = (number(bucket.tokens_per_second, ",.0f"), bucket.tokens_per_second)
        for kind, (count, payload) in payloads(plan, bucket.tokens).items():
            facts[f"{name}: {kind}"] = (f"{count}, {size(payload)} in all", payload)
        for part, seconds in (parts._asdict() if (parts := plan.parts(bucket)) else {}).items():
            facts[f"{name}: ms of {part}"] = (f"{1e3 * seconds:.2f}", 1e3 * seconds)
        sampling = 1e3 * plan.sampling(bucket)
        facts[f"{name}: ms of sampling"] = (f"{sampling:.2f}", sampling)
        facts[f"{name}: bound by"] = (bucket.bottleneck or UNKNOWN, None)
    return facts
