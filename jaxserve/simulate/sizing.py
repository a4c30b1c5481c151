"""`jaxserve size`: the cheapest layouts that serve recorded traffic within an objective."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.predict import Plan
from jaxserve.plan.search import search
from jaxserve.simulate.ladder import best_ladder
from jaxserve.simulate.outcome import Distribution
from jaxserve.simulate.policy_comparison import system_of
from jaxserve.simulate.system import Objective, SimulatedEngine, SimulationResult, tpot
from jaxserve.simulate.virtual_clock import Arrival, arrivals
from jaxserve.simulate.workload import Workload

_ROWS = 256  # most rows that are tried
_GRID = (1, 2, 4, 8, *range(16, 1025, 16))  # bucket sizes that a ladder is chosen from


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLayout:
    """A layout and the number of replicas that it needs.

    Attributes:
      rules: the changes to the sharding, as text.
      enough: whether the wanted share was served in time; if not, `replicas` is the most that the devices allow.
      share: share of the requests that were served in time.
    """

    plan: Plan
    rules: str
    replicas: int
    config: EngineConfig
    enough: bool
    share: float
    served: SimulationResult

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.config.tensor * self.config.stages * self.replicas

    @property
    def device_hours(self) -> float:
        """Device hours for a million generated tokens."""
        return self.devices * self.served.duration / 3600 / self.served.generated * 1e6

    @property
    def device_hours_total(self) -> float:
        """Device hours for a million tokens of prompts and answers."""
        total = self.served.generated + sum(each.prompt_tokens for each in self.served.outcomes)
        return self.device_hours * self.served.generated / total


def size(
    deployment: Deployment,
    workload: Workload,
    objective: Objective,
    *,
    share: float,
    buckets: int,
    progress: Callable[[str, int, int], None],
) -> list[SizedLayout]:
    """Every layout of the devices that holds the model; the cheapest in time comes first.

    First, each layout gets many rows and a fine ladder, and the search finds the fewest replicas with which `share` of
    the requests meet the objective. Then it gets as many rows as were used and the best ladder of at most `buckets` for
    its iterations, and the workload is simulated again. If that no longer suffices, a replica is added.
    """
    engine = dataclasses.replace(
        deployment.engine, max_rows=_ROWS, buckets=None, token_budget=None, target_tpot=objective.tpot, in_flight=None
    )
    candidates, left_out = search(dataclasses.replace(deployment, engine=engine), progress)
    if not candidates:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in left_out.items())
        raise ValueError(
            f"{deployment.name} does not fit on {deployment.topology} in any way{': ' if reasons else ''}{reasons}"
        )
    layouts = {
        (each.plan.deployment.engine.tensor, each.plan.deployment.engine.stages): each for each in reversed(candidates)
    }
    coming, found = arrivals(workload), []
    for done, each in enumerate(layouts.values()):
        progress("simulating", done, len(layouts))
        in_flight = each.plan.deployment.engine.stages if each.plan.deployment.engine.stages > 1 else None
        config = dataclasses.replace(each.plan.deployment.engine, buckets=_GRID, in_flight=in_flight)
        found.append(_sized(each.plan, each.rules, config, coming, objective, share, buckets))
    progress("simulating", len(layouts), len(layouts))
    return sorted(found, key=lambda each: (not each.enough, each.device_hours if each.enough else -each.share))


def _sized(
    plan: Plan,
    rules: str,
    config: EngineConfig,
    coming: Sequence[Arrival],
    objective: Objective,
    share: float,
    buckets: int,
) -> SizedLayout:
    most = plan.deployment.topology.num_devices // (config.tensor * config.stages)
    rough = _system(plan, config)

    def serve(system: SimulatedEngine, replicas: int) -> tuple[float, SimulationResult]:
        served = dataclasses.replace(system, replicas=replicas).serve(coming)
        return objective.share(served.outcomes), served

    low, high, kept = 1, most, serve(rough, most)
    if kept[0] >= share:
        while low < high:  # find the fewest that are enough
            middle = (low + high) // 2
            tried = serve(rough, middle)
            if tried[0] >= share:
                high, kept = middle, tried
            else:
                low = middle + 1
    replicas, seconds = high, {bucket.size: bucket.milliseconds for bucket in rough.costs}
    while True:
        rows = -(-kept[1].rows // 8) * 8
        sizes = Counter[int]()
        for tokens, count in kept[1].sizes.items():
            sizes[_GRID[bisect_left(_GRID, tokens)]] += count
        ladder = best_ladder(sizes, seconds.__getitem__, buckets)
        tuned = dataclasses.replace(config, max_rows=rows, buckets=ladder)
        reached, served = serve(_system(plan, tuned), replicas)
        if reached >= share or replicas == most:
            break
        replicas += 1
        kept = serve(rough, replicas)
    return SizedLayout(
        plan=plan,
        rules=rules,
        replicas=replicas,
        config=tuned,
        enough=reached >= share,
        share=reached,
        served=served,
    )


def _system(plan: Plan, config: EngineConfig) -> SimulatedEngine:
    return system_of(
        dataclasses.replace(plan, deployment=dataclasses.replace(plan.deployment, engine=config)), replicas=1
    )


def as_json(sized: SizedLayout, price: float | None) -> dict[str, Any]:
    """A layout as JSON values."""
    first = Distribution.of(1e3 * each.first_token for each in sized.served.outcomes if each.token_times)
    between = Distribution.of(1e3 * tpot(each) for each in sized.served.outcomes if len(each.token_times) > 1)
    return {
        "tensor": sized.config.tensor,
        "stages": sized.config.stages,
        "rules": sized.rules,
        "replicas": sized.replicas,
        "devices": sized.devices,
        "enough": sized.enough,
        "in_time": sized.share,
        "slots": sized.plan.slots,
        "rows": sized.config.max_rows,
        "buckets": sized.config.buckets,
        "ttft_p95_ms": first and first.p95,
        "tpot_p95_ms": between and between.p95,
        "use": sized.served.use,
        "padding": 1 - sized.served.carried / sized.served.padded,
        "device_hours_per_million": sized.device_hours,
        "device_hours_per_million_total": sized.device_hours_total,
        "cost_per_million": None if price is None else price * sized.device_hours,
        "cost_per_million_total": None if price is None else price * sized.device_hours_total,
    }


def show(found: Sequence[SizedLayout], price: float | None, out: Console) -> None:
    """Print one row per layout, the best first, and the command that starts it."""
    cost = "device hours" if price is None else "cost"
    columns = ("tensor x stages x replicas", "devices", "in time", "ttft p95 ms", "tpot p95 ms", "slots", "rows")
    columns += ("in use", "padding", f"{cost} / M generated", f"{cost} / M tokens", "buckets")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "buckets" else "right")
    scale = 1.0 if price is None else price
    for each in found:
        told = as_json(each, price)
        layout = f"{each.config.tensor} x {each.config.stages} x {each.replicas}"
        table.add_row(
            layout + (f" ({each.rules})" if each.rules else ""),
            str(each.devices),
            f"{each.share:.1%}" + ("" if each.enough else " (too few)"),
            *("-" if told[name] is None else f"{told[name]:,.0f}" for name in ("ttft_p95_ms", "tpot_p95_ms")),
            f"{each.plan.slots:,}",
            str(each.config.max_rows),
            f"{told['use']:.0%}",
            f"{told['padding']:.1%}",
            f"{scale * each.device_hours:,.2f}",
            f"{scale * each.device_hours_total:,.3f}",
            ",".join(map(str, each.config.buckets or ())),
        )
    out.print(table)
    best = found[0]
    if not best.enough:
        out.print("[bold]no layout serves the wanted share in time: take more or faster devices[/bold]")
        return
    config = best.config
    flags = f"--tensor {config.tensor} --stages {config.stages} --replicas {best.replicas} --max-rows {config.max_rows}"
    flags += (
        f" --buckets {','.join(map(str, config.buckets or ()))} --target-tpot {1e3 * (config.target_tpot or 0):g}ms"
    )
    flags += f" --in-flight {config.in_flight}" if config.in_flight else ""
    out.print(f"the cheapest in time: jaxserve serve --model ... {flags}")


def plot(found: Sequence[SizedLayout], objective: Objective, price: float | None, title: str, path: Path) -> None:
    """Plot the cost of a million generated tokens with each layout, and its share in time."""
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    scale = 1.0 if price is None else price
    labels = [f"{each.config.tensor} x {each.config.stages} x {each.replicas}" for each in found]
    colors = ["#1b5e20" if each.enough else "#c23b22" for each in found]
    bars = axis.barh(range(len(found)), [scale * each.device_hours for each in found], color=colors)
    told = [f"{each.share:.1%} in time, {each.served.use:.0%} busy" for each in found]
    axis.bar_label(bars, told, fontsize=8, padding=4)
    axis.set_yticks(range(len(found)), labels, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_xlabel(f"{'device hours' if price is None else 'cost'} of a million generated tokens")
    axis.set_ylabel("tensor x stages x replicas")
    axis.set_title(f"{title}\n{objective}; red: not enough", fontsize=10)
    axis.grid(alpha=0.3, axis="x")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
