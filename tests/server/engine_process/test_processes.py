"""Two real processes, a front and its engine: who outlives whom, what they say, and the codes they end with."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.config import EngineConfig
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.engine_process import exit_codes, frames, messages
from server.engine_process import messages_pb2 as engine_pb
from server.engine_process import outbox as outbox_module
from server.engine_process.frames import Splitter
from server.engine_process.job import EngineJob
from server.engine_process.outbox import Outbox
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.engine_process.test_supervisor import LONG, is_gone
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine, byte_tokenizer

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


# The engine's process alone


class Engine:
    """A fake engine's process, and the front's end of its socket."""

    def __init__(self, folder: Path, **orders: Any) -> None:
        path = folder / "orders.json"
        path.write_text(json.dumps(orders))
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(WAIT_SECONDS)
        command = [sys.executable, "-m", "tests.server.fake_engine_process", str(path), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
            )
        self._splitter, self._frames = Splitter(), iter(())

    def start(self) -> None:
        job = EngineJob.of("fake", EngineConfig(max_rows=4))
        self.channel.sendall(messages.to_engine(start=messages.to_json(EngineJob, job)))
        while self.read()[0] != "ready":
            pass

    def read(self) -> tuple[str, engine_pb.FromEngine]:
        while (found := next(self._frames, None)) is None:
            data = self.channel.recv(2**16)
            assert data, "the engine process has closed its socket"
            self._frames = self._splitter.feed(data)
        return messages.parse(engine_pb.FromEngine, found)

    def submit(self, name: str, max_tokens: int) -> None:
        request = Request(request_id=name, prompt=(97, 98), sampling=SamplingParams(max_tokens=max_tokens))
        self.channel.sendall(messages.to_engine(submit=messages.encode_request(request)))

    def events(self) -> list[TokenEvent]:
        name, message = self.read()
        assert name == "iterations"
        return messages.decode_iterations(message.iterations).events


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    alive: list[Engine] = []

    def make(**orders: Any) -> Engine:
        alive.append(Engine(tmp_path, **orders))
        return alive[-1]

    yield make
    for each in alive:
        each.process.kill()
        each.process.communicate()
        each.channel.close()


def test_a_whole_iteration_is_one_message(engine: Any) -> None:
    it = engine(pause=0.01)
    it.start()
    for name in "abc":
        it.submit(name, 20)
    got: dict[str, int] = dict.fromkeys("abc", 0)
    together = 0
    while min(got.values()) < 20:
        events = it.events()
        together += len({event.request_id for event in events}) == 3
        for event in events:
            got[event.request_id] += len(event.token_ids)
    assert got == dict.fromkeys("abc", 20)
    assert together >= 5  # not one message a token


def test_stop_message(engine: Any) -> None:
    it = engine()
    it.start()
    it.submit("a", LONG)
    while not it.events():
        pass
    it.channel.sendall(messages.to_engine(stop=engine_pb.Empty()))
    assert it.process.wait(WAIT_SECONDS) == exit_codes.ENDED


def test_ends_with_its_front_but_not_by_signal(engine: Any) -> None:
    it = engine()
    it.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        it.process.send_signal(number)
    it.submit("a", 3)
    while not any(event.finish_reason for event in it.events()):
        pass
    it.channel.close()
    assert it.process.wait(WAIT_SECONDS) == exit_codes.FRONT_GONE


def test_ends_with_its_front_while_it_loads(engine: Any, tmp_path: Path) -> None:
    """Nobody reads the socket then, and the process that started it is alive."""
    it = engine(waits_for=str(tmp_path / "never"))
    job = EngineJob.of("fake", EngineConfig())
    it.channel.sendall(messages.to_engine(start=messages.to_json(EngineJob, job)))
    assert it.read()[0] == "progress"
    it.channel.close()
    assert it.process.wait(WAIT_SECONDS) == exit_codes.FRONT_GONE


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        messages.to_engine(submit=engine_pb.Request(request_id="a")),
        messages.to_engine(start=b"{}"),
        frames.frame(b""),
        frames.frame(b"hello"),
    ],
)
def test_garbage_ends_the_process(engine: Any, garbage: bytes) -> None:
    it = engine()
    it.start()
    it.channel.sendall(garbage)
    assert it.process.wait(WAIT_SECONDS) == exit_codes.BAD_FRAME
    assert "the front sent something that is not a message" in it.process.stderr.read()


def test_no_other_process_can_reach_the_socket(engine: Any) -> None:
    """It has no name: there is no path that a stranger could connect to, and nobody listens."""
    it = engine()
    it.start()
    inodes = {
        os.readlink(path).removeprefix("socket:[").removesuffix("]")
        for path in Path(f"/proc/{it.process.pid}/fd").iterdir()
        if os.readlink(path).startswith("socket:")
    }
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [line for line in lines if line[6] in inodes]
    assert ours
    assert all(len(line) == 7 for line in ours)  # an eighth would be the path


def test_a_front_that_reads_nothing_is_given_up(engine: Any) -> None:
    it = engine(pause=0.0, max_context=10**8)
    it.start()
    for name in "abcd":
        it.submit(name, 10**7)
    assert it.process.wait(3 * WAIT_SECONDS) == exit_codes.FRONT_GONE
    assert "the front has read nothing" in it.process.stderr.read()


@pytest.mark.parametrize("max_body", [frames.MAX_BODY, 4096])
def test_engine_never_waits_for_the_front(monkeypatch: pytest.MonkeyPatch, max_body: int) -> None:
    """However much there is to be told in the end: one message may hold it or not."""
    monkeypatch.setattr(frames, "MAX_BODY", max_body)
    monkeypatch.setattr(outbox_module, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    ours, theirs = socket.socketpair()
    engine = FakeEngine(tokenizer=byte_tokenizer(), max_context=10**6)
    with ours, theirs, engine:
        outbox = Outbox(theirs, engine)
        outbox.start()
        engine.submit(Request(request_id="a", prompt=(97,), sampling=SamplingParams(max_tokens=3000)), outbox.put)
        engine.wait_until(lambda: engine.iterations >= 3000)  # none of which was read: the socket was full long before
        reader = _reading(ours)
        outbox.let_engine_end()
        outbox.close()
        theirs.close()
        tokens = [token for events in iter(reader.get, None) for event in events for token in event.token_ids]
    assert tokens == [97] * 3000


def test_too_large_an_event_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BODY", 4096)
    monkeypatch.setattr(outbox_module, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    ours, theirs = socket.socketpair()
    engine = FakeEngine(tokenizer=byte_tokenizer(), max_context=10**6)
    with ours, theirs, engine:
        outbox = Outbox(theirs, engine)
        alike = ((-1.0, None),)
        events = [TokenEvent("a", (1,), (0.5,)), TokenEvent("b", prompt_logprobs=alike * 2000)]
        outbox._held.put([*events, TokenEvent("c", prompt_logprobs=alike * 200), TokenEvent("d", (2,), (0.5,))])
        reader = _reading(ours)
        outbox.start()
        outbox.let_engine_end()
        outbox.close()
        theirs.close()
        told = [event for events in iter(reader.get, None) for event in events]
    assert [event.request_id for event in told] == ["a", "b", "c", "d"]
    assert [len(event.prompt_logprobs) for event in told] == [0, 0, 200, 0]
    assert [event.finish_reason for event in told] == [None, FinishReason.ERROR, None, None]
    assert re.search(r"is \d+ bytes, more than the 4096 that one message holds; ask for fewer", told[1].error or "")


def _reading(channel: socket.socket) -> queue.SimpleQueue[Any]:
    """Events that come, then None."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        splitter = Splitter()
        while data := channel.recv(2**16):
            for body in splitter.feed(data):
                _, message = messages.parse(engine_pb.FromEngine, body)
                found.put(messages.decode_iterations(message.iterations).events)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


# Both


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **orders: Any) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A front with a fake engine behind it; yields (process, its address, the engine's process)."""
    path = folder / "orders.json"
    path.write_text(json.dumps(orders))
    command = [sys.executable, "-m", "tests.server.serve_fake", "--orders", str(path), "--port", "0", *flags]
    process = subprocess.Popen(
        [*command, "--http-port", "off"], cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
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
    command = [sys.executable, "-m", "tests.server.serve_fake", "--orders", str(path), "--port", "0"]
    process = subprocess.Popen([*command, "--http-port", "off"], cwd=ROOT, text=True, stderr=subprocess.PIPE)
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
    command = [sys.executable, "-m", "tests.server.serve_fake", "--orders", str(tmp_path / "orders.json")]
    refused = subprocess.run(
        [*command, "--port", "0", "--http-port", "off"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
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
