"""Two real processes, a front and its engine: who outlives whom, and the codes they end with."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from server.engine_process import exit_codes
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.engine_process.test_supervisor import LONG, is_gone
from tests.server.fake_engine import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
TERM = 128 + signal.SIGTERM


def await_gone(pid: int) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not is_gone(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.01)


def child_of(pid: int) -> int:
    """The one child of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    (child,) = found
    return child


def command(orders: Path) -> list[str]:
    """Of a front with a fake engine behind it."""
    program = [sys.executable, "-m", "tests.server.serve_fake", "--orders", str(orders)]
    return [*program, "--port", "0", "--http-port", "off"]


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **orders: Any) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A front with a fake engine behind it; yields (process, its address, the engine's process)."""
    path = folder / "orders.json"
    path.write_text(json.dumps(orders))
    process = subprocess.Popen(
        [*command(path), *flags], cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        told = ""
        while (address := re.search(r"ready on (\S+) ", told)) is None:
            line = process.stderr.readline()
            assert line, f"the server ended: {told}"
            told += line
        yield process, address[1], child_of(process.pid)
    finally:
        process.kill()
        process.communicate()


def begin(address: str) -> Any:
    """A call that goes on for ever, once it has its first token."""
    channel = grpc.insecure_channel(address)
    stub: Any = InferenceStub(channel)
    call = stub.GenerateStream(GenerateRequest(prompt="abc", max_tokens=LONG))
    next(call)
    return call


def test_a_signal_drains_and_leaves_no_process(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address, engine):
        with grpc.insecure_channel(address) as channel:
            stub: Any = InferenceStub(channel)
            assert stub.Generate(GenerateRequest(prompt="ab", max_tokens=4)).text == "abab"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        await_gone(engine)


def test_a_second_signal_ends_both_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address, engine):
        call = begin(address)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "draining 1 requests" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == TERM
        await_gone(engine)
        with pytest.raises(grpc.RpcError):
            list(call)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_front_takes_its_engine_along(tmp_path: Path, stopped: bool) -> None:
    """Even one whose threads can look at nothing."""
    with serving(tmp_path) as (process, address, engine):
        begin(address)
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        process.kill()
        await_gone(engine)


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    path.write_text(json.dumps({"waits_for": str(tmp_path / "never")}))
    process = subprocess.Popen(command(path), cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while "loading" not in process.stderr.readline():
        assert process.poll() is None
    engine = child_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == 0
    await_gone(engine)
    process.communicate()


def test_exit_codes_of_the_front(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-seconds", "0") as (process, address, engine):
        call = begin(address)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(grpc.RpcError, match="SIGKILL"):
            list(call)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == exit_codes.ENGINE_GONE
    (tmp_path / "orders.json").write_text(json.dumps({"refuses": "no such thing"}))
    refused = subprocess.run(command(tmp_path / "orders.json"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == exit_codes.USER_ERROR
    assert refused.stderr.splitlines()[-1] == "jaxserve: error: no such thing"


def test_a_supervised_engine_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--supervise") as (process, address, engine):
        os.kill(engine, signal.SIGKILL)
        await_gone(engine)
        with grpc.insecure_channel(address) as channel:
            stub: Any = InferenceStub(channel)
            whole = stub.Generate(GenerateRequest(prompt="ab", max_tokens=4), timeout=WAIT_SECONDS)
            assert whole.text == "abab"
            assert stub.GetLoad(GetLoadRequest()).iterations >= 1
        second = child_of(process.pid)
        assert second != engine
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        await_gone(second)


def test_exit_codes_in_words() -> None:
    assert exit_codes.describe(-9) == "was killed by signal 9 (SIGKILL)"
    assert exit_codes.describe(-250) == "was killed by signal 250"
    assert exit_codes.describe(74) == "found its front gone (exit code 74)"
    assert exit_codes.describe(70) == "ended with exit code 70"


def test_the_front_needs_no_jax() -> None:
    code = (
        "import sys\nimport server.lifecycle, server.app, server.commands.serve\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
