"""Recorded traffic through the simulator, and what is sized by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.planning.calibration import calibration
from jaxserve.scheduler.buckets import BucketCost
from jaxserve.scheduler.cache_groups import CacheGroups
from jaxserve.simulate import policy_comparison
from jaxserve.simulate import workload as load
from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.system import Objective, SimulatedEngine
from jaxserve.simulate.virtual_clock import Arrival
from server.commands import cli
from sharding.devices import DEVICES

MODEL = ["--model", "bloom-560m", "--topology", "h100:2", "--max-rows", "4", "--buckets", "4,16,64", "--slots", "4096"]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def azure(tmp_path) -> Path:
    rows = [f"2023-11-16 18:15:{second:02d}.5,{60 + 7 * second},{3 + second % 9}" for second in range(30)]
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def mooncake(tmp_path) -> Path:
    lines = [
        {"timestamp": 2000 * index, "input_length": 1100 + index, "output_length": 4, "hash_ids": [1, 2, 100 + index]}
        for index in range(12)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def system(**config) -> SimulatedEngine:
    settings = EngineConfig(**{"max_rows": 2, "buckets": (2, 8, 32), **config})
    costs = tuple(BucketCost(size=n, compile_seconds=0.0, milliseconds=10.0 * n) for n in (2, 8, 32))
    return SimulatedEngine(
        config=settings,
        seconds=lambda plan: [0.01 * plan.bucket],
        costs=costs,
        slots=128,
        groups=CacheGroups(block_size=4, max_context=64, n_rows=4, most_tokens=32),
    )


def workload(count=8, prompt="8", output="4", rate=4.0) -> load.Workload:
    jobs = load.uniform(
        requests=count,
        prompt=load.Range.parse(prompt),
        output=load.Range.parse(output),
        vocab_size=9,
        seed=0,
    )
    return load.poisson(jobs, rate=rate, seed=0)


def compared(made: SimulatedEngine, policies, **more) -> list[policy_comparison.PolicyResult]:
    settings = {"max_tokens": None, "seed": 0, "progress": lambda *_: None, **more}
    return policy_comparison.compare(made, workload(), policies, **settings)


def test_every_policy_serves_every_token():
    policies = policy_comparison.policies(system(), Objective(ttft=1.0, tpot=0.1), 0.5)
    names = [policy.name for policy in policies]
    assert names == ["reserve", "grow", "no prefix cache", "budget 8", "tpot 100 ms", "50% urgent"]
    for each in compared(system(), policies):
        assert [outcome.tokens for outcome in each.served.outcomes] == [4] * 8
        assert each.served.sizes.total() > 8


def test_replicas_share_the_arrivals():
    one, two = (
        compared(dataclasses.replace(system(), replicas=count), [policy_comparison.Policy(name="", changes={})])[
            0
        ].served
        for count in (1, 2)
    )
    assert len(one.outcomes) == len(two.outcomes) == 8
    assert two.duration < one.duration


def test_urgent_requests_do_not_wait_behind_the_others():
    coming = workload(count=40, rate=1000.0)
    (found,) = policy_comparison.compare(
        system(),
        coming,
        [policy_comparison.Policy(name="", changes={}, urgent=0.2)],
        max_tokens=None,
        seed=1,
        progress=lambda *_: None,
    )
    firsts = [np.mean([each.first_token for each in found.by_class()[name]]) for name in ("urgent", "others")]
    assert firsts[0] < firsts[1] / 2


def test_a_flood_of_another_tenant_is_told_apart():
    """With turns the trace's requests wait little; the copies begin elsewhere, share no prefix, and are as many."""
    policies = policy_comparison.policies(system(), Objective(ttft=1.0, tpot=0.1), 0.0, 10.0)[-2:]
    assert [policy.name for policy in policies] == ["10x flood", "10x flood as one tenant"]
    coming = workload(count=40, rate=1.5)
    more = {"max_tokens": None, "seed": 1, "progress": lambda *_: None}
    alone = policy_comparison.compare(system(), coming, [policy_comparison.Policy(name="", changes={})], **more)[0]
    turns, one = policy_comparison.compare(system(), coming, policies, **more)
    first = {}
    for name, found in (("alone", alone), ("turns", turns), ("one", one)):
        outcomes = found.by_class().get("trace") or found.served.outcomes
        first[name] = np.percentile([each.first_token for each in outcomes], 95)
        assert len(outcomes) == 40
    assert [len(found.by_class()["flood"]) for found in (turns, one)] == [400, 400]
    assert first["turns"] < 3 * first["alone"] < first["one"] / 10  # with two rows, one of them must end first
    assert turns.served.duration == pytest.approx(one.served.duration, rel=0.02)
    assert turns.served.cached < 440 * 8 / 20  # by chance only: the copies have other tokens
    figures = policy_comparison.figures(turns, Objective(ttft=1.0, tpot=0.1))
    assert set(figures["classes"]) == {"trace", "flood"}


def test_tenants_of_a_trace_are_told_apart(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("t,p,o,who\n" + "".join(f"{second},60,5,{'ab'[second % 2]}\n" for second in range(10)))
    columns = ["--columns", "time=t,prompt=p,output=o,tenant=who", "--policies", "grow", "--json"]
    assert cli.main(["simulate", "--trace", str(path), *MODEL, *columns]) == 0
    (figures,) = json.loads(capsys.readouterr().out)["policies"]
    assert set(figures["classes"]) == {"a", "b"}
    for wrong in ("time=t,prompt=p", "time=t,prompt=p,output=", "t,p,o"):
        with pytest.raises(SystemExit):
            cli.main(["simulate", "--trace", str(path), *MODEL, "--columns", wrong])
        assert "names no columns" in capsys.readouterr().err


def test_reserve_holds_requested_tokens():
    policies = [policy_comparison.Policy(name=name, changes={"slot_policy": name}) for name in ("reserve", "grow")]
    reserve, grow = (each.served for each in compared(system(), policies, max_tokens=50))
    assert reserve.promised > 2 * reserve.held
    assert grow.promised < 1.5 * grow.held
    assert [each.tokens for each in reserve.outcomes] == [4] * 8  # they end where they ended


def test_an_objective_needs_both_of_its_times():
    objective = Objective(ttft=1.0, tpot=0.5)
    outcomes = [
        Outcome(arrival=0.0, prompt_tokens=1, token_times=times)
        for times in ([1.0], [1.1], [0.5, 1.0, 1.5], [0.5, 1.0, 1.6], [])
    ]
    assert [objective.met(each) for each in outcomes] == [True, False, True, False, False]
    assert objective.share(outcomes) == pytest.approx(0.4)
    assert outcomes[0].tpot == 0.0


def test_a_trace_is_simulated(azure, capsys, tmp_path):
    plot = tmp_path / "plot.png"
    assert cli.main(["simulate", "--trace", str(azure), *MODEL, "--plot", str(plot)]) == 0
    told = capsys.readouterr()
    assert "30 requests of azure.csv, 29 s; bloom-560m" in told.out
    assert "10% urgent, others:" in told.out
    assert "cost model: 57% of the peaks and 55 us a layer, not calibrated for h100: carried over" in told.out
    assert plot.stat().st_size > 10_000


def test_a_mesh_of_several_axes_is_simulated(capsys, tmp_path):
    """Split over both of its axes it is one axis of as many devices; over one of them it is another layout."""
    figures = {}
    rules = {"both": '["x", "y"]', "one": '"x"'}
    for name, over in rules.items():
        (tmp_path / f"{name}.toml").write_text(f"[axes]\nvocab = {over}\nffn = {over}\nheads = {over}\n")
    traffic = ["--rate", "50", "--requests", "30", "--prompt", "4:8", "--output", "9", "--policies", "grow", "--json"]
    for name, layout in {
        "tensor": ["--tensor", "4"],
        "both": ["--mesh", "x=2,y=2", "--sharding", str(tmp_path / "both.toml")],
        "one": ["--mesh", "x=2,y=2", "--sharding", str(tmp_path / "one.toml")],
    }.items():
        assert cli.main(["simulate", *MODEL[:2], "--topology", "h100:4", *MODEL[4:], *traffic, *layout]) == 0
        (figures[name],) = json.loads(capsys.readouterr().out)["policies"]
    assert figures["both"] == figures["tensor"]
    assert figures["one"]["tpot_ms"] != figures["both"]["tpot_ms"]


def test_synthetic_traffic_policies(capsys):
    lengths = ["--requests", "40", "--prompt", "4:8", "--output", "3"]
    assert cli.main(["simulate", "--rate", "20", *lengths, *MODEL, "--policies", "grow,reserve", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"] == "40 requests, prompts U(4,8), outputs U(3,3), Poisson 20/s"
    assert [each["policy"] for each in told["policies"]] == ["grow", "reserve"]
    assert [each["requests"] for each in told["policies"]] == [40, 40]


def test_shared_prefixes_are_found_again(mooncake, capsys):
    assert cli.main(["simulate", "--trace", str(mooncake), *MODEL, "--json", "--urgent", "0"]) == 0
    told = {each["policy"]: each for each in json.loads(capsys.readouterr().out)["policies"]}
    assert told["grow"]["cached_tokens"] == 11 * 1024
    assert told["no prefix cache"]["cached_tokens"] == 0
    assert told["grow"]["in_time"] == 1.0


@pytest.mark.parametrize(("host_cache", "from_host", "first_token"), [(None, 0, 0.5), (10**6, 48, 0.012 + 0.02)])
def test_a_prompt_with_blocks_on_the_host_waits_for_copies(host_cache, from_host, first_token):
    made = dataclasses.replace(system(host_cache=host_cache), block_bytes=(1,), copy_seconds=(0.001,))
    prompts = [np.arange(50, dtype=np.int32) + 100 * each for each in (0, 1, 2, 3, 0)]  # 32 blocks hold two of them
    served = made.serve([Arrival(10.0 * at, prompt, 4, 4) for at, prompt in enumerate(prompts)])
    assert served.loaded == from_host
    assert [each.first_token for each in served.outcomes] == pytest.approx([0.5] * 4 + [first_token])


def test_the_host_cache_is_compared(tmp_path, capsys):
    lines = [
        {"timestamp": 2000 * at, "input_length": 1100, "output_length": 4, "hash_ids": [30 + at % 3, 60 + at % 3, at]}
        for at in range(12)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--urgent", "0", "--slots", "2048", "--host-cache", "1GiB", "--policies", "grow,no host cache"]
    assert cli.main(["simulate", "--trace", str(path), *MODEL, *flags, "--json"]) == 0
    told = {each["policy"]: each for each in json.loads(capsys.readouterr().out)["policies"]}
    assert told["grow"]["cached_tokens"] == 9 * 1024
    assert told["grow"]["cached_share"] == pytest.approx(9 * 1024 / 13_200)
    assert 0 < told["grow"]["from_host_tokens"] <= 9 * 1024
    assert told["no host cache"]["from_host_tokens"] == 0
    assert told["no host cache"]["cached_tokens"] < 1024
    assert cli.main(["simulate", "--trace", str(path), *MODEL, *flags]) == 0
    assert "from host" in capsys.readouterr().out


def test_traffic_is_sized(azure, capsys, tmp_path):
    plot = tmp_path / "plot.png"
    flags = ["--price", "2.5", "--compile-time", "24s", "--speed", "4", "--plot", str(plot)]
    assert cli.main(["size", "--trace", str(azure), *MODEL[:4], *flags]) == 0
    told = capsys.readouterr().out
    assert "95% of the requests: ttft 1000 ms, tpot 100 ms; at most 4 buckets; 2.5 for an hour of a device" in told
    assert (
        "the cheapest layout in time: jaxserve serve --model ... --tensor 1 --stages 1 --replicas 1 --max-rows" in told
    )
    assert plot.stat().st_size > 5_000
    assert "longer in the trace" not in told


def test_a_recommendation_says_whom_it_leaves_out(azure, capsys):
    asked = ["size", "--trace", str(azure), *MODEL[:3], "h100:1", "--max-context", "40", "--compile-time", "6s"]
    assert cli.main(asked) == 0
    *_, last = capsys.readouterr().out.split("the cheapest layout in time")
    assert "30 of 30 requests are longer in the trace" in last
    assert cli.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clipped"] == 30
    assert "not calibrated for h100" in told["calibration"]


def test_where_the_constants_of_a_device_come_from():
    told = {name: calibration(DEVICES[name]) for name in DEVICES}
    assert "fitted to published times (Orca) of 6 batches" in told["a100-40g"]
    assert "76% of the peaks and 7 us a layer, calibrated on one h200" in told["h200"]
    assert "not calibrated: small models, links (57%) and 24 us a collective, carried over from a100" in told["h200"]
    others = told.keys() - {"a100-40g", "h200"}
    assert all(f"not calibrated for {name}:" in told[name] for name in others)
    assert "10 us a layer, not calibrated for v5e: assumed" in told["v5e"]


def test_too_little_is_said_to_be_too_little(azure, capsys):
    asked = ["size", "--trace", str(azure), *MODEL[:3], "v5e:1x1", "--slo", "ttft=1ms,tpot=1ms", "--json"]
    assert cli.main(asked) == 1
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert not layout["enough"]
    assert layout["cost_per_million"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--trace", "FILE"], "give --model and --topology"),
        (["simulate", "--rate", "5", *MODEL, "--policies", "grow,best"], "names 'best'; there are reserve, grow"),
        (["simulate", "--rate", "5", *MODEL, "--prompt", "9:3"], "is not a length range"),
        (["simulate", "--rate", "0", *MODEL], "rate is 0; it must be above 0"),
        (["simulate", "--trace", "missing", *MODEL], "missing: the trace cannot be read"),
        (["simulate", "--trace", "FILE", *MODEL, "--requests", "0"], "--requests is 0; it must be at least 1"),
        (["size", "--trace", "FILE", *MODEL, "--price", "0"], "--price is 0; it must be above 0"),
        (["size", "--trace", "FILE", *MODEL, "--compile-time", "1s"], "less than the time of one bucket"),
    ],
)
def test_mistakes_are_told(arguments, message, azure, capsys):
    assert cli.main([str(azure) if each == "FILE" else each for each in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_line_is_named(azure, capsys):
    lines = azure.read_text().splitlines()
    lines[4] = "2023-11-16 18:15:03.5,many,5"
    azure.write_text("\n".join(lines))
    assert cli.main(["simulate", "--trace", str(azure), *MODEL]) == 2
    told = capsys.readouterr().err
    assert f"{azure}, line 5: not a request of an Azure trace" in told
    assert "2023-11-16 18:15:46.68,374,44" in told  # what would be right


@pytest.mark.parametrize("wrong", ["ttft=1s", "ttft=1s,tpot=fast", "ttft=1s,tpot=0ms", "ttft=1s,ttft=2s"])
def test_a_wrong_objective_is_told(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--trace", "x", "--slo", wrong])
    assert "ttft=1s,tpot=100ms" in capsys.readouterr().err or wrong.endswith(("fast", "0ms"))
