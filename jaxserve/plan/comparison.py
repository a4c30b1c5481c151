"""Compares two plans and shows the values that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.plan.plan_report import padding, parameters_of, partition
from jaxserve.plan.predict import Plan
from jaxserve.plan.tables import UNKNOWN, Section, number, shape, size
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
    """The values in which two plans differ, in the order of the report."""
    one, other, found = _facts(ours), _facts(theirs), []
    for what in dict.fromkeys([*one, *other]):
        (text, before), (new, after) = one.get(what, _missing(ours, what)), other.get(what, _missing(theirs, what))
        if text != new:
            change = f"{100 * (after / before - 1):+.1f}%" if before and after is not None else ""
            found.append(PlanDifference(what, text, new, change))
    return found


def section(found: Sequence[PlanDifference], names: tuple[str, str]) -> Section:
    """The differences of two plans under the names of their specs."""
    rows = [tuple(cell or "-" for cell in each[:3]) + each[3:] for each in found]
    notes = [] if rows else [f"{names[0]} and {names[1]} give the same plan"]
    return Section(f"{names[1]} against {names[0]}, differences only", ("", *names, "change"), rows, notes)


_Fact = tuple[str | None, float | None]  # a value as text and, if it is numeric, as a number


def _missing(plan: Plan, what: str) -> _Fact:
    """The fact of a plan under a name that only the other plan has."""
    return (UNKNOWN if " after " in what and not plan.is_known else None, None)


def _facts(plan: Plan) -> dict[str, _Fact]:
    """Every value of a plan by name."""
    named = {axis for part in parameters_of(plan).values() for axis in part.axes}
    facts: dict[str, _Fact] = {
        f"[{title}] {axis}": (shown(target), None)
        for title, rules in plan.deployment.spec.sections().items()
        for axis, target in rules.items()
        if title != "axes" or axis in named  # a rule that no parameter follows changes nothing
    }
    facts |= {name: (text, None) for name, text in padding(plan).items()}
    for name, part in parameters_of(plan).items():
        facts[name] = (f"{partition(part)} {shape(part.local)}, {size(part.nbytes)}", part.nbytes)
    for index, stage in enumerate(plan.stages):
        for name in ("weights", "pool", "activations", "state"):
            facts[f"stage {index}: {name}"] = (size(getattr(stage, name)), getattr(stage, name))
        for each in stage.load.collectives or ():
            text = f"{each.times} x {size(each.nbytes)} a {'row' if each.per_row else 'token'} over {each.group}"
            facts[f"stage {index}: {each.kind} after {each.what}"] = (text, each.times * each.nbytes)
    facts["slots"] = (f"{plan.slots:,}", plan.slots)
    facts["requests of 2,048 tokens"] = (f"{plan.requests:,}", plan.requests)
    for bucket in plan.buckets:
        name = f"bucket {bucket.tokens}"
        facts[f"{name}: ms"] = (number(bucket.milliseconds, ".2f"), bucket.milliseconds)
        facts[f"{name}: tokens/s"] = (number(bucket.tokens_per_second, ",.0f"), bucket.tokens_per_second)
        facts[f"{name}: bound by"] = (bucket.bottleneck or UNKNOWN, None)
    return facts
