"""Profiles of an engine process, which its front asks for."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.errors import EngineStopped, WrongState
from tests.server.engine_process.conftest import Remote

RunRemote = Callable[..., None]


def test_the_engine_process_captures_when_it_is_told_to(run_remote: RunRemote, tmp_path: Path) -> None:
    async def scenario(it: Remote) -> None:
        with pytest.raises(WrongState, match="no profile is running"):
            await it.engine.profile(False)
        await it.engine.profile(True)
        with pytest.raises(WrongState, match="a profile is running"):
            await it.engine.profile(True)
        await it.engine.profile(False)
        (capture,) = tmp_path.rglob("*.xplane.pb")
        capture.unlink()
        await it.engine.profile(True)
        await it.engine.profile(False)
        assert list(tmp_path.rglob("*.xplane.pb"))

    run_remote(scenario, profile=str(tmp_path))


def test_a_profile_that_cannot_be_written_is_an_error(run_remote: RunRemote, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    async def scenario(it: Remote) -> None:
        await it.engine.profile(True)
        with pytest.raises(RuntimeError) as failed:
            await it.engine.profile(False)
        assert type(failed.value) is RuntimeError

    run_remote(scenario, profile=str(tmp_path / "file"))


def test_whoever_waits_for_a_process_that_ends_is_told(run_remote: RunRemote, tmp_path: Path) -> None:
    async def scenario(it: Remote) -> None:
        assert it.supervisor.pid is not None
        os.kill(it.supervisor.pid, signal.SIGSTOP)
        asked = asyncio.create_task(it.engine.profile(False))
        await asyncio.sleep(0)
        it.supervisor.give_up("it hangs")
        with pytest.raises(EngineStopped, match="it hangs"):
            await asked

    run_remote(scenario, profile=str(tmp_path))
