"""The commands as a person meets them: help, mistakes, signals."""

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import httpx2 as httpx
import pytest

from jaxserve.fields import Param
from jaxserve.sampling_params import SAMPLING_PARAMS
from server.commands import cli, client, flags, other_names, request_flags, serve
from server.commands import engine_start as start
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.fake_engine import WAIT_SECONDS

ROOT = Path(__file__).parents[3]


def python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


# Help and mistakes


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([], "jaxserve generate --model DIR --input in.jsonl --output out.jsonl"),
        (["serve"], "jaxserve serve --model DIR --host 0.0.0.0"),
        (["generate"], "jaxserve generate --model DIR --input in.jsonl --output out.jsonl"),
        (["client"], 'jaxserve client "It was a" --max-tokens 50'),
        (["compile"], "jaxserve compile --model DIR --max-rows 32"),
        (["convert"], "jaxserve convert DIR OUT"),
        (["bench"], "offline"),
    ],
)
def test_help_shows_examples(command: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "jaxserve serve  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("srve", "unknown command srve (did you mean serve?); there are serve, generate"),
        ("chat", "unknown command chat (did you mean client?)"),
        ("xyzzy", "unknown command xyzzy; there are"),
        ("serve --max-row 3", "unknown argument --max-row (did you mean --max-rows?)"),
        ("serve --max-model-len=3", "unknown argument --max-model-len=3 (did you mean --max-context?)"),
        ("serve -tp 2", "unknown argument -tp (did you mean --tensor?)"),
        ("serve --num-shards 2", "unknown argument --num-shards (did you mean --tensor?)"),
        ("serve org/name", "unknown argument org/name (did you mean --model?)"),
        ("serve --xyzzy", "unknown argument --xyzzy\n"),
        ("client a --hostname b", "unknown argument --hostname\n"),
        ("generate --prompt a --num-shard 2", "unknown argument --num-shard (did you mean --tensor?)"),
    ],
)
def test_what_is_unknown_gets_a_hint(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_hints_lead_to_what_there_is() -> None:
    (commands,) = (action.choices for action in cli.parser()._actions if action.choices)
    assert isinstance(commands, dict)
    flags = {flag for action in commands["serve"]._actions for flag in action.option_strings}
    assert set(other_names.COMMANDS.values()) <= commands.keys()
    assert set(other_names.FLAGS.values()) <= flags
    assert not flags & other_names.FLAGS.keys()


def test_help_of_serve_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    titles = re.findall(r"^(\w+)(?: \(.*\))?:$", out, re.MULTILINE)
    assert titles == ["model", "engine", "devices", "server", "security", "hosts", "settings"]
    assert out.startswith("usage: jaxserve serve [--model MODEL] [FLAGS]\n")
    assert re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)[0] == "--model"


def test_help_and_version_need_no_jax() -> None:
    code = (
        "import sys; from server.commands import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: assert not {'jax', 'matplotlib'} & set(sys.modules)"
    )
    for flag, shown in (("--help", "usage: jaxserve"), ("--version", "jaxserve 0.")):
        process = python("-c", code, flag)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert out.startswith(shown)


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["bench", "offline"]])
def test_engine_flags_are_the_same_for_every_command(command: list[str]) -> None:
    given = (
        "--dtype bfloat16 --kv-cache-dtype int8 --max-rows 3 --slots 640 --block-size 16 --slot-policy reserve "
        "--buckets 8,64 --token-budget 32 --target-tpot 80ms --prefix-cache off --max-context 100 "
        "--max-queued-requests 5 --max-queued-tokens 600 --scheduler request --no-scoring --attention xla "
        "--tensor 4 --stages 2 --replicas 3 --in-flight 2 --compilation-cache off "
        "--speculate ngram --speculate-tokens 3"
    )
    args = cli.parser(benchmark="offline").parse_args([*command, *given.split()])
    config = flags.engine_config(args)
    assert (config.dtype, config.max_rows, config.slots, config.block_size) == ("bfloat16", 3, 640, 16)
    assert config.kv_cache_dtype == "int8"
    assert (config.slot_policy, config.buckets, config.token_budget) == ("reserve", (8, 64), 32)
    assert (config.prefix_cache, config.max_context, config.scheduler) == (False, 100, "request")
    assert (config.max_queued_requests, config.max_queued_tokens) == (5, 600)
    assert (config.tensor, config.stages, config.replicas) == (4, 2, 3)
    assert (config.target_tpot, config.in_flight) == (0.08, 2)
    assert (config.speculate, config.speculate_tokens) == ("ngram", 3)
    assert (config.scoring, config.attention, config.compilation_cache) == (False, "xla", None)


@pytest.mark.parametrize("param", SAMPLING_PARAMS.values(), ids=lambda param: param.name)
def test_sampling_flag(param: Param) -> None:
    values = {int: ("3", 3), float: ("0.5", 0.5), bool: (None, True), tuple[str, ...]: ("x", ["x"])}
    values |= {tuple[int, ...]: ("1,2", (1, 2)), tuple[tuple[int, float], ...]: ('{"5": 1.5}', {"5": 1.5})}
    flag = "--json-object" if param.name == "grammar" else "--" + param.name.replace("_", "-")
    text, value = values.get(param.kind, (None, {"type": "json_object"}))
    args = cli.parser().parse_args(["generate", "--prompt", "a", flag, *([text] if text else [])])
    assert request_flags.sampling(args) == {param.name: value}


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["bench", "offline"]])
def test_deterministic_takes_the_slot_policy_it_needs(command: list[str]) -> None:
    parser = cli.parser(benchmark="offline")
    config = flags.engine_config(parser.parse_args([*command, "--deterministic"]))
    assert (config.deterministic, config.slot_policy) == (True, "reserve")
    config = flags.engine_config(parser.parse_args(command))
    assert (config.deterministic, config.slot_policy) == (False, "grow")
    with pytest.raises(ValueError, match="slot_policy is grow; with deterministic it must be reserve"):
        flags.engine_config(parser.parse_args([*command, "--deterministic", "--slot-policy", "grow"]))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("serve --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("generate --prompt a --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("serve --max-rows 0", "max_rows is 0"),
        ("serve --buckets 32,16", "buckets are (32, 16)"),
        ("serve --in-flight 3", "in_flight is 3; more than stages + 1 (2)"),
        ("serve --port 70000", "--port is 70000; it must be a whole number from 0 to 65535"),
        ("serve --http-port 70000", "--http-port is 70000"),
        ("serve --metrics-port 70000", "--metrics-port is 70000"),
        ("serve --stall-seconds 0", "--stall-seconds is 0.0; it must be above 0"),
        ("serve --host not.a.host.invalid", "cannot listen on not.a.host.invalid:50051"),
        ("serve --host not..one", "cannot listen on not..one:50051"),
        (
            "size --trace t --model gpt3-13b --topology h100:1 --plot /proc/no/x.png",
            "cannot write --plot /proc/no/x.png",
        ),
        ("size --trace t --model gpt3-13b --topology h100:1 --plot x", "--plot x must end in .png, .svg or .pdf"),
        (
            "simulate --rate 1 --plot /proc/no/x.svg",
            "cannot write --plot /proc/no/x.svg",
        ),
        ("plan --model gpt3-13b --topology h100:1 --html /proc/no/x", "cannot write --html /proc/no/x"),
        ("serve --profile /proc/no", "cannot write to --profile /proc/no: No such file or directory"),
        ("generate --prompt a --profile /proc/no", "cannot write to --profile /proc/no: No such file or directory"),
        ("generate --input /no/such/file", "cannot open /no/such/file: No such file or directory"),
        ("generate --prompt a --output /no/such/file", "cannot open /no/such/file: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve: error: ")
    assert told in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "serve --buckets x",
        "generate",
        "generate --prompt a --input b",
        "generate --prompt a --top-p x",
        "compile --profile nobody-reads-it",
        "simulate --rate 1 --seed -1",
    ],
)
def test_argparse_refuses_what_it_can_see(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2


def test_a_port_that_is_none_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--http-port", "on"])
    assert "--http-port: 'on' is neither off nor a whole number" in capsys.readouterr().err


# client


def test_a_client_whose_reader_has_gone_says_nothing_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # as `print` does

    monkeypatch.setattr(client, "_opened", answer)
    with pytest.raises(BrokenPipeError):  # which `main` makes 141 of
        client.run(cli.parser().parse_args(["client", "a"]))


# serve, in a process of its own


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A served fake engine; yields (process, its address, the client command it shows)."""
    process = python("-m", "tests.server.serve_fake", "--port", "0", "--http-port", "0", *flags)
    try:
        assert process.stderr is not None
        told = ""
        while "client" not in told:
            line = process.stderr.readline()
            assert line, f"the server ended: {told}"
            told += line
        address = re.search(r"ready on (\S+) ", told)
        assert address is not None
        yield process, address[1], told.strip().splitlines()[-1].strip()
    finally:
        process.kill()
        process.communicate()


def test_serve_shows_a_client_command_that_works() -> None:
    with serving() as (process, address, command):
        assert address in command
        shown = subprocess.run(command + " --max-tokens 12", shell=True, cwd=ROOT, capture_output=True, timeout=60)
        assert shown.stdout.decode() == "It was aIt w\n"
        assert b"length after 12 tokens (prompt 8" in shown.stderr
        several = subprocess.run(
            command + " --max-tokens 3 --n 2", shell=True, cwd=ROOT, capture_output=True, timeout=60
        )
        assert several.stdout.decode() == "It \nIt \n"
        assert several.stderr.count(b"length after 3 tokens (prompt 8") == 2
        refused = subprocess.run(command + " --top-p 3", shell=True, cwd=ROOT, capture_output=True, timeout=60)
        assert refused.returncode == 2
        assert refused.stderr.decode().startswith(f"jaxserve: error: {address} answered INVALID_ARGUMENT: top_p")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0


def test_serve_shows_a_command_for_http_that_works() -> None:
    with serving() as (process, _, _):
        assert process.stderr is not None
        while not (shown := process.stderr.readline().strip()).startswith("curl "):
            assert process.poll() is None
        _, url, _, header, _, body = shlex.split(shown)
        name, _, value = header.partition(": ")
        answer = httpx.post(url, content=body, headers={name: value}, timeout=WAIT_SECONDS)
        assert answer.json()["choices"][0]["text"] == "It was aIt was a"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
    with serving("--http-port", "off") as (process, _, _):
        process.send_signal(signal.SIGTERM)
        assert "HTTP" not in process.communicate(timeout=WAIT_SECONDS)[1]


def test_a_checkpoint_without_a_tokenizer_is_told_with_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = serve.from_flags(cli.parser().parse_args(["serve"]))
    serve._greet(chosen, 1, 2, has_tokenizer=False)
    told = capsys.readouterr().err
    assert "This checkpoint has no tokenizer: prompts and answers are token ids." in told
    assert '"prompt": [1, 2, 3], "return_token_ids": true' in told
    assert " client " not in told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_engine_starts(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "orders.json").write_text(json.dumps({"waits_for": str(tmp_path / "never")}))
    orders = str(tmp_path / "orders.json")
    process = python("-m", "tests.server.serve_fake", "--orders", orders, "--port", "0", "--http-port", "off")
    try:
        assert process.stderr is not None
        while "loading" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(WAIT_SECONDS) == code
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_ends_at_once() -> None:
    with serving("--held") as (process, address, _), grpc.insecure_channel(address) as channel:
        stub: Any = InferenceStub(channel)
        call = stub.GenerateStream(GenerateRequest(prompt="abc"))
        while stub.GetLoad(GetLoadRequest()).waiting == 0:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "draining 1 requests" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            next(call)


@pytest.mark.parametrize("chosen", [None, "0.5"])
def test_share_of_gpu_memory(monkeypatch, chosen):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if chosen:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", chosen)
    seen = []

    def load(*_, **__):
        seen.append(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
        raise ValueError("seen enough")

    monkeypatch.setattr("jaxserve.engine.Engine.from_checkpoint", load)
    assert cli.main(["generate", "--prompt", "a"]) == 2
    assert seen == [chosen or "0.93"]


def test_a_run_is_profiled_where_that_is_asked_for(tmp_path: Path) -> None:
    with start.profiling(tmp_path / "here"):
        pass
    assert list((tmp_path / "here").rglob("*.xplane.pb"))
    with start.profiling(None):
        pass
