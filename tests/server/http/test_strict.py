"""Connections of strangers: unfinished bodies, calls that proxies read differently, and names of other hosts."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable

import pytest

from server.http import call as http_call
from server.http import listener
from server.unfinished import UnfinishedBodies
from tests.server.conftest import Served
from tests.server.http.http_calls import ask, post
from tests.server.http.test_http import HEAD, PATH, left, raw

Serve = Callable[..., None]


def test_unfinished_bodies_have_one_budget(serve_port: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            sizes, before = http_call._unfinished._sizes, list(http_call._unfinished._sizes)
            reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
            writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 40_000)
            while [size for body, size in sizes.items() if body not in before] != [40_000]:
                await asyncio.sleep(0.001)
            connections.append(writer)
            return reader, writer

        connections: list[asyncio.StreamWriter] = []
        first = await begin()
        others = [await begin() for _ in range(2)]
        assert (await first[0].read()).startswith(b"HTTP/1.1 408 ")  # the budget takes two
        assert (await ask(it, PATH, prompt="abc", max_tokens=1))["choices"][0]["text"] == "a"
        for _ in range(20):
            others.append(await begin())
            assert (await others.pop(0)[0].read()).startswith(b"HTTP/1.1 408 ")
        assert http_call._unfinished._total == 80_000
        for writer in connections:
            await left(writer)
        while http_call._unfinished._sizes:
            await asyncio.sleep(0.001)
        assert http_call._unfinished._total == 0

    monkeypatch.setattr(http_call, "_unfinished", UnfinishedBodies(100_000))
    serve_port(scenario)


def test_many_connections_are_accepted_a_few_at_a_time(serve_port: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], listener._Protocol.connection_made
    monkeypatch.setattr(listener._Protocol, "connection_made", lambda *given: made.append(1) or make(*given))

    async def scenario(it: Served) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(300):  # all connect while the loop does nothing
                stack.enter_context(socket.create_connection(("127.0.0.1", it.http_port), timeout=5))
            turns = [len(made)]
            while turns[-1] < 300:
                await asyncio.sleep(0)
                turns.append(len(made))
            # Later versions of asyncio accept one more than they are asked to.
            assert max(after - before for before, after in itertools.pairwise(turns)) <= 64 + 1

    serve_port(scenario)


def test_bodies_that_wait_to_be_parsed_have_it_too(serve_port: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        long = {"prompt": "a" * 70_000, "truncate_prompt_tokens": 1, "max_tokens": 1}
        with http_call._unfinished.holding(150_000):
            status, answer = await post(it, PATH, **long)
            assert (status, "too many long calls" in str(answer)) == (429, True)
            assert (await ask(it, PATH, prompt="abc", max_tokens=1))["choices"][0]["text"] == "a"
        assert (await ask(it, PATH, **long))["choices"][0]["text"] == "a"
        assert http_call._unfinished._total == 0

    monkeypatch.setattr(http_call, "_unfinished", UnfinishedBodies(200_000))
    serve_port(scenario)


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, b"GET /health HTTP/1.1\nHost: localhost\n\n"),
        (400, b"GET /health HTTP/1.1\r\nHost: localhost\nX: a\r\n\r\n"),
        (400, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n"),
        (400, b"\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (505, b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n"),
        (400, HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (421, b"GET /health HTTP/1.1\r\nHost: evil.example:8000\r\n\r\n"),
        (421, b"GET /health HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n"),
        (421, b"GET /health HTTP/1.1\r\nHost: [::2]:80\r\n\r\n"),
    ],
)
def test_what_others_read_differently_ends_its_connection(serve_port: Serve, status: int, head: bytes) -> None:
    async def scenario(it: Served) -> None:
        second = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        told = await raw(it, head + second)  # until the server closes the connection
        assert told.startswith(b"HTTP/1.1 %d " % status), told
        assert b'"version"' not in told

    serve_port(scenario)


def chunked(size: int, count: int) -> bytes:
    """A body of spaces and `{}`, in chunks of a size."""
    pieces = b" " * (size * count - 2) + b"{}"
    chunks = [b"%x\r\n%s\r\n" % (size, pieces[at : at + size]) for at in range(0, len(pieces), size)]
    return b"".join([*chunks, b"0\r\n\r\n"])


@pytest.mark.parametrize(
    ("told", "call"),
    [
        (b"Invalid HTTP request", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(1, 3000)),
        (b"Invalid HTTP request", HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(100, 1000)),
        (b"Invalid HTTP request", HEAD + b"a:\r\n" * 300 + b"Content-Length: 2\r\n\r\n{}"),
        (b'"prompt: Field required"', HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(2, 200)),
        (b'"prompt: Field required"', HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(300, 3000)),
        (b'"prompt: Field required"', HEAD + b"a:\r\n" * 200 + b"Content-Length: 2\r\n\r\n{}"),
    ],
    ids=["chunks of 1", "chunks of 100", "300 headers", "200 chunks", "chunks of 300", "200 headers"],
)
def test_pieces_that_are_too_small_are_refused(serve_port: Serve, told: bytes, call: bytes) -> None:
    """Each takes some microseconds to read, in which nobody else is served."""

    async def scenario(it: Served) -> None:
        answer = await raw(it, call.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert told in answer

    serve_port(scenario)


@pytest.mark.parametrize(
    "host", [b"localhost:1", b"127.0.0.1:8000", b"[::1]:80", b"LOCALHOST", b"a.example", b"A.example:9"]
)
def test_calls_for_this_machine_are_taken(serve_port: Serve, host: bytes) -> None:
    async def scenario(it: Served) -> None:
        told = await raw(it, b"GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host)
        assert told.startswith(b"HTTP/1.1 200 ")

    serve_port(scenario, app={"allowed_origins": "https://a.example:444, http://b.example"})


@pytest.mark.parametrize(("origins", "is_open"), [("*", True), (None, False)])
def test_any_host_is_taken_where_any_origin_is(serve_port: Serve, origins: str | None, is_open: bool) -> None:
    async def scenario(it: Served) -> None:
        told = await raw(it, b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200 ") == is_open

    serve_port(scenario, app={"allowed_origins": origins})
