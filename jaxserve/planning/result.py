"""The result of `jaxserve.plan`: the plan, its comparison, its programs; tables or a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.planning import comparison, plan_page, plan_report
from jaxserve.planning.comparison import PlanDifference
from jaxserve.planning.compiled import CompiledStage
from jaxserve.planning.plan import Plan
from jaxserve.planning.tables import Section

_HEIGHT = 900  # pixels of the page in a notebook, until it has told its own height


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult:
    """A plan and what is compared with it. A notebook shows it as a page.

    Attributes:
      plan: the prediction. Collectives that cannot be predicted are those of the compiled programs, if there are any.
      name: the name of its spec: a file, or `default`.
      predicted: the prediction that the compiled programs are compared with; for CPUs if they are for CPUs.
      compiled: the compiled programs of each stage; empty without `compile`.
      against: another result, to compare with.
    """

    plan: Plan
    name: str
    predicted: Plan
    compiled: Sequence[CompiledStage] = ()
    against: PlanResult | None = None

    def compared_with(self, other: PlanResult) -> PlanResult:
        """This result, compared with another."""
        return replace(self, against=replace(other, against=None))

    @property
    def differences(self) -> list[PlanDifference]:
        """The values in which the other plan differs from this one; none without another."""
        return [] if self.against is None else comparison.differences(self.plan, self.against.plan)

    @property
    def names(self) -> tuple[str, str]:
        """Names of two compared plans: their specs', or their layouts if these are the same."""
        assert self.against is not None
        if self.name != self.against.name:
            return self.name, self.against.name
        return plan_report.layout(self.plan), plan_report.layout(self.against.plan)

    def show(self, out: Console | None = None) -> None:
        """Print all tables; of a comparison, the differences only."""
        out = Console(highlight=False) if out is None else out
        plan_report.show(self.plan, out, brief=self.against is not None)
        bars = [comparison.memory((self.plan, self.against.plan), self.names)] if self.against is not None else []
        for section in (*self._compared(), *bars, *self._programs()):
            section.show(out)

    def _compared(self) -> list[Section]:
        return [] if self.against is None else [comparison.section(self.differences, self.names)]

    def _programs(self) -> list[Section]:
        where = "for CPUs" if self.predicted.deployment.on_cpus else ""
        return [plan_report.compiled(self.predicted, self.compiled, where)] if self.compiled else []

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values: bytes, milliseconds and tokens per second."""
        told = plan_report.plan_json(self.plan, self.compiled)
        if self.against is None:
            return told
        return told | {
            "against": [
                {name: getattr(each, name) for name in ("what", "ours", "theirs")} for each in self.differences
            ],
            "against_plan": plan_report.plan_json(self.against.plan) | {"labels": self.names},
        }

    def page(self) -> str:
        """A self-contained page in HTML."""
        told = [tell(self.plan) for tell in (plan_report.by_part, plan_report.collectives, plan_report.by_kind)]
        return plan_page.page(self.plan, self.as_json(), [*told, *self._compared(), *self._programs()])

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.page(), encoding="utf-8")

    def __repr__(self) -> str:
        return f"{plan_report.headline(self.plan)}\n{plan_report.bottleneck(self.plan)}"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, where its styles and scripts touch nothing else."""
        fit = "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'"
        return (
            f'<iframe srcdoc="{html.escape(self.page())}" onload="{fit}" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
        )
