"""`jaxserve serve` in a process of its own: what it shows, and signals."""

import contextlib
import functools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from server.commands import cli, serve
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.fake_engine import WAIT_SECONDS

ROOT = Path(__file__).parents[3]


def python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
    run = functools.partial(subprocess.run, shell=True, cwd=ROOT, capture_output=True, timeout=60)
    with serving() as (process, address, command):
        assert address in command
        shown = run(command + " --max-tokens 12")
        assert shown.stdout.decode() == "It was aIt w\n"
        assert b"length after 12 tokens (prompt 8" in shown.stderr
        several = run(command + " --max-tokens 3 --n 2")
        assert several.stdout.decode() == "It \nIt \n"
        assert several.stderr.count(b"length after 3 tokens (prompt 8") == 2
        refused = run(command + " --top-p 3")
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
