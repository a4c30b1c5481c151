"""When an engine counts as serving, on a clock of our own."""

from types import SimpleNamespace
from typing import Any

import pytest

from server.health import Watchdog


class Watched:
    """An engine of some replicas, and a clock."""

    def __init__(self, replicas: int = 1, slowest: float = 50.0) -> None:
        self.now = 100.0
        self.report = SimpleNamespace(buckets=[SimpleNamespace(milliseconds=cost) for cost in (1.0, slowest)])
        self.is_healthy = True
        self.replicas = [SimpleNamespace(running=0, waiting=0, iterations=0) for _ in range(replicas)]

    def loads(self) -> Any:
        return self.replicas

    def problems(self, watchdog: Watchdog, seconds: float, *, iterate: bool = False) -> list[str | None]:
        """What it says while time passes, asked twice a second."""
        said = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for replica in self.replicas:
                replica.iterations += iterate
            said.append(watchdog.problem())
        return said


def watch(it: Watched, deadline: float | None = None) -> Watchdog:
    return Watchdog(it, deadline=deadline, interval=0.5, clock=lambda: it.now)  # pyright: ignore[reportArgumentType]


def test_an_idle_engine_is_well_for_ever() -> None:
    it = Watched()
    assert set(it.problems(watch(it), 100)) == {None}


def test_a_busy_engine_is_well_as_long_as_it_iterates() -> None:
    it = Watched()
    it.replicas[0].running = 3
    assert set(it.problems(watch(it), 100, iterate=True)) == {None}


@pytest.mark.parametrize("what", ["running", "waiting"])
def test_a_wedged_engine_is_noticed_within_five_seconds_and_so_is_its_return(what: str) -> None:
    it = Watched()
    watchdog = watch(it)
    it.problems(watchdog, 20)
    setattr(it.replicas[0], what, 1)
    assert it.problems(watchdog, 2) == [None] * 4
    said = it.problems(watchdog, 3)
    assert said[-1] is not None
    assert "the engine has completed no iteration for" in said[-1]
    assert it.problems(watchdog, 1, iterate=True) == [None, None]


def test_one_wedged_replica_among_others_is_named() -> None:
    it = Watched(replicas=3)
    watchdog = watch(it)
    it.replicas[1].running = it.replicas[2].running = 1
    for _ in range(10):
        it.replicas[2].iterations += 1
        said = it.problems(watchdog, 0.5)
    assert said[0] is not None
    assert said[0].startswith("replica 1 has completed no iteration")


@pytest.mark.parametrize(("slowest", "deadline"), [(3000.0, None), (50.0, 12.0)])
def test_slow_hardware_has_longer(slowest: float, deadline: float | None) -> None:
    it = Watched(slowest=slowest)
    watchdog = watch(it, deadline)
    it.replicas[0].running = 1
    assert it.problems(watchdog, 12) == [None] * 24
    assert it.problems(watchdog, 1)[-1] is not None


def test_a_process_that_was_stopped_is_not_wedged() -> None:
    it = Watched()
    watchdog = watch(it)
    it.replicas[0].running = 1
    it.problems(watchdog, 0.5)
    it.now += 600
    assert watchdog.problem() is None
    assert it.problems(watchdog, 5)[-1] is not None


def test_a_dead_engine_is_noticed_at_once() -> None:
    it = Watched()
    watchdog = watch(it)
    it.is_healthy = False
    assert it.problems(watchdog, 0.5) == ["the engine has failed"]
