"""Orca's setups: the fit, and small traces that agree with the paper's large ones."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from benchmarks import orca, paper
from benchmarks.orca import SETUPS, Point, Survey


@pytest.mark.parametrize("overlapped", [False, True])
def test_two_constants_fit_the_microbenchmark(overlapped):
    fit = orca.fitted(overlapped=overlapped)
    for batch, seconds in orca.MICROBENCHMARK.items():
        assert orca.microbenchmark(SETUPS["101B"], batch, fit) == pytest.approx(seconds, rel=0.05)


def test_the_fit_is_the_best_there_is():
    fit = orca.fitted(overlapped=False)

    def error(efficiency, layer_seconds):
        tried = dataclasses.replace(fit, efficiency=efficiency, layer_seconds=layer_seconds)
        found = [orca.microbenchmark(SETUPS["101B"], b, tried) / s - 1 for b, s in orca.MICROBENCHMARK.items()]
        return sum(each * each for each in found)

    least = error(fit.efficiency, fit.layer_seconds)
    for efficiency in (0.98, 1.02):
        assert error(efficiency * fit.efficiency, fit.layer_seconds) > least
        assert error(fit.efficiency, efficiency * fit.layer_seconds) > least


def test_slots_are_what_weights_leave():
    # 175B: 92% of 39.4 GiB less 21.9 GB of weights, at 96/2 layers x 2 x 12288/8 x 2 bytes a slot
    assert SETUPS["175B"].slots == pytest.approx((0.92 * 39.4 * 2**30 - 21.9e9) / 294_912, rel=0.01)


def test_fastertransformer_of_101b_peaks_where_it_was_published():
    serve = orca.fastertransformer_of(SETUPS["101B"], orca.fitted(overlapped=False), 8)
    assert orca.point(serve, 1e3, requests=800, seed=0).throughput == pytest.approx(0.49, rel=0.05)


def test_orca_beats_request_level_batching():
    fit = orca.fitted(overlapped=False)
    ours, theirs = (
        orca.point(serve, 6.0, requests=300, seed=0)
        for serve in (orca.orca_of(SETUPS["175B"], fit, 32), orca.fastertransformer_of(SETUPS["175B"], fit, 8))
    )
    assert ours.latency < 0.15
    assert theirs.throughput < ours.throughput / 10


def test_ours_serves_more_than_orca_at_the_same_latency():
    fit = orca.fitted(overlapped=False)
    rate = 8.5  # beyond Orca with a batch of 32
    ours, theirs = (
        orca.point(serve, rate, requests=700, seed=0)
        for serve in (orca.ours_of(SETUPS["175B"], fit), orca.orca_of(SETUPS["175B"], fit, 32))
    )
    assert ours.latency < 0.13 < theirs.latency


def test_throughput_is_read_between_the_longest_traces():
    points = [Point(1.0, 1.0, 0.1, 60), Point(1.5, 0.1, 0.12, 20), Point(2.0, 1.8, 0.2, 60), Point(3.0, 2.0, 0.6, 60)]
    assert orca.throughput_at(points, 0.15) == pytest.approx(1.4)
    assert orca.throughput_at(points, 0.4) == pytest.approx(1.9)
    assert orca.throughput_at(points, 0.05) == 0.0
    assert orca.throughput_at(points, 0.9) == 2.0


def test_a_curve_rises_until_it_is_saturated():
    serve = orca.fastertransformer_of(SETUPS["13B"], orca.fitted(overlapped=False), 8)
    (points,) = orca.curves(serve, Survey(0.2, 1.3, math.inf), [0.2], requests=60, seeds=1)
    assert points == sorted(points)
    assert points[0].latency < 0.2 < points[-1].latency


@pytest.mark.parametrize("objectives", [(0.09,), (0.1, 0.19)])
def test_whole_traces_are_served_on_both_sides_of_an_objective(objectives):
    fit = orca.fitted(overlapped=False)
    serve = orca.fastertransformer_of(SETUPS["175B"], fit, 8)
    first, *others = orca.curves(serve, Survey(0.04, 2.0, 500.0), objectives, requests=300, seeds=3)
    assert {each.requests for each in first} > {20, 40, 300}  # 500 s of traffic, or a whole trace
    for points in (first, *others):
        whole = [each for each in points if each.requests == 300]
        for objective in objectives:
            within = [each.rate for each in whole if each.latency <= objective]
            beyond = [each.rate for each in whole if each.latency > objective]
            assert max(within) < min(each for each in beyond if each > max(within)) < 1.07 * max(within)
        assert points is first or len(points) == len(whole) <= 6 * len(objectives)


def test_no_trace_is_repeated_where_none_is_as_quick():
    serve = orca.fastertransformer_of(SETUPS["175B"], orca.fitted(overlapped=False), 8)
    (points,) = orca.curves(serve, Survey(0.04, 2.0, 100.0), [1e-3], requests=600, seeds=1)
    assert max(each.requests for each in points) < 600
    assert orca.throughput_at(points, 1e-3) == 0.0


def test_the_slowdown_that_the_published_rate_implies():
    # At s times the time, the rate at 190 ms is that at 190 / s ms, divided by s: 0.74 * 0.5 / 2 = 0.185.
    points = [Point(rate, rate, orca.OBJECTIVE * rate / 0.74, 60) for rate in (0.1, 0.37, 0.74, 1.0)]
    curves = paper.Curves(
        setup=SETUPS["175B"],
        fit=orca.fitted(overlapped=False),
        systems={f"{paper.FT} 1": [points], f"{paper.FT} 8": [points[:1]]},
    )
    assert paper.implied_slowdown(curves) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.bench
def test_the_paper_is_printed_and_drawn(tmp_path):
    found = paper.simulate(12, 1, lambda *_: None)
    console = Console(width=150, file=io.StringIO())
    paper.show(found, console)
    told = console.file.getvalue()
    assert "FT 101B peak" in told
    assert "175B, longer of arithmetic and memory" in told
    paper.plot(found, tmp_path / "orca.png")
    assert (tmp_path / "orca.png").stat().st_size > 10_000
    assert len(paper.as_json(found)["headline"]) == 2
