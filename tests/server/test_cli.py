"""The commands as a person meets them: help, mistakes, files, signals."""

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import httpx2 as httpx
import pytest

from jaxserve.chat_template import ChatTemplate
from jaxserve.tokenizer import Tokenizer
from server import cli, client, generate, start
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine, byte_tokenizer

ROOT = Path(__file__).parents[2]


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


def test_help_and_version_need_no_jax() -> None:
    code = (
        "import sys; from server import cli\n"
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
    args = cli.parser(with_bench=True).parse_args([*command, *given.split()])
    config = cli.flags.engine_config(args)
    assert (config.dtype, config.max_rows, config.slots, config.block_size) == ("bfloat16", 3, 640, 16)
    assert config.kv_cache_dtype == "int8"
    assert (config.slot_policy, config.buckets, config.token_budget) == ("reserve", (8, 64), 32)
    assert (config.prefix_cache, config.max_context, config.scheduler) == (False, 100, "request")
    assert (config.max_queued_requests, config.max_queued_tokens) == (5, 600)
    assert (config.tensor, config.stages, config.replicas) == (4, 2, 3)
    assert (config.target_tpot, config.in_flight) == (0.08, 2)
    assert (config.speculate, config.speculate_tokens) == ("ngram", 3)
    assert (config.scoring, config.attention, config.compilation_cache) == (False, "xla", None)


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["bench", "offline"]])
def test_deterministic_takes_the_slot_policy_it_needs(command: list[str]) -> None:
    parser = cli.parser(with_bench=True)
    config = cli.flags.engine_config(parser.parse_args([*command, "--deterministic"]))
    assert (config.deterministic, config.slot_policy) == (True, "reserve")
    config = cli.flags.engine_config(parser.parse_args(command))
    assert (config.deterministic, config.slot_policy) == (False, "grow")
    with pytest.raises(ValueError, match="slot_policy is grow; with deterministic it must be reserve"):
        cli.flags.engine_config(parser.parse_args([*command, "--deterministic", "--slot-policy", "grow"]))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("serve --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("generate --prompt a --model /no/such/dir", "--model /no/such/dir is not a directory"),
        ("serve --max-rows 0", "max_rows is 0"),
        ("serve --buckets 32,16", "buckets are (32, 16)"),
        ("serve --in-flight 3", "in_flight is 3; more than stages + 1 (2)"),
        ("serve --port 70000", "--port 70000"),
        ("serve --http-port 70000", "--http-port 70000"),
        ("serve --metrics-port 70000", "--metrics-port 70000"),
        ("serve --stall-seconds 0", "--stall-seconds 0 is no time above 0"),
        ("serve --host not.a.host.invalid", "cannot listen on not.a.host.invalid:50051"),
        ("serve --host not..one", "cannot listen on not..one:50051"),
        (
            "size --trace t --model gpt3-13b --topology h100:1 --plot /proc/no/x.png",
            "cannot write --plot /proc/no/x.png",
        ),
        ("size --trace t --model gpt3-13b --topology h100:1 --plot x", "--plot x must end in .png, .svg or .pdf"),
        ("simulate --paper orca --plot /proc/no/x.svg", "cannot write --plot /proc/no/x.svg"),
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
        "",
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
    assert "--http-port: 'on' is neither off nor a port" in capsys.readouterr().err


def test_a_port_in_use_is_told_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["serve", "--port", str(other.getsockname()[1])]) == 2
    assert "Address already in use" in capfd.readouterr().err


# generate


@pytest.fixture
def engine(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that `generate` gets instead of loading one."""
    it = FakeEngine(tokenizer=tokenizer)
    monkeypatch.setattr(generate, "load_engine", lambda _: it)
    return it


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_generate_serves_a_file(
    engine: FakeEngine, lines: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = lines({"id": "a", "prompt": "ab"}, {"id": "b", "prompt": "cd", "max_tokens": 3}), tmp_path / "out"
    target.write_text("results of an earlier run\n")
    assert cli.main(["generate", "--input", str(source), "--output", str(target), "--max-tokens", "5"]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["id"], line["text"]) for line in found] == [("a", "ababa"), ("b", "cdc")]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "2 lines (0 with errors), 8 tokens" in captured.err


def test_generate_serves_standard_input_to_standard_output(
    engine: FakeEngine, lines: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lines({"prompt": "ab", "max_tokens": 2}).open() as source:
        before = os.dup(0)
        os.dup2(source.fileno(), 0)
        try:
            assert cli.main(["generate", "--input", "-"]) == 0
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert json.loads(capfd.readouterr().out)["text"] == "ab"


def test_generate_leaves_what_standard_output_holds_already(
    engine: FakeEngine, lines: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    print("results of an earlier run", flush=True)  # as of `>>` into a file, which captured output is
    assert cli.main(["generate", "--input", str(lines({"prompt": "ab", "max_tokens": 2}))]) == 0
    assert capfd.readouterr().out.startswith('results of an earlier run\n{"id": 1, ')


def test_generate_goes_on_after_a_bad_line_and_says_so(
    engine: FakeEngine, lines: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    source = lines({"prompt": "ab", "max_tokens": 2}, "not json", {"prompt": "cd", "max_tokens": 2})
    assert cli.main(["generate", "--input", str(source)]) == 1
    captured = capfd.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [line.get("text") for line in found] == ["ab", None, "cd"]
    assert "no JSON" in found[1]["error"]
    assert "line 2: no JSON" in captured.err


def test_generate_refuses_a_prompt_it_cannot_serve(engine: FakeEngine, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "é!", "--max-tokens", "7", "--stop-token-ids", "300", "--seed", "4"]) == 2
    assert "stop_token_ids" in capfd.readouterr().err


def test_generate_prints_the_text_of_a_prompt(engine: FakeEngine, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "é!", "--max-tokens", "7", "--seed", "4"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "é!é!\ufffd\n"
    assert "length after 7 tokens (prompt 3, seed 4)" in captured.err


def test_generate_prints_several_answers(engine: FakeEngine, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "ab", "--max-tokens", "3", "--n", "2", "--best-of", "3"]) == 0
    drawn = capfd.readouterr()
    assert drawn.out == "aba\naba\n"
    assert drawn.err.count("length after 3 tokens (prompt 2, seed ") == 2


def test_generate_prints_the_likeliest_answers(engine: FakeEngine, capfd: pytest.CaptureFixture[str]) -> None:
    search = ["--n", "2", "--best-of", "4", "--use-beam-search"]
    assert cli.main(["generate", "--prompt", "ab", "--max-tokens", "3", *search]) == 0
    assert capfd.readouterr().out == "\0\0\0\n\0\0\1\n"  # what the fake says is the likeliest


@pytest.mark.parametrize(("flags", "answers"), [("", 1), ("--n 2", 2), ("--output out.jsonl", 0)])
def test_generate_answers_a_chat(
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: str,
    answers: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    engine.tokenizer = byte_tokenizer(chat_template=ChatTemplate(template, {}))
    Path("chat.json").write_text('[{"role": "user", "content": "ab"}]', encoding="utf-8")
    command = "generate --messages @chat.json --no-generation-prompt --max-tokens 3"
    assert cli.main([*command.split(), *flags.split()]) == 0
    assert capfd.readouterr().out == "aba\n" * answers
    if not answers:
        assert json.loads(Path("out.jsonl").read_text())["text"] == "aba"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('--prompt ab --messages [{"role":"user","content":"a"}]', "not allowed with argument --prompt"),
        ("--messages [", "is no chat: "),
        ("--messages []", "is no chat: messages: is empty"),
        ("--messages @/no/such/file", "/no/such/file cannot be read"),
    ],
)
def test_a_chat_that_is_none_is_refused(wrong: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "client"):
        words = wrong.split()
        if command == "client" and words[0] == "--prompt":
            words = [*words[2:], words[1]]
            told = "not allowed with argument --messages"
        with pytest.raises(SystemExit):
            cli.main([command, *words])
        assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--prompt ab --n 0", "n: is 0"),
        ("--prompt ab --n 2 --best-of 1", "best_of: is 1"),
        ("--prompt ab --no-generation-prompt", "add_generation_prompt: is for messages"),
        ("--input in.jsonl --no-generation-prompt", "--no-generation-prompt is for --messages"),
        ("--prompt ab --length-penalty 2", "length_penalty: is for beam search"),
        ("--prompt ab --use-beam-search --stop c", "stop: is not served with use_beam_search"),
        ("--input in.jsonl --best-of 2", "--best-of is for one prompt, without --input and --output"),
        ("--prompt ab --output out.jsonl --n 2", "--n is for one prompt, without --input and --output"),
    ],
)
def test_generate_says_what_is_wrong_with_one_prompt(
    engine: FakeEngine, wrong: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *wrong.split()]) == 2
    assert told in capfd.readouterr().err


def test_generate_writes_one_prompt_to_a_file(engine: FakeEngine, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert cli.main(["generate", "--prompt", "ab", "--max-tokens", "3", "--output", str(target)]) == 0
    assert json.loads(target.read_text())["text"] == "aba"


def test_output_over_the_input_is_refused(
    engine: FakeEngine, lines: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    source = lines({"prompt": "ab"})
    assert cli.main(["generate", "--input", str(source), "--output", str(source)]) == 2
    assert source.read_text() == '{"prompt": "ab"}\n'


def test_earlier_results_outlive_a_failed_start(tmp_path: Path, lines: Callable[..., Path]) -> None:
    target = tmp_path / "out"
    target.write_text("results\n")
    command = ["generate", "--input", str(lines({"prompt": "a"})), "--output", str(target), "--max-rows", "0"]
    assert cli.main(command) == 2
    assert target.read_text() == "results\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(engine: FakeEngine, lines: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    source = lines({"prompt": "ab", "max_tokens": 2})
    assert cli.main(["generate", "--input", str(source), "--output", "/dev/full"]) == 2
    assert "error: after 0 lines: No space left on device" in capfd.readouterr().err


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It interrupts, whoever has started the tests: what a shell runs in the background is made to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_whole_lines(engine: FakeEngine, lines: Callable[..., Path], tmp_path: Path) -> None:
    source, target = lines({"prompt": "ab", "max_tokens": 2}, {"prompt": "cd", "max_tokens": 2000}), tmp_path / "out"
    engine.held = True

    def interrupt() -> None:
        engine.wait_until(lambda: engine.load().waiting == 2)
        engine.step(4)
        while not target.read_bytes().endswith(b"\n"):
            threading.Event().wait(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert cli.main(["generate", "--input", str(source), "--output", str(target)]) == 130
    thread.join()
    (line,) = target.read_text().splitlines()
    assert json.loads(line)["text"] == "ab"


@pytest.mark.usefixtures("ctrl_c")
def test_a_line_is_written_whole_though_interrupted() -> None:
    reader, writer = os.pipe()
    got = bytearray()

    def read() -> None:
        got.extend(os.read(reader, 10))
        os.kill(os.getpid(), signal.SIGINT)
        while piece := os.read(reader, 2**16):
            got.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        generate._write_line(writer, b"x" * 10**6)  # far more than a pipe holds
    os.close(writer)
    thread.join(WAIT_SECONDS)
    os.close(reader)
    assert bytes(got) == b"x" * 10**6 + b"\n"


# client


def test_a_client_whose_reader_has_gone_says_nothing_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")  # as `print` does

    monkeypatch.setattr(client, "stream", answer)
    with pytest.raises(BrokenPipeError):  # which `main` makes 141 of
        client.run(cli.parser(with_bench=False).parse_args(["client", "a"]))


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


def test_serve_greets_with_a_command_that_works_and_ends_with_code_0() -> None:
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
def test_most_of_a_gpu_is_set_aside_unless_the_user_says_how_much(monkeypatch, chosen):
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
