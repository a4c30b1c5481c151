"""Fronts that route calls to simulated replicas."""

from __future__ import annotations

import json

import pytest

from benchmarks import fronts
from benchmarks.__main__ import main
from jaxserve.config import EngineConfig
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import arrivals


def served(count: int, period: float | None) -> list[Outcome]:
    system = SimulatedEngine(
        config=EngineConfig(max_rows=4, buckets=(4, 16)),
        seconds=lambda plan: [0.01 + 0.001 * plan.bucket],
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 + n) for n in (4, 16)),
        slots=512,
        groups=CacheGroups(block_size=4, max_context=64, n_rows=4, most_tokens=16),
        replicas=16,
    )
    lengths = {"prompt": load.Range.parse("1:40"), "output": load.Range.parse("1:20"), "vocab_size": 99}
    workload = load.poisson(load.uniform(requests=300, seed=1, **lengths), rate=150.0, seed=1)
    return fronts.serve(system, arrivals(workload), fronts=count, period=period, seed=0)


def mean(outcomes: list[Outcome]) -> float:
    return sum(each.first_token for each in outcomes) / len(outcomes)


def test_fronts_that_always_know_the_loads_are_as_one():
    assert served(16, 0.0) == served(1, 0.0)


def test_stale_loads_and_fronts_that_choose_otherwise(monkeypatch):
    one, alone, told = mean(served(1, 0.0)), mean(served(16, None)), mean(served(16, 0.2))
    assert one < told < alone
    monkeypatch.setattr(fronts, "CHOICES", 16)
    assert mean(served(16, 0.2)) > told


def test_the_command_compares_them(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{number / 10:09.6f},60,40" for number in range(60)]
    path.write_text("\n".join(lines) + "\n")
    flags = ["--model", "bloom-560m", "--topology", "a100-40g:2", "--replicas", "2", "--max-rows", "4"]
    assert main(["fronts", "--trace", str(path), *flags, "--buckets", "4,16,64", "--fronts", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["one front", "3 fronts, own calls", "3 fronts, events and loads"]
    assert all(each["in_time"] == 1 for each in answer.values())
