"""Every way to fail, with the real thing: hosts that serve a model are killed, stopped, cut off and wedged while callers
wait, and a clock that no host sees says how long it takes until everybody knows and every process has ended."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from server import cli
from tests.jaxserve.cluster.processes import Cable, free_ports
from tests.server.served_group import AT_WORK, DEADLINE, WAITING, Callers, Group, group, until

BOUND = DEADLINE + 5.0  # seconds from a fault until all is said and ended
LOST, LATE, KILLED = "lost another host (exit code 72)", "was late with an iteration (exit code 71)", "was killed by"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Programs that a group has compiled are there for the next one."""
    return tmp_path_factory.mktemp("cache")


def check(it: Group, fault: Callable[[], None], message: str, ends: tuple[str, str], *, again: bool) -> None:
    """Has a fault happen while callers wait, and looks at what becomes of them and of the group.

    Args:
      message: that those whose requests have begun are told; an expression.
      ends: how the processes with the devices end, host by host.
      again: whether the group comes back, and serves those who waited.
    """
    it.until_told(0, "ready on")
    with grpc.insecure_channel(it.address) as channel:
        callers = Callers(it, channel)
        engines, behind = [it.engine(host) for host in range(2)], it.behind()
        since = time.monotonic()
        fault()
        until(lambda: not behind & it.processes().keys())
        gone = time.monotonic()
        callers.join()
        print(f"told after {[round(told.at - since, 2) for told in callers.told]}, not serving after "
              f"{callers.unhealthy - since:.2f}, gone after {gone - since:.2f}: {callers.told[0].message}")
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
        cause = r"host 1, stage 1, iteration \d+: nothing was heard of it for"
        check(it, kill(it, 1, signal.SIGSTOP), cause, (LOST, KILLED), again=supervise)
        if not supervise:
            assert it.codes() == [72, 69]
