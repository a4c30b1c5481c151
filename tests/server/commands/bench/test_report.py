"""Statistics of runs, worked by hand."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from rich.console import Console

from jaxserve.simulate.outcome import Distribution, Outcome
from server.commands.bench import machine, report


class Record(NamedTuple):
    """The fields of an engine's iteration record that reports read."""

    bucket: int
    num_tokens: int
    waiting: int
    schedule_s: float = 0.001
    pack_s: float = 0.002
    launch_s: float = 0.003
    wait_s: float = 0.050
    complete_s: float = 0.004
    finished_at: float = 0.0


COST = {8: 10.0, 32: 30.0}
ITERATION = [Record(32, 32, 5, finished_at=0.0), Record(32, 24, 1, finished_at=0.03), Record(8, 2, 0, finished_at=0.04)]
REQUEST = [Record(32, 16, 5, finished_at=float(n)) for n in range(4)]


def outcomes() -> list[Outcome]:
    return [
        Outcome(arrival=10.0, prompt_tokens=7, token_times=[11.0, 11.5, 13.0]),
        Outcome(arrival=11.0, prompt_tokens=3, token_times=[14.0]),
        Outcome(arrival=12.0, prompt_tokens=9, token_times=[12.5], error="cut off"),
        Outcome(arrival=12.0, prompt_tokens=9, error="refused"),
    ]


def test_percentiles_interpolate_between_order_statistics():
    found = Distribution.of(range(1, 101))
    assert found == Distribution(count=100, mean=50.5, p50=50.5, p95=95.05, p99=99.01, max=100.0)
    assert Distribution.of([3.0]) == Distribution(count=1, mean=3.0, p50=3.0, p95=3.0, p99=3.0, max=3.0)
    assert Distribution.of([]) is None


def test_summary_of_a_run():
    run = report.summarise("x", outcomes())
    assert (run.requests, run.failed, run.errors) == (4, 2, ("cut off", "refused"))
    assert run.seconds == 4.0
    assert (run.prompt_tokens, run.output_tokens) == (10, 4)
    assert run.tokens_per_second == 1.0
    assert run.total_tokens_per_second == 3.5
    assert run.requests_per_second == 0.5
    assert run.first_token_ms is not None
    assert run.first_token_ms.max == 3000.0
    assert run.first_token_ms.p50 == 2000.0
    assert run.between_tokens_ms is not None
    assert (run.between_tokens_ms.count, run.between_tokens_ms.mean) == (2, 1000.0)
    assert run.normalised_ms is not None
    assert (run.normalised_ms.p50, run.normalised_ms.max) == (2000.0, 3000.0)


def test_tokens_that_come_together_have_no_time_between_them():
    run = report.summarise("x", [Outcome(arrival=0.0, prompt_tokens=1, token_times=[1.0, 1.0, 2.0])])
    assert run.between_tokens_ms is not None
    assert run.between_tokens_ms.mean == 500.0


def test_run_in_which_everything_failed():
    run = report.summarise("x", outcomes()[2:])
    assert (run.failed, run.tokens_per_second, run.first_token_ms) == (2, 0.0, None)


def test_padding_is_weighted_by_bucket_cost():
    stats = report.iteration_summary(ITERATION, COST)
    assert stats.waste_waiting == pytest.approx((30 * 0 + 30 * 8 / 32) / 60)
    assert stats.waste_drain == pytest.approx(6 / 8)
    assert report.padding_waste(ITERATION, COST) == pytest.approx((7.5 + 7.5) / 70)
    assert report.padding_waste([], COST) is None
    assert (stats.iterations, stats.buckets) == (3, {8: 1, 32: 2})
    assert stats.cost_seconds == pytest.approx(0.070)


def test_host_time_excludes_device_waits():
    stats = report.iteration_summary(ITERATION, COST)
    assert stats.host_ms["host"].p50 == pytest.approx(10.0)
    assert stats.host_ms["launch"].p50 == pytest.approx(3.0)
    assert stats.wait_ms.p50 == pytest.approx(50.0)
    with pytest.raises(ValueError, match="no iteration"):
        report.iteration_summary([], COST)


def test_comparison_of_schedules():
    fast = report.summarise("iteration", outcomes(), iterations=report.iteration_summary(ITERATION, COST))
    slow_outcomes = [Outcome(arrival=0.0, prompt_tokens=10, token_times=[1.0, 2.0, 4.0, 6.0])]
    slow = report.summarise("request", slow_outcomes, iterations=report.iteration_summary(REQUEST, COST))
    found = report.compare(fast, slow)
    assert found.measured == pytest.approx(1.5)
    assert found.allowed == pytest.approx(120 / 70)
    assert found.share == pytest.approx(1.5 / (120 / 70))


def test_tables_name_what_they_show(capsys):
    console = Console(width=160)
    fast = report.summarise("iteration", outcomes(), iterations=report.iteration_summary(ITERATION, COST))
    slow = report.summarise("request", outcomes()[:1], extra={"preemptions": 3})
    report.print_runs(console, "title", [fast, slow], ["two requests were clipped"])
    report.print_comparison(console, report.Comparison(measured=2.0, allowed=2.1, share=2.0 / 2.1))
    told = capsys.readouterr().out
    for words in ("title", "two requests were clipped", "padding waste while work waits", "12.5%", "refused"):
        assert words in told
    assert "95.2% (target 90.0%: reached)" in told


def test_json_holds_plain_values(tmp_path):
    run = report.summarise("x", outcomes(), iterations=report.iteration_summary(ITERATION, COST))
    path = tmp_path / "new" / "result.json"
    report.write_json(path, {"run": run, "scalar": np.float32(0.5), "environment": machine.environment()})
    read = json.loads(path.read_text())
    assert read["run"]["first_token_ms"]["max"] == 3000.0
    assert read["run"]["iterations"]["buckets"] == {"8": 1, "32": 2}
    assert read["scalar"] == 0.5
    assert read["environment"]["cores"] >= 1


def test_picture_is_drawn(tmp_path):
    report.plot(tmp_path / "new" / "a.png", "t", {"iteration": outcomes(), "request": outcomes()[:2]}, Console())
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
