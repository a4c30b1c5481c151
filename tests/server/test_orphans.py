"""A front that is killed takes its engine process along within 5 seconds, whatever that is doing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jaxserve.multihost.processes import ROOT, WAIT_SECONDS
from tests.server.engine_process.test_processes import child_of
from tests.server.engine_process.test_supervisor import is_gone
from tests.server.served_group import START_SECONDS, group, until

pytestmark = pytest.mark.processes

BOUND = 5.0  # seconds from the death of a parent
PHASES = ("", "reading weights", "compiling", "ready on ")  # what it says as each begins; the first: it is there


def kill(front: int, engine: int) -> float:
    """Kills a front. Returns the seconds until its engine process has ended."""
    since = time.monotonic()
    os.kill(front, signal.SIGKILL)
    until(lambda: is_gone(engine))
    return time.monotonic() - since


@pytest.mark.parametrize("under_a_shell", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_front(phase: str, under_a_shell: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"{sys.executable} -m server.commands.cli serve --port 0 --http-port off --compilation-cache off"
    shell = f"{command} & wait" if under_a_shell else f"exec {command}"  # the shell is there for as long as it wants
    with log.open("w") as err:
        started = subprocess.Popen(
            ["sh", "-c", shell], cwd=ROOT, stderr=err, env=os.environ | {"JAX_PLATFORMS": "cpu"}, start_new_session=True
        )
    try:
        front = until(lambda: _child(started.pid)) if under_a_shell else started.pid
        engine = until(lambda: _child(front))
        until(lambda: phase in log.read_text(), START_SECONDS)
        assert not is_gone(engine)
        assert kill(front, engine) < BOUND
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(WAIT_SECONDS)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("phase", ["waiting for|joining", "weights read|reading weights", "compiling", "ready"])
def test_a_killed_front_of_several_hosts(phase: str, host: int, tmp_path: Path) -> None:
    with group(tmp_path, ["--compilation-cache", "off"]) as it:
        engine = until(lambda: _child(it.fronts[host].pid))
        until(lambda: re.search(phase, it.log(0)), START_SECONDS)
        assert not is_gone(engine)
        assert kill(it.fronts[host].pid, engine) < BOUND


def _child(pid: int) -> int | None:
    try:
        return child_of(pid)
    except ValueError:  # not yet
        return None
