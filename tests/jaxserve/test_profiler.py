"""Captures of jax's profiler: their order, and that each ends."""

import contextlib
import threading
from pathlib import Path

import pytest

from jaxserve.errors import WrongState
from jaxserve.profiler import Profiler


def written(folder: Path) -> int:
    """The number of captures in a folder."""
    return len(list(folder.rglob("*.xplane.pb")))


def test_a_capture_is_written_when_it_is_stopped(tmp_path: Path) -> None:
    told: list[bool] = []
    profiler = Profiler(tmp_path, tell=told.append)
    with pytest.raises(WrongState, match="no profile is running"):
        profiler.stop()
    profiler.start()
    with pytest.raises(WrongState, match="a profile is running: stop it, or wait until its 10 seconds are over"):
        profiler.start()
    profiler.ensure(True)
    assert (told, written(tmp_path)) == ([True], 0)
    profiler.stop()
    assert (told, written(tmp_path)) == ([True, False], 1)
    with pytest.raises(WrongState):
        profiler.set(False)
    profiler.ensure(False)
    assert told == [True, False]


def test_a_capture_is_written_when_the_engine_ends(tmp_path: Path) -> None:
    with contextlib.closing(Profiler(tmp_path)) as profiler:
        profiler.start()
        assert written(tmp_path) == 0
    assert written(tmp_path) == 1
    with contextlib.closing(Profiler(tmp_path / "none")):
        pass
    assert written(tmp_path / "none") == 0


@pytest.mark.long
def test_a_capture_that_nobody_stops_ends_by_itself(tmp_path: Path) -> None:
    ended, told = threading.Event(), []

    def tell(running: bool) -> None:
        told.append(running)
        if not running:
            ended.set()

    profiler = Profiler(tmp_path, seconds=0.05, tell=tell)
    profiler.start()
    assert ended.wait(60)
    with pytest.raises(WrongState):
        profiler.stop()  # waits until it is written
    assert (told, written(tmp_path)) == ([True, False], 1)
