"""Reports a search: the ranking, why layouts lose, the frontier; as tables, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.planning import drawing
from jaxserve.planning.calibration import calibration
from jaxserve.planning.search import WAITING, Candidate, SearchResult, frontier
from jaxserve.planning.tables import Section, as_json

_LAYOUT = "devices x stages x replicas"  # the devices of a stage
_LATENCY, _SPEED = "ms a token", "tokens/s"
_SHOWN = 20  # rows of the ranking
_DRAWN = 10  # layouts in a plot: as many as there are colours
_COPIED = 1.05  # a layout that holds more times the bytes of the leanest has copies
_NOTABLE = 0.1  # share of what a layout spends more that a part must have to be named


def show(result: SearchResult, out: Console) -> None:
    """Print the ranking, what is behind it, and the frontier."""
    for section in (_ranking(result), _losers(result), _unranked(result), _frontier(result.candidates)):
        section.show(out)


def _ranking(result: SearchResult) -> Section:
    best = result.candidates[0]
    columns = ("rank", _LAYOUT, "rules", "rows", _SPEED, _LATENCY, "requests", "device ms a token", "why not first")
    rows = []
    for rank, each in enumerate(result.candidates[:_SHOWN], start=1):
        count, latency, speed = each.points[-1]
        requests = f"{each.plan.requests * each.engine.replicas:,}"
        told = (str(count), f"{speed:,.0f}", f"{latency:.1f}", requests, f"{sum(each.spent().values()):.2f}")
        rows.append((str(rank), each.label, each.rules, *told, why(each, best)))
    split = ", ".join(f"{name} {spent:.2f}" for name, spent in best.spent().items() if spent >= 0.005)
    note = f"Device ms: what all devices spend on a token; of the first, {split}"
    notes = [note, _calibration(result)]
    return Section("All that fit, by predicted tokens/s with as many rows as the slots allow", columns, rows, notes)


def _calibration(result: SearchResult) -> str:
    """Where the constants of the cost model come from."""
    told = calibration(result.candidates[0].plan.deployment.topology.device)
    return told[0].upper() + told[1:]


def lag(candidate: Candidate, best: Candidate) -> dict[str, float]:
    """Device milliseconds a token more than the best layout, by part, the largest first."""
    ours, theirs = candidate.spent(), best.spent()
    more = {name: spent - theirs[name] for name, spent in ours.items()}
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def why(candidate: Candidate, best: Candidate) -> str:
    """Why a layout is slower than the best: what its devices spend more on each token."""
    parts, rows = lag(candidate, best), candidate.points[-1].rows
    gained = sum(spent for spent in parts.values() if spent > 0)
    told = [f"{name} +{spent:.2f}" for name, spent in parts.items() if spent > _NOTABLE * gained]
    few = [f"holds {rows} row{'s' if rows > 1 else ''} only"] if rows < best.points[-1].rows else []
    return ", ".join(few + told)


def _main_reason(candidate: Candidate, result: SearchResult) -> str:
    """The part of which a layout spends most more than the first, and what it comes from."""
    best = result.candidates[0]
    part = next(iter(lag(candidate, best)))
    told = "stages wait for the slowest" if part == WAITING else part
    if candidate.points[-1].rows < best.points[-1].rows:
        told += ": holds fewer rows"
    elif part == "matmul" and _held(candidate) > _COPIED * min(map(_held, result.candidates)):
        told += ": copies or padding of weights"
    return f"{told}, even without unknown collectives" if candidate.is_bound else told


def _held(candidate: Candidate) -> int:
    """Bytes of weights on all devices of a replica."""
    return candidate.engine.stage_devices * sum(stage.weights for stage in candidate.plan.stages)


def _losers(result: SearchResult) -> Section:
    """Layouts below the ranking, grouped by their largest cost, and the impossible ones."""
    groups: dict[str, list[Candidate]] = {}
    for each in result.candidates[_SHOWN:] + result.slower:
        groups.setdefault(_main_reason(each, result), []).append(each)
    rows = []
    for reason, several in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = max(several, key=lambda each: each.tokens_per_second)
        example = f"{first.label} {first.rules}".rstrip()
        most = f"{'at most ' if first.is_bound else ''}{first.tokens_per_second:,.0f}"
        rows.append((str(len(several)), reason, most, example))
    for reason, labels in sorted(result.left_out.items(), key=lambda item: -len(item[1])):
        rows.append((str(len(labels)), reason, "not possible", ", ".join(dict.fromkeys(labels))))
    rows = [(*row[:3], row[3] if len(row[3]) < 60 else f"{row[3][:56].rpartition(',')[0]}, ...") for row in rows]
    return Section("Others, and why", ("number", "why", f"best {_SPEED}", "which"), rows)


def _unranked(result: SearchResult) -> Section:
    """Layouts whose collectives only the compiler knows; the best of each kind of rules."""
    kinds: dict[str, list[Candidate]] = {}
    for each in result.unranked:
        kinds.setdefault(each.rules, []).append(each)
    rows = [
        (str(len(several)), rules, several[0].label, f"{several[0].tokens_per_second:,.0f}")
        for rules, several in kinds.items()
    ]
    columns = ("number", "rules", _LAYOUT, f"{_SPEED} at most")
    note = "The compiler decides some of their collectives, which are not in the bound: compare with --compile"
    return Section("Not ranked", columns, rows, [note] if rows else [])


def _frontier(candidates: Sequence[Candidate]) -> Section:
    rows = [
        (f"{latency:.1f}", f"{speed:,.0f}", str(count), each.label, each.rules)
        for each, (count, latency, speed) in frontier(candidates)
    ]
    return Section(
        "The frontier: no other layout beats these in both", (_LATENCY, _SPEED, "rows", _LAYOUT, "rules"), rows
    )


def result_json(result: SearchResult) -> dict[str, Any]:
    """A search as JSON values."""
    best = result.candidates[0]
    bounds = result.unranked + result.slower
    return {
        "candidates": [_candidate_json(each, best) for each in result.candidates],
        "calibration": calibration(best.plan.deployment.topology.device),
        "bounds": [_candidate_json(each, best) for each in bounds],
        "left_out": result.left_out,
    }


def _candidate_json(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    """A candidate as JSON values."""
    return {name: getattr(candidate.engine, name) for name in ("tensor", "stages", "replicas")} | {
        "mesh": candidate.engine.stage_axes,
        "rules": candidate.rules,
        "spec": candidate.plan.deployment.spec.sections(),
        "slots": candidate.plan.slots,
        "tokens_per_second": candidate.tokens_per_second,
        "points": as_json(candidate.points),
        "device_milliseconds": candidate.spent(),
        "more_than_first": lag(candidate, best),
    }


def plot(candidates: Sequence[Candidate], title: str, path: Path) -> None:
    """Plots throughput over latency: the frontier and the fastest others, at their best rules."""
    figure = drawing.figure(8.5, 5)
    axis = figure.subplots()
    best: dict[str, Candidate] = {}
    edge = frontier(candidates)
    for each in [*(each for each, _ in edge), *candidates]:
        best.setdefault(each.label, each)
    for label, each in list(best.items())[:_DRAWN]:
        _, latencies, speeds = zip(*each.points, strict=True)
        axis.plot(latencies, speeds, marker=".", linewidth=1, alpha=0.8, label=label)
    _, latencies, speeds = zip(*(point for _, point in edge), strict=True)
    axis.plot(latencies, speeds, color="black", linewidth=3, alpha=0.25, label="frontier", zorder=0)
    axis.set(xlabel="ms between a request's tokens (predicted)", ylabel="tokens/s (predicted)", xlim=(0, None))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9, title=_LAYOUT, title_fontsize=9)
    drawing.save(figure, path)
