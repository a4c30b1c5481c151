"""The control channel between threads of a process: what is agreed on, and who is told of a failure."""

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from jaxserve.config import EngineConfig
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import process_watchdog
from jaxserve.multihost import startup as start
from jaxserve.multihost.failure import ExitCode
from jaxserve.multihost.failure_detector import STARTING_SILENCE
from jaxserve.multihost.worker import MasterConnection
from jaxserve.profiler import Profiler
from tests.jaxserve.multihost.groups import Ends, aside, join, joined, listening, place, worker
from tests.jaxserve.multihost.processes import WAIT_SECONDS, free_address


def test_the_least_number_is_agreed_on() -> None:
    ends = Ends()
    group, membership = joined(ends)
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    aside(lambda: found.put(membership.agree("blocks", 70)))
    assert group.agree("blocks", 80) == 70
    assert found.get(timeout=WAIT_SECONDS) == 70
    assert group.stop()
    assert ends.codes.get(timeout=WAIT_SECONDS) == 0


def test_problems_are_told_by_host() -> None:
    group, membership = joined()
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    for about, problem in (("sending", ""), ("receiving", "nothing arrived")):
        aside(lambda about=about, problem=problem: found.put(membership.check(about, problem)))
    assert group.check("sending", "") == ""
    assert group.check("receiving", "refused") == "host 0: refused; host 1: nothing arrived"
    assert {found.get(timeout=WAIT_SECONDS) for _ in range(2)} == {"", "host 0: refused; host 1: nothing arrived"}
    group.stop()


def test_worker_error_reaches_all_hosts() -> None:
    ends, told = Ends(), queue.SimpleQueue()
    group, membership = joined(ends)
    group.on_failure = told.put
    membership.reached("compiling")
    membership.fail("ValueError: no\nand more of it")
    problem = told.get(timeout=WAIT_SECONDS)
    assert str(problem) == "host 1, while compiling: ValueError: no"
    assert {ends.codes.get(timeout=WAIT_SECONDS), ends.codes.get(timeout=WAIT_SECONDS)} == {
        ExitCode.BROKEN,
        ExitCode.LOST,
    }
    assert str(group.failure) == str(problem)


def test_invalid_message_fails_the_group() -> None:
    ends, told = Ends(), queue.SimpleQueue()
    group, membership = joined(ends)
    group.on_failure = told.put
    group.place([{0: (0,), 1: (1,)}])
    membership._out.put(pb.FromWorker(completed=pb.Completed(sequence=3)))  # of an iteration that was never sent
    assert "it sent an invalid message" in str(told.get(timeout=WAIT_SECONDS))


def test_alive_reports_the_allowed_silence(monkeypatch) -> None:
    """Not half a second later: should the worker be stopped meanwhile, what held before would hold for as long."""
    monkeypatch.setattr(process_watchdog, "BEAT", 3600.0)  # beats once, at the start
    allowed, coordinator = queue.SimpleQueue(), free_address()
    group = listening(coordinator)
    join(group, worker(coordinator, alive=allowed.put))
    assert allowed.get(timeout=WAIT_SECONDS) == STARTING_SILENCE
    for deadline in (120.0, 3.0):
        group.phase(deadline, serving=deadline < 10)
        assert allowed.get(timeout=WAIT_SECONDS) == deadline
    group.stop()


def raising(problem: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> NoReturn:
        raise problem

    return call


@pytest.mark.parametrize(("problem", "traced"), [(ValueError("no space"), False), (KeyError("a defect"), True)])
def test_a_worker_shows_where_a_defect_is_and_nothing_else(monkeypatch, caplog, problem, traced) -> None:
    said: list[str] = []
    membership = SimpleNamespace(join=lambda: None, fail=said.append)
    monkeypatch.setattr(start, "MasterConnection", lambda *_, **__: membership)
    monkeypatch.setattr(start, "_facts", lambda *_: [])
    monkeypatch.setattr(start, "prepare", raising(problem))
    with pytest.raises(type(problem)):
        start.follow("a model", EngineConfig(tensor=2), place(1, "127.0.0.1:9000"), tell=lambda _: None)
    assert said == [f"{type(problem).__name__}: {problem}"]
    assert any(record.exc_info for record in caplog.records) == traced


def test_workers_are_told_that_host_0_was_interrupted(monkeypatch) -> None:
    said: list[str] = []
    group = SimpleNamespace(
        listen=lambda: None, reached=lambda _: None, join=raising(KeyboardInterrupt()), stop=said.append
    )
    monkeypatch.setattr(start, "HostGroup", lambda *_, **__: group)
    monkeypatch.setattr(start, "_facts", lambda *_: [])
    with pytest.raises(KeyboardInterrupt):
        start.lead("a model", EngineConfig(tensor=2), place(0, "127.0.0.1:9000"), tell=lambda _: None)
    assert said == ["host 0: KeyboardInterrupt"]


def test_a_profile_that_was_just_begun_is_not_lost() -> None:
    """The host goes on once it has started, and closes it."""
    started = []

    class SlowProfiler(Profiler):
        def ensure(self, running: bool) -> None:
            assert host._out.get(timeout=WAIT_SECONDS) is None  # what a host puts there at its end
            started.append(running)

    host = MasterConnection(place(1, "127.0.0.1:9000"), [], tell=lambda _: None, profiler=SlowProfiler(""))
    host._watchdog.start()
    host._profiling.submit(host._profile, True)
    host.follow()
    assert started == [True]
