"""Every way to fail, with real processes that are killed, stopped and wedged: whoever waits is told within seconds what
has happened, and every process ends. The devices are made up, so that a group starts in seconds; what callers of a
served model see is in tests/server/test_host_failures.py."""

import contextlib
import signal
import time
from pathlib import Path

import pytest

from jaxserve.multihost import flight_recorder
from jaxserve.multihost.failure import ExitCode
from tests.jaxserve.multihost.processes import Cable, Host, free_address, group

pytestmark = pytest.mark.processes

FAKE = "tests.jaxserve.multihost.fake_host"
DEADLINE = 2.0
ENDED = 5.0  # seconds after the deadline in which callers are told and processes gone


def serving(hosts: list[Host]) -> None:
    hosts[0].until(lambda line: "serving" in line)


def check_told(hosts: list[Host], since: float, *parts: str) -> None:
    """All callers of host 0 hear of it in time, it is not healthy then, and a record is written."""
    lines = hosts[0].rest()
    assert time.monotonic() - since < DEADLINE + ENDED
    ended = {line["request"]: line for line in lines if "request" in line}
    assert set(ended) == set("abc"), hosts[0].errors.read_text()
    for line in ended.values():
        assert line["ended"] == "error"
        assert not line["healthy"]
        for part in (*parts, "iteration "):
            assert part in line["error"]
    assert any("record" in line for line in lines)


def codes(hosts: list[Host]) -> list[int]:
    return [host.code() for host in hosts]


@pytest.mark.exhaustive
def test_a_worker_that_is_killed(tmp_path) -> None:
    told = {"stages": 3, "deadline": DEADLINE}
    with group(FAKE, [told] * 3, tmp_path) as hosts:
        serving(hosts)
        hosts[1].process.kill()
        check_told(hosts, time.monotonic(), "host 1, stage 1", "control stream ended")
        assert codes(hosts) == [ExitCode.LOST, -signal.SIGKILL, ExitCode.LOST]


@pytest.mark.smoke
def test_a_worker_that_is_stopped(tmp_path) -> None:
    told = {"stages": 2, "deadline": DEADLINE}
    with group(FAKE, [told] * 2, tmp_path) as hosts:
        serving(hosts)
        hosts[1].process.send_signal(signal.SIGSTOP)
        check_told(hosts, time.monotonic(), "host 1, stage 1", "it sent nothing for")
        assert hosts[0].code() == ExitCode.LOST
        hosts[1].process.send_signal(signal.SIGCONT)
        assert hosts[1].code() in (ExitCode.LOST, ExitCode.OVERDUE)


@pytest.mark.parametrize(
    ("wedged", "fault"),  # in a kernel, and before it is launched
    [pytest.param(0, "wedge", marks=pytest.mark.exhaustive), (1, "wedge"), (1, "stuck")],
)
def test_a_host_that_is_wedged(tmp_path, wedged, fault) -> None:
    told = [{"stages": 2, "deadline": DEADLINE, "tokens": 10} for _ in range(2)]
    told[wedged] |= {"fault": fault, "at": 30}
    with group(FAKE, told, tmp_path) as hosts:
        serving(hosts)
        check_told(hosts, time.monotonic(), f"host {wedged}, stage {wedged}", "iteration 30", "not done within 2 s")
        assert codes(hosts) == [ExitCode.LOST if wedged else ExitCode.OVERDUE, ExitCode.LOST]


def test_a_program_that_fails_on_a_device(tmp_path) -> None:
    told = [{"stages": 2, "deadline": DEADLINE, "tokens": 10}, {"stages": 2, "fault": "device", "at": 30}]
    with group(FAKE, told, tmp_path) as hosts:
        serving(hosts)
        check_told(hosts, time.monotonic(), "host 1, stage 1", "iteration 30", "the kernel was not amused")
        assert codes(hosts) == [ExitCode.LOST, ExitCode.BROKEN]


@pytest.mark.exhaustive
def test_a_worker_whose_own_work_throws(tmp_path) -> None:
    told = [{"stages": 2, "deadline": DEADLINE, "tokens": 10}, {"stages": 2, "fault": "throw", "at": 30}]
    with group(FAKE, told, tmp_path) as hosts:
        serving(hosts)
        check_told(hosts, time.monotonic(), "host 1, stage 1", "iteration 30", "RuntimeError: no such program")
        assert codes(hosts) == [ExitCode.LOST, ExitCode.BROKEN]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "told_of"),
    [("close", "control stream ended"), ("fall_silent", "it sent nothing for")],
)
def test_a_stream_of_plans_that_is_cut(tmp_path, how, told_of) -> None:
    coordinator = free_address()
    told = {"stages": 2, "deadline": DEADLINE}
    with (
        contextlib.closing(Cable(int(coordinator.rpartition(":")[2]))) as cable,
        group(FAKE, [told, told | {"coordinator": cable.address}], tmp_path, coordinator=coordinator) as hosts,
    ):
        serving(hosts)
        getattr(cable, how)()
        check_told(hosts, time.monotonic(), "host 1, stage 1", told_of)
        assert codes(hosts) == [ExitCode.LOST, ExitCode.LOST]
        assert "host 0 is lost" in hosts[1].errors.read_text()


def test_a_master_that_is_killed(tmp_path) -> None:
    told = {"stages": 2, "deadline": DEADLINE}
    with group(FAKE, [told] * 2, tmp_path) as hosts:
        serving(hosts)
        hosts[0].process.kill()
        since = time.monotonic()
        assert codes(hosts) == [-signal.SIGKILL, ExitCode.LOST]
        assert time.monotonic() - since < DEADLINE + ENDED
        assert "host 0 is lost" in hosts[1].errors.read_text()
        # It is of the last stage: it has all that host 0 had.
        record = next(line["record"] for line in hosts[1].rest() if "record" in line)
    found = flight_recorder.read(Path(record))
    assert "host 0 is lost" in found.reason
    assert [entry.plan.sequence for entry in found.entries] == list(range(len(found.entries)))
    answered = [entry for entry in found.entries if entry.landed]
    assert len(found.entries) - len(answered) <= 3  # those under way
    assert {token for entry in answered for token in entry.tokens} == {7}


@pytest.mark.exhaustive
def test_a_master_that_is_stopped(tmp_path) -> None:
    told = {"stages": 2, "deadline": DEADLINE}
    with group(FAKE, [told] * 2, tmp_path) as hosts:
        serving(hosts)
        hosts[0].process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        assert hosts[1].code() == ExitCode.LOST
        assert time.monotonic() - since < DEADLINE + ENDED
        hosts[0].process.send_signal(signal.SIGCONT)
        assert hosts[0].code() in (ExitCode.LOST, ExitCode.OVERDUE)  # whichever it sees first


def test_a_host_that_throws_while_compiling(tmp_path) -> None:
    told = {"stages": 2, "deadline": DEADLINE}
    with group(FAKE, [told, told | {"fault": "compile"}, told], tmp_path) as hosts:
        assert codes(hosts) == [ExitCode.LOST, ExitCode.BROKEN, ExitCode.LOST]
        told_of = hosts[0].errors.read_text()
        assert "host 1, while compiling: ValueError: the compiler was not amused" in told_of


def test_an_end_that_was_asked_for(tmp_path) -> None:
    told = {"stages": 2, "deadline": DEADLINE}
    with group(FAKE, [told] * 2, tmp_path) as hosts:
        serving(hosts)
        hosts[0].process.send_signal(signal.SIGTERM)
        ended = [line for line in hosts[0].rest() if "request" in line]
        assert {line["ended"] for line in ended} == {"aborted"}
        assert codes(hosts) == [0, 0]


def test_a_host_that_does_not_join_is_named(tmp_path) -> None:
    told = {"stages": 1, "deadline": DEADLINE, "join_timeout": 6.0}
    with group(FAKE, [told | {"hosts": 3}] * 2, tmp_path) as hosts:
        refused = hosts[0].until(lambda line: "refused" in line)["refused"]
        assert "host 2 did not join within 6 s" in refused
        assert codes(hosts) == [2, ExitCode.LOST]


def test_a_host_with_other_settings_is_named(tmp_path) -> None:
    told = {"stages": 1, "deadline": DEADLINE}
    other = told | {"facts": [("max_rows", "8")]}
    with group(FAKE, [told, other], tmp_path) as hosts:
        for host in hosts:
            refused = host.until(lambda line: "refused" in line)["refused"]
            assert "host 1: max_rows is 8; on host 0 it is 4" in refused
        assert codes(hosts) == [2, 2]
