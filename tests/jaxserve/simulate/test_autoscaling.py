"""Replicas that follow the load, by the rule of the manifest."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jaxserve.config import EngineConfig
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.simulate import day
from jaxserve.simulate import workload as load
from jaxserve.simulate.autoscaling import HorizontalAutoscaler, ScaledFleet, ScalingRule
from jaxserve.simulate.system import SimulatedEngine
from server.commands import cli

KUSTOMIZE = Path(__file__).parents[3] / "deploy" / "kustomize"
MANIFEST = KUSTOMIZE / "components" / "scaling" / "scaledobject.yaml"
RULE = ScalingRule(
    least=1,
    most=6,
    owed_seconds=2.0,
    period=15.0,
    window=60.0,
    up_window=30.0,
    down_window=60.0,
    down_replicas=1,
    down_seconds=60.0,
)


def system() -> SimulatedEngine:
    """An engine that computes 10 tokens a second, in iterations of 8 tokens at most."""
    return SimulatedEngine(
        config=EngineConfig(max_rows=4, buckets=(4, 8)),
        seconds=lambda plan: [0.1 * plan.bucket],
        costs=tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=100.0 * n) for n in (4, 8)),
        slots=256,
        groups=CacheGroups(block_size=4, max_context=64, n_rows=8, most_tokens=8),
    )


def trace(tmp_path: Path, rate: float = 4.0) -> Path:
    """A trace of steady traffic, 20 tokens a request."""
    path = tmp_path / "steady.csv"
    path.write_text("".join(f"2023-11-16 18:00:{n / rate:09.6f},12,8\n" for n in range(int(59 * rate))))
    return path


def steady_day(tmp_path: Path, seconds: float, rate: float) -> load.Workload:
    read = load.read_trace(trace(tmp_path, rate), max_context=64, vocab_size=9, seed=0, seconds=seconds)
    return day.of_a_day(read, seconds)


def test_the_rule_is_that_of_the_manifest():
    rule, spec = ScalingRule.read(MANIFEST), yaml.safe_load(MANIFEST.read_text())["spec"]
    assert (rule.least, rule.most) == (spec["minReplicaCount"], spec["maxReplicaCount"])
    assert str(rule.owed_seconds).removesuffix(".0") == spec["triggers"][0]["metadata"]["threshold"]
    scraped = yaml.safe_load((KUSTOMIZE / "common" / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
    assert [each["interval"] for each in scraped] == [f"{rule.period:g}s"]
    assert rule.window > rule.period


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("kind: ScaledObject", "kind: Deployment", "it is no ScaledObject"),
        ("maxReplicaCount: 8", "", "'maxReplicaCount' is missing"),
        ("jaxserve_outstanding_seconds", "other", "query is sum"),
        ("maxReplicaCount: 8", "maxReplicaCount: 1", "minReplicaCount must be at least 1"),
        ("maxReplicaCount: 8", "maxReplicaCount: many", "maxReplicaCount is 'many'; it must be a number of at least 0"),
        ("pollingInterval: ", "pollingInterval: -", "pollingInterval is -"),
        ("kind: ScaledObject", "kind: [\n", r"parsing a flow sequence in [^\n]+; deploy/kustomize[^\n]+$"),
        ("type: Pods", "type: Percent", "one policy, of type Pods"),
        ("metricType: AverageValue", "metricType: Value", "of metricType AverageValue"),
    ],
)
def test_another_rule_is_refused(tmp_path, old, new, told):
    path = tmp_path / "rule.yaml"
    path.write_text(MANIFEST.read_text().replace(old, new))
    with pytest.raises(ValueError, match=told):
        ScalingRule.read(path)


def decisions(owed: list[float], replicas: int = 1) -> list[int]:
    """What is decided every 15 s, with these seconds of work."""
    made, found = HorizontalAutoscaler(RULE), []
    for number, each in enumerate(owed, start=1):
        replicas = made.decide(15.0 * number, replicas, each)
        found.append(replicas)
    return found


def test_nothing_changes_near_the_target():
    assert decisions([4.39, 3.61, 4.0], replicas=2) == [2, 2, 2]
    assert decisions([4.41] * 4, replicas=2)[-1] == 3


def test_more_work_has_to_last_for_the_window():
    assert decisions([9.0, 9.0, 2.0, 9.0, 9.0, 9.0]) == [1, 1, 1, 1, 5, 5]


def test_replicas_double_or_four_are_added_in_15_s():
    assert decisions([50.0] * 5) == [1, 1, 5, 6, 6]


def test_one_replica_a_minute_is_removed_after_the_window():
    assert decisions([8.0] + [0.5] * 12, replicas=4) == [4] * 4 + [3] * 4 + [2] * 4 + [1]


@pytest.fixture(scope="module")
def fleets(tmp_path_factory) -> list[day.FleetResult]:
    """20 minutes of a day whose peak takes two replicas."""
    workload = steady_day(tmp_path_factory.mktemp("trace"), 1500.0, 0.5)
    settings = {"start_seconds": 40.0, "max_tokens": None, "progress": lambda *_: None}
    return day.compare(system(), workload, RULE, **settings)


def test_replicas_follow_the_load(fleets):
    result = fleets[0]
    counts = [each.replicas for each in result.samples]
    assert (counts[0], max(counts), counts[-1]) == (1, 3, 1)
    assert 0.3 < counts.index(max(counts)) / len(counts) < 0.7
    assert all(outcome.error is None and outcome.tokens == 8 for outcome in result.served.outcomes)


def test_a_replica_takes_requests_when_it_has_started(fleets):
    result = fleets[0]
    started = [pod for pod in result.pods if pod.start]
    assert {pod.ready - pod.start for pod in started} == {40.0}
    for sample in result.samples:
        running = [pod for pod in result.pods if pod.start < sample.time < pod.stopped]
        assert sample.ready <= sum(pod.ready <= sample.time for pod in running) + 1


class StubReplica:
    """A replica that has a request until it is told to have none."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(pool=self)
        self.now, self.is_idle, self.flushes = 0.0, False, 0

    def advance(self, until: float) -> None:
        self.now = self.now if self.is_idle else until

    def flush(self) -> None:
        self.flushes += 1


def test_a_stopped_replica_counts_until_its_last_request():
    replicas: list = [StubReplica() for _ in range(12)]
    owed = 3.0  # seconds: two replicas are wanted
    fleet = ScaledFleet(RULE, replicas, start_seconds=0.0, owed_seconds=lambda replica, now: owed / len(fleet.ready))
    fleet.advance(90.0)
    assert fleet.ready == [0, 1]
    owed = 0.5
    while len(fleet.ready) > 1:
        fleet.advance(fleet.samples[-1].time + 15.0)
    pod, stopped = fleet.pods[1], fleet.samples[-1].time
    assert (pod.place, pod.stopped) == (1, stopped)
    fleet.advance(stopped + 40.0)  # two decisions later it still has its request
    assert (pod.end, replicas[1].now, replicas[1].flushes) == (inf, stopped + 30.0, 0)
    replicas[1].is_idle, replicas[1].now = True, stopped + 38.0
    fleet.advance(stopped + 45.0)
    assert (pod.end, replicas[1].flushes) == (stopped + 38.0, 1)  # and its cache is lost
    assert replicas[0].flushes == 0
    fleet.advance(stopped + 60.0)
    assert (replicas[1].now, replicas[1].flushes) == (stopped + 38.0, 1)


def test_a_stopped_replica_with_requests_at_the_end():
    replicas: list = [StubReplica() for _ in range(12)]
    fleet = ScaledFleet(RULE, replicas, start_seconds=0.0, owed_seconds=lambda replica, now: 0.0)
    (pod,) = fleet.pods
    pod.stopped, replicas[0].now = 20.0, 34.0
    fleet.finish(50.0)
    assert pod.end == 34.0


def test_a_stopped_replica_ends_its_requests(fleets):
    result = fleets[0]
    stopped = [pod for pod in result.pods if pod.stopped < inf]
    assert stopped
    assert all(pod.stopped <= pod.end < inf for pod in stopped)
    assert 0 < result.longest_drain < 60


def test_fixed_fleets_have_the_mean_size_and_the_peak(fleets):
    scaled, *fixed = fleets
    seconds = sum(pod.end - pod.start for pod in scaled.pods)
    mean = int(seconds / scaled.served.duration)
    assert [each.largest for each in fixed] == [mean, mean + 1, scaled.largest]
    assert scaled.replica_hours == pytest.approx(seconds / 3600)
    for each in fixed:
        assert each.replica_hours == pytest.approx(each.largest * each.served.duration / 3600, rel=0.01)


def test_a_day_has_three_times_the_rate_at_its_peak(tmp_path):
    workload = steady_day(tmp_path, 240.0, 50.0)
    times = [job.arrival for job in workload.jobs]
    assert times == sorted(times)
    assert len(times) == pytest.approx(240 * 50, rel=0.02)
    quiet = sum(time < 10 for time in times) + sum(time >= 230 for time in times)
    busy = sum(110 <= time < 130 for time in times)
    assert busy / quiet == pytest.approx(3.0, rel=0.03)


def simulate(tmp_path: Path, *more: str) -> int:
    flags = ["--trace", str(trace(tmp_path)), "--model", "bloom-560m", "--topology", "h100:1", "--max-rows", "4"]
    return cli.main(["simulate", *flags, "--buckets", "4,16", "--slots", "1024", *more])


def test_the_command_compares_the_fleets(tmp_path, capsys):
    picture = tmp_path / "day.png"
    flags = ("--day", "1m", "--autoscale", str(MANIFEST), "--json", "--plot", str(picture))
    assert simulate(tmp_path, *flags) == 0
    fleets = json.loads(capsys.readouterr().out)["fleets"]
    assert [each["fleet"] for each in fleets] == ["autoscaled", "2 fixed"]
    assert fleets[0]["replica_hours"] == pytest.approx(fleets[1]["replica_hours"], rel=0.01)
    parts = fleets[0]["over_time"]  # of 2.5 s, with a decision in each sixth
    assert [(each["replicas"], each["ready"]) for each in parts] == [(2.0, 2.0)] * 24
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--autoscale", str(MANIFEST), "--policies", "grow"), "--autoscale does not go with --policies"),
        (("--day", "2m", "--requests", "5"), "--day goes with --trace and without --requests"),
        (("--autoscale", "nowhere.yaml"), "nowhere.yaml: the rule cannot be read"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys, flags, told):
    assert simulate(tmp_path, *flags) == 2
    assert told in " ".join(capsys.readouterr().err.split())
