"""HTTP itself: what is refused and how, limits, callers who leave, ends."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from jaxserve.config import EngineConfig
from server.http import call as http_call
from server.http import listener
from tests.server.conftest import Served
from tests.server.fake_engine import WAIT_SECONDS
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]
PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = 1500  # tokens: more than any test waits for


async def raw(it: Served, *pieces: bytes) -> bytes:
    """What the server says to some bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answer = await reader.read()
    await left(writer)
    return answer


async def left(writer: asyncio.StreamWriter) -> None:
    """Closes a connection."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


# What else is served


def test_models_tokens_and_versions_are_told(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert (card["id"], card["object"], card["max_model_len"]) == ("echo", "model", 2048)
            assert (await client.get("/v1/models/echo")).json() == card
            assert (await client.get("/v1/models/other")).status_code == 404
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/version")).json() == {"version": "1.2.3"}
        told = await ask(it, "/tokenize", prompt="aé")
        assert told == {"count": 3, "max_model_len": 2048, "tokens": [97, 0xC3, 0xA9]}
        assert await ask(it, "/detokenize", tokens=told["tokens"]) == {"prompt": "aé"}
        status, answer = await post(it, "/detokenize", tokens=[97, 257])
        assert (status, answer["error"]["param"]) == (400, "tokens")

    serve_http(scenario)


# Refusals


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [1, "a"]}),
        ("prompt", {"prompt": [True]}),
        ("prompt", {"prompt": ["a"] * 1025}),
        ("prompt", {"prompt": ["a"] * 1024, "n": 2}),
        ("prompt_token_ids", {"prompt": [999]}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("max_tokens", {"prompt": "a", "max_tokens": 5000}),
        ("max_tokens", {"prompt": "a", "max_tokens": "5"}),
        ("temperature", {"prompt": "a", "temperature": -1}),
        ("temperature", {"prompt": "a", "temperature": True}),
        ("top_p", {"prompt": "a", "top_p": 1e999}),
        ("n", {"prompt": "a", "n": 129}),
        ("best_of", {"prompt": "a", "n": 2, "best_of": 1}),
        ("best_of", {"prompt": "a", "best_of": 2, "stream": True}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("stop", {"prompt": "a", "stop": ["x"] * 17}),
        ("logprobs", {"prompt": "a", "logprobs": 21}),
        ("logit_bias", {"prompt": "a", "logit_bias": {"a": 1}}),
        ("stream_options", {"prompt": "a", "stream_options": {"include_usage": True}}),
    ],
)
def test_a_wrong_field_is_named(serve_http: Serve, param: str, body: dict[str, Any]) -> None:
    async def scenario(it: Served) -> None:
        content = json.dumps(body).replace("Infinity", "1e999")
        async with httpx.AsyncClient(base_url=it.url) as client:
            answer = await client.post(PATH, content=content, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert error["message"].startswith(param)

    serve_http(scenario)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff", b"[" * 100_000, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
)
def test_body_must_be_json(serve_http: Serve, content: bytes) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            answer = await client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    serve_http(scenario)


def test_only_what_is_listed_is_served(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            for method, path, status in (
                ("GET", "/v1/nothing", 404),
                ("PUT", "/", 405),
                ("GET", PATH, 405),
                ("POST", "/health", 405),
                ("POST", PATH + "/", 404),
                ("GET", "/docs", 404),
            ):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, str(status)), path
            for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
                assert (await client.post(PATH, content=b'{"prompt": "a"}', headers=kind)).status_code == 415
            packed = {"content-type": "application/json", "content-encoding": "gzip"}
            answer = await client.post(PATH, content=b'{"prompt": "a"}', headers=packed)
            assert (answer.status_code, "compressed" in answer.text) == (415, True)
            status, answer = await post(it, PATH, prompt="a", model="other")
            assert (status, answer["error"]["param"]) == (404, "model")

    serve_http(scenario)


def test_a_body_or_a_header_over_the_limit_is_refused(serve_port: Serve) -> None:
    async def scenario(it: Served) -> None:
        told = await raw(it, HEAD + b"Content-Length: 999999999\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 413 ")
        chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        told = await raw(it, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 65)
        assert told.startswith(b"HTTP/1.1 413 ")
        told = await raw(it, HEAD + b"X: " + b"x" * 2**16)
        assert told.startswith(b"HTTP/1.1 4")
        end = b" HTTP/1.1\r\nHost: localhost\r\n"
        for whole in (
            b"GET /health" + end + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
            b"GET /" + b"x" * 40_000 + end + b"\r\n",
        ):
            told = await raw(it, whole)  # in one piece, as far as the network leaves it in one
            assert told.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), told[:100]

    serve_port(scenario)


def test_a_body_that_does_not_come_is_not_waited_for(serve_http: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        assert (await raw(it, HEAD + b"Content-Length: 9\r\n\r\n{")).startswith(b"HTTP/1.1 408 ")

    monkeypatch.setattr(http_call, "BODY_SECONDS", 0.01)
    serve_http(scenario)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize", b"/nowhere"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/plain"])
def test_a_body_that_is_no_http_ends_its_connection(
    serve_port: Serve, caplog: pytest.LogCaptureFixture, path: bytes, kind: bytes
) -> None:
    """Whether that is seen before the call is answered or after; and no call fails because of it."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % (
        path,
        kind,
    )

    async def scenario(it: Served) -> None:
        assert (await raw(it, head + b"zz\r\n")).startswith(b"HTTP/1.1 400 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
        writer.write(head)
        if path == b"/nowhere" or kind == b"text/plain":  # which is told before the body comes
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 4")
        writer.write(b"zz\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        await left(writer)
        await it.app.handler.calls.wait_until_none()

    serve_port(scenario)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_a_connection_that_is_reset_leaves_no_timer(serve_port: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the connection's objects for as long as an idle client may stay."""
    lost: asyncio.Queue[tuple[Any, Exception | None]] = asyncio.Queue()
    own = listener._Protocol.connection_lost

    def tell(protocol: Any, exc: Exception | None) -> None:
        assert protocol.timeout_keep_alive_task is not None
        own(protocol, exc)
        lost.put_nowait((protocol, exc))

    async def scenario(it: Served) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(listener._Protocol, "connection_lost", tell)
            reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
            writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            protocol, reason = await asyncio.wait_for(lost.get(), WAIT_SECONDS)
        assert isinstance(reason, ConnectionResetError)
        assert protocol.timeout_keep_alive_task is None

    serve_port(scenario)


def test_headers_that_do_not_come_are_not_waited_for(serve_port: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Served) -> None:
        assert await raw(it, b"") == await raw(it, b"GET /he") == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200 OK")
        writer.write(b"GET /he")
        assert await reader.read() == b""
        await left(writer)

    monkeypatch.setattr("server.http.listener.HEADER_SECONDS", 0.05)
    serve_port(scenario)


def test_a_full_queue_answers_429_and_says_when_to_come_back(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(post(it, PATH, prompt="abc", max_tokens=2))
            await it.until(lambda: it.engine.load().waiting == 1)
            async with httpx.AsyncClient(base_url=it.url) as client:
                answer = await client.post(PATH, json={"prompt": "abc"})
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
                assert answer.json()["error"]["code"] == "queue_full"
                answer = await client.post("/generate", json={"inputs": "abc"})
                assert (answer.status_code, answer.json()["error_type"]) == (429, "overloaded")
            it.engine.release()
        assert waiting.result()[0] == 200

    serve_http(scenario, held=True, config=EngineConfig(max_rows=1, max_queued_requests=1))


def test_a_failure_is_told_without_its_cause(serve_http: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, PATH, prompt="!")
        assert status == 500
        assert "poison" not in answer["error"]["message"]
        told.append(answer["error"]["message"])

    told: list[str] = []
    serve_http(scenario, poison=frozenset(b"!"))
    assert told[0].split()[-1] in caplog.text


def test_a_failure_within_a_stream_ends_it_with_an_error(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        stream = events(it, PATH, prompt=["ab", "!"], max_tokens=1, stream=True)
        coming = asyncio.create_task(anext(stream))  # pyright: ignore[reportArgumentType]
        await it.until(lambda: it.engine.load().waiting == 2)
        await it.step()  # one row: the second prompt fails when the first is answered
        assert (await coming)["choices"][0]["text"] == "a"
        it.engine.release()
        (error,) = [event async for event in stream]
        assert error["error"]["type"] == "internal_server_error"

    serve_http(scenario, held=True, poison=frozenset(b"!"), config=EngineConfig(max_rows=1))


# Callers who leave, servers that end


@pytest.mark.parametrize("streams", [False, True])
def test_a_caller_who_leaves_gives_the_slots_back(serve_http: Serve, streams: bool) -> None:
    async def scenario(it: Served) -> None:
        body = json.dumps({"prompt": ["abc", "de"], "max_tokens": LONG, "stream": streams}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await it.until(lambda: it.engine.load().waiting == 2)
        await it.step()
        await left(writer)
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert it.engine.iterations == 1
        await it.app.handler.calls.wait_until_none()

    serve_http(scenario, held=True)


def test_a_reader_who_stops_reading_delays_nobody(serve_http: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
            body = {"prompt": "abc", "max_tokens": 10**6, "logprobs": 20, "stream": True}
            async with client.stream("POST", PATH, json=body) as slow:
                assert slow.status_code == 200
                other = await ask(it, PATH, prompt="xy", max_tokens=2000)
                assert other["choices"][0]["text"] == "xy" * 1000
        await it.app.handler.calls.wait_until_none()
        await it.until(lambda: it.engine.load().slots_used == 0)

    serve_http(scenario, max_context=2 * 10**6)
    assert not caplog.records


def test_a_failed_engine_answers_503(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(post(it, PATH, prompt="abc", max_tokens=LONG))
            await it.until(lambda: it.engine.load().waiting == 1)
            it.engine.fail()
        assert call.result()[0] == 503
        assert (await post(it, PATH, prompt="abc"))[0] == 503
        async with httpx.AsyncClient(base_url=it.url) as client:
            assert (await client.get("/health")).status_code == 503

    serve_http(scenario, held=True)


def test_drain_lets_answers_end_and_refuses_new_ones(serve_port: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(post(it, PATH, prompt="abc", max_tokens=3))
            await it.until(lambda: it.engine.load().waiting == 1)
            draining = tasks.create_task(it.app.drain(WAIT_SECONDS))
            await asyncio.sleep(0)
            assert (await post(it, PATH, prompt="abc"))[0] == 503
            it.engine.release()
        assert call.result()[1]["choices"][0]["text"] == "abc"
        assert draining.result() == 0
        with pytest.raises(httpx.ConnectError):
            await post(it, PATH, prompt="abc")

    serve_port(scenario, held=True)
