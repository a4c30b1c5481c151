"""The engine's process without a front: what it says over its socket, and the codes it ends with."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.engine_process import exit_codes, frames, messages
from server.engine_process import messages_pb2 as engine_pb
from server.engine_process.frames import Splitter
from server.engine_process.job import EngineJob
from tests.server.engine_process.test_supervisor import LONG
from tests.server.fake_engine import WAIT_SECONDS

ROOT = Path(__file__).parents[3]


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
