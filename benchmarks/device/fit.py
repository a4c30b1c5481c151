"""Fits the cost model's constants to the steps that a device took.

They are the efficiency and the overhead of a layer, by least squares of the relative errors. Models whose steps wait
for the host are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.device.models import MODELS
from benchmarks.device.records import Record
from jaxserve.planning.calibration import FITS, Fit, fit_of
from jaxserve.planning.plan import Plan
from jaxserve.planning.planner import deployment
from jaxserve.planning.predict import predict
from server.commands.bench.step import Case
from sharding import devices

WAITING = {"bloom-560m-250k": "bloom-560m"}  # models that wait for the host, by their names in plans
BEFORE = FITS["a100-40g"]  # what served for every GPU before there were measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One timed step, in seconds."""

    model: str
    case: Case
    plan: Plan
    seconds: float

    @property
    def waits(self) -> bool:
        """Whether it waits for the host, so that nothing is fitted to it."""
        return self.model in WAITING

    def ratio(self, fit: Fit) -> float:
        """Predicted over measured seconds."""
        chunks = [(self.case.context, 1)] * self.case.decodes + [(0, self.case.prompt)] * (self.case.prompt > 0)
        return sum(stage.total for stage in self.plan.roofline(fit)(chunks)) / self.seconds


def steps(records: Sequence[Record]) -> list[Step]:
    """The steps in the records. Raises ValueError if the device is not one that plans know."""
    good = {record["name"]: record for record in records if "failed" not in record}
    kind = good["device"]["device"]
    topology = devices.of_kind(kind, 1)
    if topology is None:
        raise ValueError(f"{kind} is not in the table of devices (sharding/devices.py)")
    found = []
    for model in MODELS:
        buckets = tuple(sorted({case.tokens for case in model.cases}))
        name = WAITING.get(model.shape, model.shape)
        plan = predict(deployment(name, str(topology), max_rows=max(model.rows), buckets=buckets))
        found += [
            Step(model=model.shape, case=case, plan=plan, seconds=record["ms"] / 1e3)
            for case in model.cases
            if (record := good.get(f"{model.shape} {case.name}")) is not None
        ]
    return found


def fitted(steps: Sequence[Step], *, overlapped: bool = False) -> Fit:
    """The constants that fit the steps best, where arithmetic and memory traffic are added, or overlap."""
    rows = []
    for step in steps:
        roof, both = (step.ratio(Fit(efficiency=1.0, layer_seconds=each, overlapped=overlapped)) for each in (0.0, 1.0))
        rows.append((roof, both - roof))
    inverse, layer_seconds = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    if layer_seconds < 0:
        roofs = np.array(rows)[:, 0]
        inverse, layer_seconds = roofs.sum() / (roofs**2).sum(), 0.0
    return Fit(efficiency=float(1 / inverse), layer_seconds=float(layer_seconds), overlapped=overlapped)


def worst_error(steps: Sequence[Step], fit: Fit) -> float:
    """The largest relative error of the steps."""
    return max(abs(step.ratio(fit) - 1) for step in steps)


def table(records: Sequence[Record]) -> list[str]:
    """The fits, and predicted over measured times of each step, as lines of Markdown."""
    found = steps(records)
    kept, used = [step for step in found if not step.waits], fit_of(found[0].plan.deployment.topology.device)
    lines = []
    for overlapped in (False, True):
        fit = fitted(kept, overlapped=overlapped)
        how = "overlapped" if overlapped else "added"
        lines.append(
            f"{how}: {fit.efficiency:.1%} of the peaks, {1e6 * fit.layer_seconds:.1f} us a layer, worst error "
            f"{worst_error(kept, fit):.1%}"
        )
    lines += ["", "| step | ms | before | now | |", "|---|---|---|---|---|"]
    for step in found:
        ratios = f"{step.ratio(BEFORE):.2f}x | {step.ratio(used):.2f}x"
        waits = "waits for the host" if step.waits else ""
        lines.append(f"| {step.model} {step.case.name} | {1e3 * step.seconds:.2f} | {ratios} | {waits} |")
    return lines
