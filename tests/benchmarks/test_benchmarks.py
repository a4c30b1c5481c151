"""The benchmarks from their command line to their files, on tiny models."""

import dataclasses
import json

import jax
import pytest

from benchmarks import checkpoints, host, jobs, refusals, templates
from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import main as checkout_main
from benchmarks.started_server import engine_arguments, started_server
from jaxserve.config import EngineConfig
from jaxserve.scheduler.cache_groups import CacheGroups
from server.commands import cli as commands
from server.commands import flags
from server.commands.bench import offline, step
from server.commands.bench.step import Case
from server.commands.console import progress_bars

# One set of shapes for every test, so that the programs are compiled once.
CONFIG = EngineConfig(dtype="float32", max_rows=3, buckets=(3, 8), max_context=128, slots=768, scoring=False)


def bench(command: str, *arguments: str) -> int:
    """Runs a benchmark of either command with the shared configuration."""
    config = dataclasses.replace(CONFIG, compilation_cache=jax.config.jax_compilation_cache_dir)
    arguments = (*engine_arguments(config), *arguments)
    if command in BENCHMARKS:
        return checkout_main([command, *arguments])
    return commands.main(["bench", command, *arguments])


@pytest.mark.bench
def test_offline_compares_schedulers(tmp_path, capsys):
    code = bench("offline", "--quick", "--compare-schedulers", "--out", str(tmp_path))
    told = capsys.readouterr().out
    assert code == 0
    assert "throughput, iteration / request-level" in told
    result = json.loads((tmp_path / "offline.json").read_text())
    iteration, request = result["runs"]
    assert (iteration["name"], request["name"]) == ("iteration", "request")
    assert iteration["failed"] == request["failed"] == 0
    assert iteration["output_tokens"] == request["output_tokens"]
    assert iteration["prompt_tokens"] == request["prompt_tokens"]
    assert iteration["iterations"]["iterations"] <= request["iterations"]["iterations"]
    assert iteration["extra"]["compiled after ready"] == 0
    assert result["comparison"]["allowed"] >= 1.0
    assert set(result["bucket_ms"]) == {"3", "8"}
    assert (tmp_path / "offline.png").stat().st_size > 0


@pytest.mark.bench
def test_refused_calls_are_timed(monkeypatch, capsys):
    forms = ("a short text", "too many tokens to generate", "gRPC: too much text")
    monkeypatch.setattr(refusals, "FORMS", {name: refusals.FORMS[name] for name in forms})
    assert checkout_main(["refusals", "--seconds", "100ms"]) == 0
    told = capsys.readouterr().out
    for name, answer in zip(forms, ("429", "400", "INVALID_ARGUMENT"), strict=True):
        (line,) = [line for line in told.splitlines() if name in line]
        assert answer in line


def test_rendered_chats_are_timed(monkeypatch, capsys):
    assert checkout_main(["templates", "--times", "20"]) == 0
    table = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [int(line[1]) for line in table] == [1, 10, 100]
    assert all(0 < float(line[2]) <= float(line[3]) <= float(line[4]) for line in table)
    monkeypatch.setattr(templates, "TARGET_MS", 0.0)
    assert checkout_main(["templates", "--times", "1"]) == 1


@pytest.mark.bench
def test_simulator_against_an_engine(tmp_path, capsys):
    assert bench("simulator", "--quick", "--out", str(tmp_path)) == 0
    assert "measured / simulated" in capsys.readouterr().out
    result = json.loads((tmp_path / "simulator.json").read_text())
    (load,) = result["loads"]
    assert load["share"] == 0.5
    assert all(measured > 0 and simulated > 0 for measured, simulated in load["figures"].values())
    assert all(count > 0 for count in load["iterations"])
    assert len(load["pace"]) == 5
    assert all(pace > 0 for pace in load["pace"])
    # Before each part, and after the last.
    assert [[bucket["size"] for bucket in start] for start in result["buckets"]] == [[3, 8]] * 6


@pytest.mark.bench
def test_workload_that_cannot_fit(tmp_path, capsys):
    model = ("--shape", "tiny", "--requests", "3", "--prompt", "140", "--output", "1")
    assert bench("offline", *model, "--out", str(tmp_path)) == 2
    assert "longest request holds 141 tokens, the engine at most 128" in capsys.readouterr().err


@pytest.mark.parametrize("nested", [False, True])
def test_unwritable_output_is_refused_first(tmp_path, capsys, nested):
    (file := tmp_path / "file").touch()
    out = file / "folder" if nested else file
    assert bench("step", "--quick", "--out", str(out)) == 2
    why = "Not a directory" if nested else "File exists"
    assert f"error: cannot write to --out {out}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("peers", "--engines", "vllm"), "'vllm' is no known peer; there are transformers, continuous, ctranslate2"),
        (("peers", "--parts", "steps,all"), "'all' is no known part; there are steps, load"),
        (("peers", "--cases", "decode 1 row"), "'decode 1 row' is no known case; there are decode 1 row at 100"),
        (("offline", "--shape", "bloom"), "'bloom' is no known shape; there are bloom-560m"),
        (("offline", "--shape", "tiny", "--prompt", "9:3"), "is not a length range"),
        (("step", "--shape", "tiny", "--dtypes", "int8"), "'int8' is no dtype to measure"),
        (("offline", "--timeline", "/no/such/trace.json"), "--timeline /no/such/trace.json is no file in a folder"),
    ],
)
def test_mistakes_have_messages(arguments, message, capsys):
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--quick", "--out=somewhere"])
def test_regression_takes_no_output_flags(flag, capsys):
    with pytest.raises(SystemExit):
        checkout_main(["regression", flag])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("loads", ["nan", "0.5,inf", "0"])
def test_loads_are_numbers_above_0(loads, capsys):
    with pytest.raises(SystemExit):
        bench("simulator", "--loads", loads)
    assert f"{loads!r} is not a list of numbers above 0" in capsys.readouterr().err


@pytest.mark.bench
def test_serve_loads_a_server(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 5 * n, "input_length": 4 + n, "output_length": 1 + n, "hash_ids": [n]} for n in range(5)]
    lines.append({"timestamp": 40, "input_length": 200, "output_length": 3, "hash_ids": [7]})
    trace.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    config = dataclasses.replace(CONFIG, compilation_cache=jax.config.jax_compilation_cache_dir)
    model = checkpoints.checkpoint("tiny", tmp_path)
    with started_server(model, config, tmp_path / "log") as server:
        load = ("--address", server.address, "--trace", str(trace), "--out", str(out))
        assert commands.main(["bench", "serve", *load]) == 0
    told = capsys.readouterr().out
    assert "1 of 6 requests were clipped to a context of 128 tokens" in told
    result = json.loads((out / "serve.json").read_text())
    (run,) = result["runs"]
    assert (run["requests"], run["failed"], run["output_tokens"]) == (6, 0, 1 + 2 + 3 + 4 + 5 + 3)
    assert run["extra"]["generated tokens"] == run["output_tokens"]
    assert run["extra"]["compiled after ready"] == 0
    assert (out / "serve.png").stat().st_size > 0
    assert (tmp_path / "log").read_text()


def test_server_that_cannot_start_shows_its_output(tmp_path):
    with (
        pytest.raises(ValueError, match=r"before it was ready(.|\n)*nowhere"),
        started_server(tmp_path / "nowhere", CONFIG, tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, ""),
        ({"compilation_cache": None}, "--compilation-cache off"),
        ({"max_rows": 8, "buckets": (16, 32), "target_tpot": 0.1}, "--max-rows 8 --buckets 16,32 --target-tpot 0.1s"),
        ({"prefix_cache": False, "scoring": False}, "--prefix-cache off --no-scoring"),
        ({"deterministic": True, "slot_policy": "reserve"}, "--slot-policy reserve --deterministic"),
    ],
)
def test_engine_arguments_describe_a_configuration(settings, arguments):
    config = EngineConfig(**settings)
    assert engine_arguments(config) == arguments.split()
    args = commands.parser().parse_args(
        ["serve", "--compilation-cache", str(config.compilation_cache), *arguments.split()]
    )
    assert flags.engine_config(args) == config


@pytest.mark.bench
@pytest.mark.smoke
def test_steps_are_timed(tmp_path):
    assert bench("step", "--quick", "--dtypes", "float32", "--out", str(tmp_path)) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    assert [len(entry["milliseconds"]) for entry in result["steps"]["float32"]] == [3, 3, 3]
    assert result["memory"]["float32"]["pool"] > 0


@pytest.mark.bench
def test_too_long_cases_are_left_out(tmp_path, capsys):
    limits = ("--dtypes", "float32", "--max-context", "15", "--out", str(tmp_path))
    assert bench("step", "--quick", *limits) == 0
    (timed,) = json.loads((tmp_path / "step.json").read_text())["steps"].values()
    assert [entry["case"]["prompt"] for entry in timed] == [8]
    assert "a request may have 15 tokens here: decode 3 rows at 10" in capsys.readouterr().out
    assert bench("step", "--quick", *limits, "--max-context", "4") == 2
    assert "every case is longer than the 4 tokens" in capsys.readouterr().err


def test_synthetic_plans_own_their_blocks_and_advance():
    case = Case(decodes=2, context=10, prompt=6)
    groups = CacheGroups(block_size=4, max_context=64, n_rows=4, most_tokens=16)
    first, third = (step.make_plan(case, index, 5, groups, 64, 100) for index in (0, 2))
    assert [tuple(chunk) for chunk in first.chunks] == [(0, 10, 1, True), (1, 10, 1, True), (2, 0, 6, True)]
    assert [tuple(chunk) for chunk in third.chunks] == [(0, 12, 1, True), (1, 12, 1, True), (2, 0, 6, True)]
    assert third.admissions == ()
    blocks = [admission.blocks for admission in first.admissions]
    assert blocks == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [len(admission.tokens) for admission in first.admissions] == [11, 11, 6]
    assert first.bucket == first.num_tokens == 8
    assert case.slots(5) >= 4 * 10


@pytest.mark.bench
def test_completions_for_the_check_of_peers(tmp_path):
    checkpoint = checkpoints.checkpoint("tiny", tmp_path)
    assert checkpoints.checkpoint("tiny", tmp_path) == checkpoint  # written once
    prompts = [[1, 2, 3, 4, 5, 6, 7, index] for index in range(3)]
    config = dataclasses.replace(CONFIG, scoring=True)
    answers = jobs.complete(checkpoint, prompts, 3, config, lambda what, done, total: None)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["tokens"][:8] == prompt
        assert (len(answer["tokens"]), len(answer["logprobs"]), len(answer["gaps"])) == (11, 10, 3)
        assert all(logprob < 0 for logprob in answer["logprobs"])
        assert all(gap >= 0 for gap in answer["gaps"])


@pytest.mark.bench
def test_host_time_at_several_loads():
    with progress_bars() as progress:
        few, many = host.measure(3, [0, 30], 6, CONFIG, progress)
    assert (few.waiting, many.waiting) == (0, 30)
    for result in (few, many):
        assert result.stats.iterations == 6
        assert result.median == result.stats.host_ms["host"].p50 > 0


def test_schedules_are_compared_by_the_same_costs():
    assert offline.mean_costs([{8: 1.0, 16: 4.0}, {8: 3.0, 32: 5.0}]) == {8: 2.0, 16: 4.0, 32: 5.0}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        checkout_main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out
