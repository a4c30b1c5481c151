"""Compares two plans and shows the values that differ."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.plan.plan_report import partition, shape, size
from jaxserve.plan.predict import Plan


class PlanValue(NamedTuple):
    """A value in a plan, as text and, if it is numeric, as a number."""

    text: str
    number: float | None = None


class PlanDifference(NamedTuple):
    """A value that differs between two plans; None on a side that lacks it."""

    what: str
    ours: PlanValue | None
    theirs: PlanValue | None

    @property
    def change(self) -> str:
        """The change from ours to theirs in percent; empty unless both are numbers."""
        if self.ours is None or self.theirs is None or not self.ours.number or self.theirs.number is None:
            return ""
        return f"{100 * (self.theirs.number / self.ours.number - 1):+.1f}%"


def differences(ours: Plan, theirs: Plan) -> list[PlanDifference]:
    """The values in which two plans differ, in the order of the report."""
    one, other = _facts(ours), _facts(theirs)
    return [
        PlanDifference(what, one.get(what), other.get(what))
        for what in dict.fromkeys([*one, *other])
        if (one.get(what) or PlanValue("-")).text != (other.get(what) or PlanValue("-")).text
    ]


def show(ours: Plan, theirs: Plan, names: tuple[str, str], out: Console) -> None:
    """Print the differences of two plans under the names of their specs."""
    found = differences(ours, theirs)
    if not found:
        out.print(f"\n{names[0]} and {names[1]} give the same plan")
        return
    table = Table("", *names, "change", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found:
        table.add_row(
            escape(each.what), *(side.text if side else "-" for side in (each.ours, each.theirs)), each.change
        )
    out.print(f"\n[bold]{names[1]} against {names[0]}, differences only[/bold]")
    out.print(table)


def _facts(plan: Plan) -> dict[str, PlanValue]:
    spec = plan.deployment.spec
    sections = {"[axes]": spec.rules, "[activations]": spec.activations, "[pool]": spec.pool}
    sections |= {f'[parameters."{glob}"]': rules for glob, rules in spec.parameters.items()}
    facts = {
        f"{title} {axis}": PlanValue(target or "none")
        for title, rules in sections.items()
        for axis, target in rules.items()
    }
    for axis, (count, held) in plan.padding.items():
        facts[f"{axis} padded"] = PlanValue(f"{count:,} to {held:,}")
    for part in {part.name: part for stage in plan.stages for part in stage.parts}.values():
        facts[part.name] = PlanValue(f"{partition(part)} {shape(part.local)}, {size(part.nbytes)}", part.nbytes)
    for index, stage in enumerate(plan.stages):
        for name in ("weights", "pool", "activations", "state"):
            facts[f"stage {index}: {name}"] = PlanValue(size(getattr(stage, name)), getattr(stage, name))
        for each in stage.collectives or ():
            unit = "row" if each.per_row else "token"
            facts[f"stage {index}: {each.kind} after {each.what}"] = PlanValue(
                f"{each.times} x {size(each.nbytes)} a {unit}", each.times * each.nbytes
            )
    facts["slots"] = PlanValue(f"{plan.slots:,}", plan.slots)
    facts["requests of 2,048 tokens"] = PlanValue(f"{plan.requests:,}", plan.requests)
    for bucket in plan.buckets:
        facts[f"bucket {bucket.tokens}: ms"] = PlanValue(f"{bucket.milliseconds:.2f}", bucket.milliseconds)
        speed = bucket.tokens_per_second
        facts[f"bucket {bucket.tokens}: tokens/s"] = PlanValue(f"{speed:,.0f}", speed)
        facts[f"bucket {bucket.tokens}: bound by"] = PlanValue(bucket.bottleneck)
    return facts
