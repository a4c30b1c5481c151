"""What watchers are told of a running engine, and how a terminal shows it."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jaxserve.iteration import Admission, Chunk
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import IterationRecord
from server import live as live_module
from server.call import Call, RequestTiming
from server.commands import cli
from server.commands.top import Board
from server.live import LiveStats
from tests.server.fake_engine import FakeEngine, made_up_record


class Recorded(FakeEngine):
    """A fake engine whose iterations are made up here."""

    def record(self, recorder: Callable[[IterationRecord], None]) -> None:
        self.recorder = recorder

    def ran(self, sequence: int, *chunks: Chunk, taken: tuple[tuple[int, str], ...] = (), replica: int = 0) -> None:
        admissions = tuple(
            Admission(row=row, request_id=name, tokens=(1,), prompt_length=1, blocks=(), sampling=SamplingParams())
            for row, name in taken
        )
        self.recorder(
            made_up_record(sequence, chunks, waiting=3, finished_at=1.25, admissions=admissions, replica=replica)
        )


@pytest.fixture
def engine() -> Recorded:
    return Recorded(tokenizer=None)


def test_a_watcher_is_told_each_iteration_once(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    first = live.since(0)
    assert (first["next"], first["iterations"], first["healthy"]) == (0, [], False)
    engine.ran(0, Chunk(2, 0, 9, True), taken=((2, "a"),))
    engine.ran(1, Chunk(2, 9, 1, True), replica=1)
    told = live.since(first["next"])
    assert told["iterations"] == [
        [0, 0, 16, 3, 1.25, [[2, 0, 9, 1]], [[2, "a"]]],
        [1, 1, 16, 3, 1.25, [[2, 9, 1, 1]], []],
    ]
    assert live.since(1)["iterations"] == told["iterations"][1:]
    assert live.since(told["next"])["iterations"] == []
    assert told["load"]["slots_total"] == engine.slots_total


def test_who_watched_another_server_is_told_everything_again(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    engine.ran(0, Chunk(0, 0, 1, True))
    told = live.since(4711)
    assert (told["next"], len(told["iterations"])) == (1, 1)


def test_only_the_last_iterations_are_kept(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    for sequence in range(live_module.KEPT + 5):
        engine.ran(sequence)
    told = live.since(0)
    assert [iteration[1] for iteration in told["iterations"]] == list(range(5, live_module.KEPT + 5))


def test_latencies_and_rates_are_of_the_last_minute(engine: Recorded, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(live_module.time, "monotonic", lambda: clock.now)
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    for index, seconds in enumerate([9.0, *(milliseconds / 1000 for milliseconds in range(100))]):
        request = Request(request_id=str(index), prompt=(1,), sampling=SamplingParams(), arrival=clock.now)
        timing = RequestTiming(call=Call(protocol="test"), request=request)
        clock.now += 0.25
        live.tokens(timing, 1, None)
        live.tokens(timing, 2, seconds)
        if seconds == 9.0:
            clock.now += 61
    load = engine.load()
    monkeypatch.setattr(engine, "load", lambda: load)
    told = live.since(0)
    assert told["latencies"]["first_token"] == [0.25, 0.25, 0.25]
    assert told["latencies"]["gap"] == pytest.approx([0.05, 0.095, 0.099])
    assert told["tokens_per_second"] == 0
    clock.now += 0.5
    monkeypatch.setattr(engine, "load", lambda: live_module.dataclasses.replace(load, generated_tokens=40))
    assert live.since(0)["tokens_per_second"] == 80


def shown(news: list[dict[str, Any]], height: int = 40) -> list[str]:
    about = {"model": "m", "family": "f", "device": "d", "rows": 4, "replicas": 1, "buckets": [16]}
    board = Board({"about": about} | news[0])
    for each in news[1:]:
        board.take(each)
    console = Console(file=io.StringIO(), width=100, height=height, color_system=None)
    console.print(board)
    return console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]


def test_top_shows_iterations_as_columns_and_rows_as_lines(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    engine.ran(0, Chunk(2, 0, 16, True), taken=((2, "abc"),))
    first = live.since(0)
    engine.ran(1, Chunk(0, 0, 3, False), Chunk(2, 16, 1, True))
    lines = shown([first, live.since(first["next"])])
    rows = {line[:14].split()[0]: line[14:].rstrip() for line in lines if line[:4].strip()}
    assert (rows["0"], rows["1"], rows["2"]) == (" █", "", "██")
    assert (rows["queue"], rows["fill"]) == ("██", "█▂")
    assert any(line.startswith("  2 abc") for line in lines)
    assert "not serving" in lines[0]


def test_top_does_not_count_running_requests_of_rows(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    news = live.since(0)
    top = "\n".join(shown([news | {"load": news["load"] | {"running": 5}}]))
    assert "running 5, 4 rows" in top
    assert "5 of 4" not in top


def test_top_says_what_a_small_window_leaves_out(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    assert any("2 more rows" in line for line in shown([live.since(0)], height=10))


def test_top_shows_what_is_served_after_a_restart(engine: Recorded):
    live = LiveStats(engine)  # pyright: ignore[reportArgumentType]
    engine.ran(0, Chunk(0, 0, 16, True))
    about = {"model": "other", "family": "f", "device": "d", "rows": 1, "replicas": 1, "buckets": [64]}
    later = live.since(0) | {"about": about, "iterations": [[0, 0, 64, 0, 1.0, [[0, 0, 64, 1]], []]]}
    lines = shown([live.since(0), later])
    assert lines[0].startswith("other ")
    assert next(line for line in lines if line.startswith("fill"))[14:].rstrip() == "█"


GREETING = b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0\x40\0"  # of HTTP/2, which is what gRPC's port speaks
OTHER = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (GREETING, "does not speak HTTP (BadStatusLine)"),
        (OTHER, "is not a jaxserve server"),
        (CUT, "does not speak HTTP (IncompleteRead)"),
    ],
)
def test_top_of_another_server(said: bytes, told: str, capsys: pytest.CaptureFixture[str]):
    def answer() -> None:
        caller, _ = listening.accept()
        with caller:
            caller.recv(2**16)
            caller.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert cli.main(["top", "--once", "--server", f"http://127.0.0.1:{listening.getsockname()[1]}"]) == 2
        thread.join()
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("\n") == 1


def test_top_says_in_a_line_what_is_no_address(capsys: pytest.CaptureFixture[str]):
    for address in ("http://[::1", "http://a:b:c"):
        assert cli.main(["top", "--once", "--server", address]) == 2
        assert f"{address} does not answer: " in capsys.readouterr().err
