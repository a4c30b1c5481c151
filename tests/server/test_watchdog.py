"""When an engine counts as serving, on a clock of our own."""

from types import SimpleNamespace
from typing import Any

import pytest

from server.watchdog import EngineWatchdog


class Watched:
    """An engine of some replicas, and a clock."""

    def __init__(self, replicas: int = 1, due: float = 0.05) -> None:
        self.now = 100.0
        self.report = SimpleNamespace(slot_milliseconds=0.01)
        self.problem: str | None = None
        self.replicas = [
            SimpleNamespace(running=0, waiting=0, iterations=0, expected_seconds=due, slots_used=0)
            for _ in range(replicas)
        ]

    def loads(self) -> Any:
        return self.replicas

    def problems(self, watchdog: EngineWatchdog, seconds: float, *, iterate: bool = False) -> list[str | None]:
        """What it says while time passes, asked twice a second."""
        said = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for replica in self.replicas:
                replica.iterations += iterate
            said.append(watchdog.problem())
        return said


def watch(it: Watched, deadline: float | None = None) -> EngineWatchdog:
    return EngineWatchdog(it, deadline=deadline, interval=0.5, clock=lambda: it.now)  # pyright: ignore[reportArgumentType]


def test_an_idle_engine_is_well_for_ever() -> None:
    it = Watched()
    assert set(it.problems(watch(it), 100)) == {None}


def test_a_busy_engine_is_well_as_long_as_it_iterates() -> None:
    it = Watched()
    it.replicas[0].running = 3
    assert set(it.problems(watch(it), 100, iterate=True)) == {None}


@pytest.mark.parametrize("what", ["running", "waiting"])
def test_wedged_engine_and_its_return(what: str) -> None:
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


@pytest.mark.parametrize(
    ("due", "slots", "deadline", "longest"),
    [
        (0.8, 0, None, 3.2),  # four times
        (1.0, 0, None, 4.0),
        (3.0, 0, None, 6.0),  # three seconds more
        (0.4, 60_000, None, 4.0),  # the slots that it reads
        (0.05, 0, 12.0, 12.0),  # as it was asked for
    ],
)
def test_what_is_due_decides_how_long_it_may_take(
    due: float, slots: int, deadline: float | None, longest: float
) -> None:
    it = Watched(due=due)
    watchdog = watch(it, deadline)
    it.replicas[0].running, it.replicas[0].slots_used = 1, slots
    it.problems(watchdog, 0.5)  # the first look finds it where it is
    before = round(longest / 0.5 - 0.01) - 1
    assert it.problems(watchdog, 0.5 * before) == [None] * before
    assert it.problems(watchdog, 1)[-1] is not None
    assert 0 < watchdog.overdue <= 1.0
    assert longest < watchdog.still <= longest + 1.0


def test_a_slow_iteration_does_not_excuse_those_after_it() -> None:
    it = Watched(due=3.0)
    watchdog = watch(it)
    it.replicas[0].running = 1
    assert it.problems(watchdog, 4) == [None] * 8
    it.problems(watchdog, 0.5, iterate=True)
    it.replicas[0].expected_seconds = 0.05
    assert it.problems(watchdog, 3)[-1] is not None


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
    it.problem = "the engine has failed"
    assert it.problems(watchdog, 0.5) == ["the engine has failed"]
