"""A group of hosts as an operator starts it, callers that wait for it, and a clock on what becomes of both."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.free_ports import free_ports
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.jaxserve.multihost.processes import ROOT, WAIT_SECONDS, free_address

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
DEADLINE = 2.0  # of an iteration, seconds
# A row a plan, and three plans under way: the fourth caller waits.
FLAGS = (
    "--hosts 2 --stages 2 --buckets 4 --max-rows 1 --slots 16384 --max-context 5000 --no-scoring --http-port off "
    f"--step-deadline {DEADLINE:g}"
)
AT_WORK, WAITING = 3, 2  # callers
START_SECONDS = 400.0  # that hosts may take on a machine with much else to do
_CALL_SECONDS = 3600.0  # a call whose time is short is refused when the machine is slow
_MARK = "TEST_GROUP"  # in the environment of every process of a group, its children's children too


def until(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """What a condition returns once that is something; an error if it never does."""
    bound = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < bound
        time.sleep(0.02)
    return found


class Told(NamedTuple):
    """What a caller was told, and when: monotonic seconds."""

    at: float
    status: grpc.StatusCode
    message: str


class Group:
    """Two hosts, each in front of a process with a stage of the demo model.

    Args:
      folder: for what they write.
      flags: more of them, for both.
      programs: what runs each host; the command line of `jaxserve` without one.
      of_host: more flags of single hosts.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = (),
        *,
        programs: Sequence[Sequence[str]] = (("server.commands.cli",), ("server.commands.cli",)),
        coordinator: str | None = None,
        of_host: Sequence[Sequence[str]] = ((), ()),
    ) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        port = str(free_ports(1)[0])
        self.address = f"127.0.0.1:{port}"
        common = [*FLAGS.split(), "--port", port, "--coordinator", coordinator or free_address()]
        common += ["--flight-folder", str(folder), *flags]
        self.logs = [folder / f"host-{host}.log" for host in range(2)]
        self.fronts: list[subprocess.Popen[bytes]] = []
        for host, (program, log, more) in enumerate(zip(programs, self.logs, of_host, strict=True)):
            with log.open("w") as err:
                self.fronts.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *program, "serve", "--host-id", str(host), *common, *more],
                        cwd=ROOT,
                        stderr=err,
                        env=os.environ | {"JAX_PLATFORMS": "cpu", _MARK: self._mark},
                    )
                )

    def log(self, host: int) -> str:
        return self.logs[host].read_text()

    def until_told(self, host: int, text: str) -> None:
        """Waits until a host has written something."""

        def has() -> bool:
            assert text in self.log(host) or self.fronts[host].poll() is None, self.log(host)
            return text in self.log(host)

        until(has, START_SECONDS)

    def processes(self) -> dict[int, int]:
        """All that are alive, fronts too: a process and its parent."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
                    if state != "Z":
                        found[int(path.name)] = int(parent)
        return found

    def behind(self) -> set[int]:
        """Those that are no front."""
        return set(self.processes()) - {front.pid for front in self.fronts}

    def engine(self, host: int) -> int:
        """The process with a host's devices."""
        (found,) = [pid for pid, parent in self.processes().items() if parent == self.fronts[host].pid]
        return found

    def ending(self, pid: int) -> str:
        """How a process ended, as the front in front of it says."""

        def told() -> re.Match[str] | None:
            return re.search(rf"process {pid} (.+); its last output", self.log(0) + self.log(1))

        return until(told)[1]

    def codes(self) -> list[int]:
        """How the fronts end."""
        return [front.wait(WAIT_SECONDS) for front in self.fronts]

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for front in self.fronts:
            front.wait(WAIT_SECONDS)


@contextlib.contextmanager
def group(folder: Path, *args: Any, **kwargs: Any) -> Iterator[Group]:
    """A group that is gone when this has ended."""
    it = Group(folder, *args, **kwargs)
    try:
        yield it
    finally:
        it.close()


class Callers:
    """Clients of a group that serves: some have begun, some wait behind them, and one watches its health."""

    def __init__(self, it: Group, channel: grpc.Channel) -> None:
        self._stub = InferenceStub(channel)
        self.told: list[Told] = []
        self.unhealthy: float | None = None
        self.served: list[list[int]] = []
        self._failed: list[BaseException] = []
        self._health = health_pb2_grpc.HealthStub(channel)
        self._watch = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
        assert next(self._watch).status == SERVING
        self.expected = [self._short(prompt) for prompt in range(WAITING)]
        streams = [self._stub.GenerateStream(self._request(row, 4900), timeout=_CALL_SECONDS) for row in range(AT_WORK)]
        for stream in streams:
            next(stream)
        self._threads = [threading.Thread(target=self._follow, args=(stream,)) for stream in streams]
        self._threads += [threading.Thread(target=self._wait, args=(prompt,)) for prompt in range(WAITING)]
        self._threads.append(threading.Thread(target=self._look))
        for thread in self._threads:
            thread.start()
        until(lambda: self._stub.GetLoad(GetLoadRequest()).waiting == WAITING)

    def join(self) -> None:
        """Waits until all have been answered or told."""
        for thread in self._threads:
            thread.join()
        assert not self._failed, self._failed

    @staticmethod
    def _request(prompt: int, tokens: int) -> GenerateRequest:
        ids = {"ids": [5, 6, 7 + prompt]}
        return GenerateRequest(prompt_token_ids=ids, max_tokens=tokens, ignore_eos=True, temperature=0)

    def _short(self, prompt: int) -> list[int]:
        return list(self._stub.Generate(self._request(prompt, 8), timeout=_CALL_SECONDS).token_ids)

    def _follow(self, stream: Any) -> None:
        try:
            for _ in stream:
                pass
            self._failed.append(AssertionError("the answer was whole before anything failed"))
        except grpc.RpcError as error:
            self.told.append(Told(time.monotonic(), error.code(), error.details()))

    def _wait(self, prompt: int) -> None:
        try:
            self.served.append(self._short(prompt))
        except grpc.RpcError as error:
            self.told.append(Told(time.monotonic(), error.code(), error.details()))

    def _look(self) -> None:
        try:
            assert next(self._watch).status == NOT_SERVING
            self.unhealthy = time.monotonic()
        except BaseException as problem:
            self._failed.append(problem)
