"""`jaxserve size`: the cheapest layouts that serve recorded traffic within an objective."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.planning import drawing
from jaxserve.planning.deployment import Deployment
from jaxserve.planning.search import Candidate, search
from jaxserve.planning.search_space import tensor_layouts
from jaxserve.planning.tables import table
from jaxserve.scheduler.buckets import LARGEST_DEFAULT
from jaxserve.simulate.ladder import best_ladder
from jaxserve.simulate.outcome import Distribution
from jaxserve.simulate.policy_comparison import system_of
from jaxserve.simulate.system import Objective, SimulationResult
from jaxserve.simulate.virtual_clock import Arrival, arrivals
from jaxserve.simulate.workload import Workload

_ROWS = 256  # largest number of rows to try
_GRID = (1, 2, 4, 8, *range(16, 1024, 16), *range(1024, LARGEST_DEFAULT + 1, 128))  # candidate bucket sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLayout:
    """A layout and the number of replicas that it needs.

    Attributes:
      config: the settings that serve the traffic.
      enough: whether the wanted share was served in time; if not, all devices are in use.
      share: share of the requests that were served in time.
    """

    layout: Candidate
    config: EngineConfig
    enough: bool
    share: float
    served: SimulationResult

    @property
    def label(self) -> str:
        """The layout as text: tensor x stages x replicas."""
        return f"{self.config.tensor} x {self.config.stages} x {self.config.replicas}"

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.config.stage_devices * self.config.stages * self.config.replicas

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
    """Sizes every layout that fits the devices; those in time come first, the cheapest first.

    First, each layout has many rows and a fine ladder, and a search finds the smallest number of replicas with which
    `share` of the requests meet the objective. Then the rows are reduced to those in use, the best ladder of at most
    `buckets` is chosen, and the workload is simulated again. If that is too slow, a replica is added.
    """
    asked = replace(
        deployment,
        engine=replace(
            deployment.engine,
            max_rows=_ROWS,
            buckets=None,
            token_budget=None,
            target_tpot=objective.tpot,
            target_ttft=objective.ttft,
            in_flight=None,
        ),
    )
    candidates = search(asked, tensor_layouts(asked), progress).candidates
    layouts = {(each.engine.tensor, each.engine.stages): each for each in reversed(candidates)}
    incoming, found = arrivals(workload), []
    for done, each in enumerate(layouts.values()):
        progress("simulating", done, len(layouts))
        found.append(_sized(each, incoming, objective, share, buckets))
    progress("simulating", len(layouts), len(layouts))
    return sorted(found, key=lambda each: (not each.enough, each.device_hours if each.enough else -each.share))


def _sized(
    layout: Candidate, incoming: Sequence[Arrival], objective: Objective, share: float, buckets: int
) -> SizedLayout:
    config, most = (
        layout.engine,
        layout.plan.deployment.topology.num_devices // (layout.engine.stage_devices * layout.engine.stages),
    )
    rough = replace(config, buckets=_GRID, in_flight=config.stages if config.stages > 1 else None)

    def serve(config: EngineConfig, replicas: int) -> tuple[float, SimulationResult]:
        served = system_of(layout.plan, replace(config, replicas=replicas)).serve(incoming)
        return objective.share(served.outcomes), served

    low, replicas, kept = 1, most, serve(rough, most)
    if kept[0] >= share:
        while low < replicas:  # find the fewest that are enough
            middle = (low + replicas) // 2
            tried = serve(rough, middle)
            if tried[0] >= share:
                replicas, kept = middle, tried
            else:
                low = middle + 1
    seconds = {bucket.size: bucket.milliseconds for bucket in system_of(layout.plan, rough).costs}
    while True:
        rows = -(-kept[1].rows // 8) * 8
        sizes = Counter[int]()
        for tokens, count in kept[1].sizes.items():
            sizes[_GRID[bisect_left(_GRID, tokens)]] += count
        tuned = replace(rough, max_rows=rows, buckets=best_ladder(sizes, seconds.__getitem__, buckets))
        reached, served = serve(tuned, replicas)
        if reached >= share or replicas == most:
            break
        replicas += 1
        kept = serve(rough, replicas)
    config = replace(tuned, replicas=replicas)
    return SizedLayout(layout=layout, config=config, enough=reached >= share, share=reached, served=served)


def sized_json(sized: SizedLayout, price: float | None) -> dict[str, Any]:
    """A layout as JSON values."""
    first = Distribution.of(1e3 * each.first_token for each in sized.served.outcomes if each.tokens)
    between = Distribution.of(1e3 * each.tpot for each in sized.served.outcomes if each.tokens > 1)
    return {
        "tensor": sized.config.tensor,
        "stages": sized.config.stages,
        "rules": sized.layout.rules,
        "replicas": sized.config.replicas,
        "devices": sized.devices,
        "enough": sized.enough,
        "in_time": sized.share,
        "slots": sized.layout.plan.slots,
        "rows": sized.config.max_rows,
        "buckets": sized.config.buckets,
        "ttft_p95_ms": first and first.p95,
        "tpot_p95_ms": between and between.p95,
        "use": sized.served.use,
        "padding": sized.served.padding,
        "device_hours_per_million": sized.device_hours,
        "device_hours_per_million_total": sized.device_hours_total,
        "cost_per_million": None if price is None else price * sized.device_hours,
        "cost_per_million_total": None if price is None else price * sized.device_hours_total,
    }


def show(found: Sequence[SizedLayout], price: float | None, out: Console) -> None:
    """Print one row per layout, the best first, and the command that starts it."""
    cost, scale = ("device hours", 1.0) if price is None else ("cost", price)
    columns = ("tensor x stages x replicas", "devices", "in time", "ttft p95 ms", "tpot p95 ms", "slots", "rows")
    columns += ("in use", "padding", f"{cost} / M generated", f"{cost} / M tokens", "buckets")
    rows = []
    for each in found:
        values, buckets = sized_json(each, price), ",".join(map(str, each.config.buckets or ()))
        rows.append(
            (
                each.label + (f" ({each.layout.rules})" if each.layout.rules else ""),
                str(each.devices),
                f"{each.share:.1%}" + ("" if each.enough else " (too few)"),
                *("-" if values[name] is None else f"{values[name]:,.0f}" for name in ("ttft_p95_ms", "tpot_p95_ms")),
                *(f"{values[name]:,}" for name in ("slots", "rows")),
                f"{values['use']:.0%}",
                f"{values['padding']:.1%}",
                f"{scale * each.device_hours:,.2f}",
                f"{scale * each.device_hours_total:,.3f}",
                buckets,
            )
        )
    out.print(table(columns, rows))
    best = found[0].config
    if not found[0].enough:
        out.print("[bold]no layout serves the wanted share in time; use more or faster devices[/bold]")
        return
    flags = f"--tensor {best.tensor} --stages {best.stages} --replicas {best.replicas} --max-rows {best.max_rows}"
    flags += f" --buckets {rows[0][-1]} --target-tpot {1e3 * (best.target_tpot or 0):g}ms"
    flags += f" --target-ttft {1e3 * (best.target_ttft or 0):g}ms"
    flags += f" --in-flight {best.in_flight}" if best.in_flight else ""
    out.print(f"the cheapest layout in time: jaxserve serve --model ... {flags}")


def plot(found: Sequence[SizedLayout], objective: Objective, price: float | None, title: str, path: Path) -> None:
    """Plot the cost of a million generated tokens with each layout, and its share in time."""
    figure = drawing.figure(9, 1.6 + 0.42 * len(found))
    axis = figure.subplots()
    costs = [(1.0 if price is None else price) * each.device_hours for each in found]
    bars = axis.barh(range(len(found)), costs, color=["#1b5e20" if each.enough else "#c23b22" for each in found])
    labels = [f"{each.share:.1%} in time, {each.served.use:.0%} busy" for each in found]
    axis.bar_label(bars, labels, fontsize=8, padding=4)
    axis.set_yticks(range(len(found)), [each.label for each in found], fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_xlabel(f"{'device hours' if price is None else 'cost'} of a million generated tokens")
    axis.set_ylabel("tensor x stages x replicas")
    axis.set_title(f"{title}\n{objective}; red: not enough", fontsize=10)
    axis.grid(alpha=0.3, axis="x")
    drawing.save(figure, path)
