"""`jaxserve generate` as a person meets it: files, chats, what is wrong with them, full disks and Ctrl-C."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from server.commands import cli, generate
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine, byte_tokenizer

ROOT = Path(__file__).parents[3]


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
    assert "not JSON" in found[1]["error"]
    assert "line 2: not JSON" in captured.err


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
        ("--messages [", "is not a chat: "),
        ("--messages []", "is not a chat: messages: is empty"),
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
        ("--prompt ab --no-generation-prompt", "add_generation_prompt: is only for messages"),
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
        ends = time.monotonic() + WAIT_SECONDS
        while not target.read_bytes().endswith(b"\n") and time.monotonic() < ends:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
        engine.release()  # what comes just before Python waits it sees after the wait: with the next event

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert cli.main(["generate", "--input", str(source), "--output", str(target)]) == 130
    thread.join()
    line, rest = target.read_text().split("\n")
    assert (json.loads(line)["text"], rest) == ("ab", "")


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
