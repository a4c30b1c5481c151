"""`jaxserve simulate --autoscale`: replicas that follow the load, against fixed fleets."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, pi
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxserve.planning import drawing
from jaxserve.planning.tables import table
from jaxserve.scheduler.buckets import seconds_of_work
from jaxserve.simulate.autoscaling import Pod, Sample, ScaledFleet, ScalingRule
from jaxserve.simulate.outcome import Distribution
from jaxserve.simulate.system import Objective, SimulatedEngine, SimulationResult
from jaxserve.simulate.virtual_clock import Arrival, SimulatedReplica, arrivals
from jaxserve.simulate.workload import Job, Workload

PEAK = 3.0  # requests a second at the day's peak, in those of its quietest time
_STEPS = 24  # lines of the summary: hours, if the traffic is a day


class DayJobs(Sequence[Job]):
    """A workload's jobs at the rate of a day: a cosine from its quietest time to the peak.

    Order, lengths and what is together stay as they are.
    """

    def __init__(self, jobs: Sequence[Job], day: float) -> None:
        """Take the jobs of a steady workload, and how long both are in seconds."""
        self._jobs, self._day = jobs, day
        swing = (PEAK - 1) / (PEAK + 1)
        self._times = np.linspace(0.0, 1.0, 10_001)
        self._arrived = self._times - swing * np.sin(2 * pi * self._times) / (2 * pi)  # of all jobs, by these times

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        job = self._jobs[index]
        moved = float(np.interp(job.arrival / self._day, self._arrived, self._times)) * self._day
        return dataclasses.replace(job, arrival=moved)


def of_a_day(workload: Workload, day: float) -> Workload:
    """A workload of so many seconds, whose rate follows a day."""
    note = f"its requests are moved to follow a day of {day:,.0f} s, with {PEAK:g} times the quietest rate at the peak"
    return dataclasses.replace(workload, jobs=DayJobs(workload.jobs, day), notes=(*workload.notes, note))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Traffic served by one fleet.

    Attributes:
      pods: the life of each replica.
      samples: the fleet at each decision; none if its size is fixed.
      largest: most replicas at a time, those that start included.
    """

    name: str
    served: SimulationResult
    pods: Sequence[Pod]
    samples: Sequence[Sample] = ()
    largest: int

    @property
    def replica_hours(self) -> float:
        """Hours of all replicas, from the start of each to its end."""
        return sum(pod.end - pod.start for pod in self.pods) / 3600

    @property
    def longest_drain(self) -> float:
        """Most seconds that a replica took to end its requests."""
        return max((pod.end - pod.stopped for pod in self.pods if pod.stopped < pod.end), default=0.0)


def compare(
    system: SimulatedEngine,
    workload: Workload,
    rule: ScalingRule,
    *,
    start_seconds: float,
    max_tokens: int | None,
    progress: Callable[[str, int, int], None],
) -> list[FleetResult]:
    """Serves the workload with replicas by a rule, and with fleets of the mean and largest size.

    A mean between two sizes is both of them.

    Args:
      start_seconds: from the start of a replica until it takes requests.
      max_tokens: limit that clients request, if it is more than they use.
    """
    incoming = arrivals(workload, max_tokens=max_tokens, max_context=system.groups.max_context)
    progress("simulating", 0, 4)
    found = [_scaled(system, incoming, rule, start_seconds)]
    mean = found[0].replica_hours * 3600 / found[0].served.duration
    sizes = sorted({floor(mean), ceil(mean), found[0].largest})
    for size in sizes:
        progress("simulating", len(found), 1 + len(sizes))
        found.append(_fixed(system, incoming, size))
    progress("simulating", len(found), len(found))
    return found


def _scaled(
    system: SimulatedEngine, incoming: Sequence[Arrival], rule: ScalingRule, start_seconds: float
) -> FleetResult:
    # What the server's estimate of the answers comes to: the share of max_tokens that requests generate.
    share = float(np.mean([each.output / each.max_tokens for each in incoming]))

    def owed_seconds(replica: SimulatedReplica, now: float) -> float:
        prompts = replica.prefill_tokens
        answers = (replica.outstanding_tokens(now) - prompts) * share
        return seconds_of_work(system.costs, system.config.max_rows, prompt_tokens=prompts, answer_tokens=answers)

    made: list[ScaledFleet] = []

    def scaling(replicas: Sequence[SimulatedReplica]) -> ScaledFleet:
        made.append(ScaledFleet(rule, replicas, start_seconds=start_seconds, owed_seconds=owed_seconds))
        return made[0]

    served = dataclasses.replace(system, replicas=2 * rule.most).serve(incoming, scaling=scaling)
    fleet = made[0]
    fleet.finish(max(each.end for each in served.outcomes if each.tokens))
    largest = max(each.replicas for each in fleet.samples)
    return FleetResult(name="autoscaled", served=served, pods=fleet.pods, samples=fleet.samples, largest=largest)


def _fixed(system: SimulatedEngine, incoming: Sequence[Arrival], size: int) -> FleetResult:
    served = dataclasses.replace(system, replicas=size).serve(incoming)
    end = max(each.end for each in served.outcomes if each.tokens)
    pods = [Pod(place=place, start=0.0, ready=0.0, end=end) for place in range(size)]
    return FleetResult(name=f"{size} fixed", served=served, pods=pods, largest=size)


def figures(result: FleetResult, objective: Objective) -> dict[str, Any]:
    """The results of a fleet as JSON values."""
    outcomes = list(result.served.outcomes)
    first = Distribution.of(1e3 * each.first_token for each in outcomes if each.tokens)
    between = Distribution.of(1e3 * each.tpot for each in outcomes if each.tokens > 1)
    return {
        "fleet": result.name,
        "largest": result.largest,
        "mean": result.replica_hours * 3600 / result.served.duration,
        "started": len(result.pods),
        "replica_hours": result.replica_hours,
        "in_time": objective.share(outcomes),
        "ttft_ms": first and {"p50": first.p50, "p95": first.p95, "p99": first.p99},
        "tpot_ms": between and {"p50": between.p50, "p95": between.p95, "p99": between.p99},
        "longest_drain_s": result.longest_drain,
        "over_time": _over_time(result, objective),
    }


def _over_time(result: FleetResult, objective: Objective) -> list[dict[str, float]]:
    """The load, the replicas and the share in time, in equal parts of the time."""
    outcomes = list(result.served.outcomes)
    length = (outcomes[-1].arrival + 1e-9) / _STEPS
    starts, found, times = [each.arrival for each in outcomes], [], [each.time for each in result.samples]
    for step in range(_STEPS):
        begin, end = step * length, (step + 1) * length
        part = outcomes[bisect_left(starts, begin) : bisect_left(starts, end)]
        first = bisect_left(times, begin)
        before = result.samples[max(first - 1, 0) :][:1]  # holds where no decision is made in this part
        samples = result.samples[first : bisect_left(times, end)] or before
        values = {
            "begin_s": begin,
            "requests_per_second": len(part) / length,
            "in_time": objective.share(part) if part else 1.0,
            "replicas": result.largest if not result.samples else _mean([each.replicas for each in samples]),
        }
        if result.samples:
            values |= {
                "ready": _mean([each.ready for each in samples]),
                "owed_seconds": _mean([each.owed for each in samples]),
            }
        found.append(values)
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def show(values: Sequence[dict[str, Any]], objective: Objective, out: Console) -> None:
    """Print a line per fleet, and the replicas of the first one over time."""
    columns = ("fleet", "replicas mean / most", "hours", "in time", "ttft ms p50 / p95", "tpot ms p50 / p95")
    rows = [
        [
            each["fleet"],
            f"{each['mean']:.1f} / {each['largest']}",
            f"{each['replica_hours']:.1f}",
            f"{each['in_time']:.1%}",
            f"{each['ttft_ms']['p50']:,.0f} / {each['ttft_ms']['p95']:,.0f}",
            f"{each['tpot_ms']['p50']:,.0f} / {each['tpot_ms']['p95']:,.0f}",
        ]
        for each in values
    ]
    out.print(table(columns, rows))
    first = values[0]
    columns = ("from, min", "requests/s", "replicas", "ready", "owed s each")
    names = [f"in time, {each['fleet']}" for each in values]
    places = 0 if first["over_time"][1]["begin_s"] >= 60 else 1
    rows = [
        [
            f"{step['begin_s'] / 60:,.{places}f}",
            f"{step['requests_per_second']:.1f}",
            f"{step['replicas']:.1f}",
            f"{step['ready']:.1f}",
            f"{step['owed_seconds'] / max(step['ready'], 1e-9):.1f}",
            *(f"{each['over_time'][index]['in_time']:.1%}" for each in values),
        ]
        for index, step in enumerate(first["over_time"])
    ]
    out.print(table((*columns, *names), rows))
    out.print(
        f"hours: of all replicas, starts and drains included; in time: {objective}; {first['started']} replicas were "
        f"started, and one took {first['longest_drain_s']:.0f} s at most to end its requests"
    )


def plot(results: Sequence[FleetResult], objective: Objective, title: str, path: Path) -> None:
    """Plot load and replicas over time, and the share in time of each fleet."""
    figure = drawing.figure(9, 5.4)
    figure.suptitle(title.replace("; ", "\n"), fontsize=9)
    counts, shares = figure.subplots(2, 1, sharex=True)
    scaled, parts = results[0], [_over_time(each, objective) for each in results]
    hours = [each.time / 3600 for each in scaled.samples]
    counts.step(hours, [each.replicas for each in scaled.samples], where="post", color="#2e6f95", label="replicas")
    counts.step(
        hours, [each.ready for each in scaled.samples], where="post", color="#2e6f95", linestyle=":", label="ready"
    )
    counts.set(ylabel="replicas", ylim=(0, None))
    load = counts.twinx()
    arrived = [each.arrival / 3600 for each in scaled.served.outcomes]
    number, edges = np.histogram(arrived, bins=10 * _STEPS)
    rate = number / (edges[1] - edges[0]) / 3600
    load.fill_between(edges[:-1], rate, step="post", color="#9aa5b1", alpha=0.35, linewidth=0)
    load.set(ylabel="requests/s (grey)", ylim=(0, None))
    counts.legend(fontsize=8, loc="upper left")
    for result, part, colour in zip(results, parts, ("#2e6f95", "#d1733b", "#9aa5b1", "black"), strict=False):
        middle = [(each["begin_s"] + part[1]["begin_s"] / 2) / 3600 for each in part]
        label = f"{result.name}: {result.replica_hours:.1f} replica hours"
        shares.plot(middle, [100 * each["in_time"] for each in part], color=colour, marker=".", label=label)
    shares.set(xlabel="hours", ylabel="in time, %", ylim=(0, 104))
    shares.legend(fontsize=8, loc="lower left")
    for axis in (counts, shares):
        axis.grid(alpha=0.3)
    drawing.save(figure, path)
