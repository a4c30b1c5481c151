"""Every way to fail, with the real thing: hosts that serve a model are killed, stopped, cut off and wedged while
callers wait, and a clock that no host sees says how long it takes until everybody knows and every process has ended."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from jaxserve.multihost.failure import ExitCode
from server.commands import cli
from server.engine_process import exit_codes
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.jaxserve.multihost.processes import WAIT_SECONDS, Cable, free_address
from tests.server.served_group import AT_WORK, DEADLINE, START_SECONDS, WAITING, Callers, Group, group, until

pytestmark = pytest.mark.processes

BOUND = DEADLINE + 5.0  # seconds from a fault until all is said and ended
LOST, KILLED = exit_codes.describe(ExitCode.LOST), exit_codes.describe(-signal.SIGKILL)
LATE, BROKEN = exit_codes.describe(ExitCode.OVERDUE), exit_codes.describe(ExitCode.BROKEN)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Programs that a group has compiled are there for the next one."""
    return tmp_path_factory.mktemp("cache")


def check(
    it: Group,
    fault: Callable[[], None],
    message: str,
    ends: tuple[str, str],
    *,
    again: bool,
    undo: Callable[[], None] = lambda: None,
) -> None:
    """Has a fault happen while callers wait, and looks at what becomes of them and of the group.

    Args:
      message: that those whose requests have begun are told; an expression.
      ends: how the processes with the devices end, host by host.
      again: whether the group comes back, and serves those who waited.
      undo: what the fault was, so that it can.
    """
    it.until_told(0, "ready on")
    with grpc.insecure_channel(it.address) as channel:
        callers = Callers(it, channel)
        engines, behind = [it.engine(host) for host in range(2)], it.behind()
        since = time.monotonic()
        fault()
        until(lambda: not behind & it.processes().keys())
        gone = time.monotonic()
        undo()
        callers.join()
    assert len(callers.told) == AT_WORK + (0 if again else WAITING), callers.told
    for told in callers.told:
        assert told.status is grpc.StatusCode.UNAVAILABLE
        assert re.search(message, told.message), told
        assert told.at - since < BOUND
    assert callers.unhealthy is not None
    assert callers.unhealthy - since < BOUND
    assert gone - since < BOUND
    for engine, end in zip(engines, ends, strict=True):
        assert end in it.ending(engine)
    if again:
        assert sorted(callers.served) == sorted(callers.expected)
        os.kill(it.fronts[0].pid, signal.SIGTERM)
        assert it.codes() == [0, 0]


def refusal(channel: grpc.Channel, about: str) -> str | None:
    """What a caller is told, if it is about that."""
    try:
        InferenceStub(channel).Generate(GenerateRequest(prompt="It was", max_tokens=3), timeout=WAIT_SECONDS)
    except grpc.RpcError as error:
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        return error.details() if unavailable and about in error.details() else None
    return None


def kill(it: Group, host: int, number: int) -> Callable[[], None]:
    return lambda: os.kill(it.engine(host), number)


def test_a_worker_that_is_killed(tmp_path, cache) -> None:
    with group(tmp_path, ["--supervise", "--compilation-cache", str(cache)]) as it:
        it.until_told(0, "ready on")
        kept = sorted(path.name for path in cache.iterdir())
        cause = r"host 1, stage 1, iteration \d+: its control stream ended"
        check(it, kill(it, 1, signal.SIGKILL), cause, (LOST, KILLED), again=True)
        assert sorted(path.name for path in cache.iterdir()) == kept  # nothing was compiled again


@pytest.mark.exhaustive
@pytest.mark.parametrize("supervise", [True, False])
def test_a_worker_that_is_stopped(tmp_path, cache, supervise) -> None:
    flags = ["--compilation-cache", str(cache), *["--supervise"] * supervise]
    with group(tmp_path, flags) as it:
        cause = r"host 1, stage 1, iteration \d+: it sent nothing for"
        check(it, kill(it, 1, signal.SIGSTOP), cause, (LOST, KILLED), again=supervise)
        if not supervise:
            assert it.codes() == [ExitCode.LOST, exit_codes.ENGINE_GONE]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("host", "supervise"), [(1, True), pytest.param(1, False, marks=pytest.mark.weekly), (0, False)]
)
def test_a_host_wedged_in_a_kernel(tmp_path, cache, host, supervise) -> None:
    there, caches, programs = tmp_path / "there", [str(cache)] * 2, [("server.commands.cli",)] * 2
    programs[host], caches[host] = ("tests.server.failing_host", "wedge", str(there)), "off"
    own = [["--compilation-cache", each] for each in caches]
    with group(tmp_path, ["--supervise"] * supervise, programs=programs, of_host=own) as it:
        cause = rf"host {host}, stage {host}, iteration \d+: not done within {DEADLINE:g} s"
        check(it, there.touch, cause, (LOST if host else LATE, LOST), again=supervise, undo=there.unlink)
        if not supervise:
            assert it.codes() == [ExitCode.LOST if host else ExitCode.OVERDUE, ExitCode.LOST]


@pytest.mark.exhaustive
@pytest.mark.parametrize("host", [1, 0])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("device", "its device failed: .*the kernel divides by zero"),
        ("raise", "RuntimeError: no such program"),
    ],
)
def test_host_whose_work_fails(tmp_path, cache, host, fault, cause) -> None:
    there, caches, programs = tmp_path / "there", [str(cache)] * 2, [("server.commands.cli",)] * 2
    programs[host], caches[host] = ("tests.server.failing_host", fault, str(there)), "off"
    own = [["--compilation-cache", each] for each in caches]
    with group(tmp_path, programs=programs, of_host=own) as it:
        ends = (LOST, BROKEN) if host else (BROKEN, LOST)
        check(it, there.touch, rf"host {host}, stage {host}, iteration \d+: {cause}", ends, again=False)
        assert it.codes() == ([ExitCode.LOST, ExitCode.BROKEN] if host else [ExitCode.BROKEN, ExitCode.LOST])


@pytest.mark.parametrize("way", ["close", pytest.param("fall_silent", marks=pytest.mark.exhaustive)])
def test_a_stream_of_plans_that_is_cut(tmp_path, cache, way) -> None:
    coordinator = free_address()
    with contextlib.closing(Cable(int(coordinator.rpartition(":")[2]))) as cable:
        over = ["--coordinator", cable.address]
        flags = ["--compilation-cache", str(cache)]
        with group(tmp_path, flags, coordinator=coordinator, of_host=((), over)) as it:
            told = {"close": "its control stream ended", "fall_silent": "it sent nothing for"}[way]
            cause = rf"host 1, stage 1, iteration \d+: {told}"
            check(it, getattr(cable, way), cause, (LOST, LOST), again=False)
            assert it.codes() == [ExitCode.LOST, ExitCode.LOST]
            assert re.search(r"host 0 is lost, (after )?iteration \d+", it.log(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("supervise", [True, False])
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, r"the engine process was killed by signal 9 \(SIGKILL\)"),
        (signal.SIGSTOP, r"the engine has completed no iteration for \d+\.\d s though it has work and was killed"),
    ],
)
def test_a_master_that_is_killed_or_stopped(tmp_path, cache, supervise, number, cause) -> None:
    flags = ["--compilation-cache", str(cache), *["--supervise"] * supervise]
    with group(tmp_path, flags) as it:
        cause = rf"host 0, stage 0, iteration \d+: {cause}"
        check(it, kill(it, 0, number), cause, (KILLED, LOST), again=supervise)
        if not supervise:
            assert it.codes() == [exit_codes.ENGINE_GONE, ExitCode.LOST]
        # The survivor tells what it was at, and leaves what it has seen.
        assert re.search(r"host 0 is lost, (after )?iteration \d+", it.log(1))
        (record,) = tmp_path.glob("*.flight")
        assert cli.main(["replay", str(record), "--compilation-cache", "off"]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.weekly), 1])
def test_a_host_that_throws_while_compiling(tmp_path, host) -> None:
    """Nobody can have begun: whoever calls is told what was the matter with the last start, until one succeeds."""
    there = tmp_path / "there"
    there.touch()
    programs = [("server.commands.cli",)] * 2
    programs[host] = ("tests.server.failing_host", "compile", str(there))
    flags = ["--supervise", "--compilation-cache", str(tmp_path / "cache")]
    with group(tmp_path, flags, programs=programs) as it, ThreadPoolExecutor() as threads:
        it.until_told(0, f"host {host}: compiling")
        engines = [it.engine(host) for host in range(2)]
        thrown = threads.submit(lambda: it.until_told(host, "this host cannot start") or time.monotonic())
        with grpc.insecure_channel(it.address) as channel:
            told = until(lambda: refusal(channel, "while compiling"), START_SECONDS)
            at, gone = time.monotonic(), until(lambda: not set(engines) & it.processes().keys() and time.monotonic())
            assert re.match(rf"host {host}, while compiling: .*a_kernel_that_nobody_wrote", told)
            assert max(at, gone) - thrown.result() < 5.0
            assert LOST in it.ending(engines[1 - host])
            assert BROKEN in it.ending(engines[host])
            there.unlink()
            it.until_told(0, "ready on")
            assert InferenceStub(channel).Generate(GenerateRequest(prompt="It was", max_tokens=3)).text
