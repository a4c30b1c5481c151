"""Runs uvicorn on the event loop that serves gRPC, with limits and without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server import ports
from server.tls import Tls

MAX_HEADER_BYTES = 32 * 2**10  # of the request line and headers together
HEADER_SECONDS = 10  # within which they must arrive
_MAX_HEADERS = 256  # each takes some microseconds, in which nobody else is served; so does a chunk
_MAX_SMALL_CHUNKS, _LEAST_CHUNK = 256, 256  # chunks of a body beyond the first must have so many bytes on average
_MAX_CONNECTIONS = 4096
_WAITING_CONNECTIONS, _ACCEPTED = 2048, 64  # not accepted yet, and at most accepted before others are served
# Detects a client whose machine has gone, so that its slots are freed.
_TCP = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class _StrictLines(ReceiveBuffer):
    """h11's buffer, strict where servers and proxies read lines differently (RFC 9112, 2.2).

    It also refuses what takes long to read: many headers, or a body in many small chunks.
    """

    _chunks = _chunked = 0  # of this body, and their bytes

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()  # of a chunk
        if line is not None:
            self._chunks += 1
            if self._chunks > _MAX_SMALL_CHUNKS + self._chunked / _LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        piece = super().maybe_extract_at_most(count)
        if piece is not None:
            self._chunked += len(piece)
        return piece

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self)
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        self._chunks = self._chunked = 0
        if len(lines) > _MAX_HEADERS + 1:
            raise h11.RemoteProtocolError(f"there are more than {_MAX_HEADERS} headers")
        head = before[: len(before) - len(self)]
        if head.count(b"\n") != head.count(b"\r\n"):
            raise h11.RemoteProtocolError("a line ends without a carriage return")
        if any(line[:1] in (b" ", b"\t") for line in lines):
            raise h11.RemoteProtocolError("a header is folded")
        return lines


class _Protocol(H11Protocol):
    """uvicorn's h11 protocol with a time limit for headers, and strict about lines.

    It also ends calls with a malformed body, for which uvicorn would wait without end.
    """

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn._receive_buffer = _StrictLines()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        if self._deadline is not None and self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()  # the headers have arrived
            self._deadline = None

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.cycle is not None and self.cycle.response_complete:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # otherwise the handler would write to a closed connection
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the answer has started
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves this timer, which holds the connection, after a reset
        if self._deadline is not None:
            self._deadline.cancel()


class _Guard:
    """Refuses calls by their request line and headers.

    h11 checks their size only while they are incomplete, so it misses those that arrive in one piece.

    Attributes:
      hosts: the hosts that calls may be for; None for any.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.hosts: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
            return
        status, message = refusal
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": str(status)}
        # "close", because the rest of the call is not read.
        await JSONResponse({"error": error}, status, {"connection": "close"})(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        if _header_bytes(scope) > MAX_HEADER_BYTES:
            return 431, f"the request line and headers are larger than {MAX_HEADER_BYTES} bytes"
        if scope["http_version"] not in ("1.0", "1.1"):
            return 505, f"HTTP/{scope['http_version']} is not served; HTTP/1.1 is"
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # proxies may take either
            return 400, "the headers Content-Length and Transfer-Encoding are both given; give one"
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and host and host_of(host) not in self.hosts:
            return 421, f"the header Host names {host[:100]!r}, which is not this server; it listens on loopback only"
        return None


def host_of(address: str) -> str:
    """The host in HOST or HOST:PORT, in lower case; an IPv6 address without its brackets."""
    if address.startswith("["):
        return address[1:].partition("]")[0].lower()
    return address.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _header_bytes(scope: Scope) -> int:
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    return line + sum([len(name) + len(value) + 4 for name, value in scope["headers"]])


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


class HttpListener:
    """Serves an ASGI application on one port, with TLS if `tls` is given.

    Args:
      own_hosts: where it listens on loopback, calls must be for loopback or one of these hosts. Otherwise a web page
        that gives its own name the address 127.0.0.1 could call a server without keys (DNS rebinding). None takes
        calls for any host.
    """

    def __init__(self, app: ASGIApp, tls: Tls | None = None, *, own_hosts: Iterable[str] | None = None) -> None:
        self._guard, self._own_hosts = _Guard(app), own_hosts
        self._server = _Server(
            uvicorn.Config(
                self._guard,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_MAX_CONNECTIONS,
                backlog=_ACCEPTED,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=1,
                **(tls.uvicorn_settings() if tls is not None else {}),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port in use. Raises OSError if it cannot be opened."""
        with ports.opening(host, port), contextlib.ExitStack() as failing:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = failing.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP.items():
                if hasattr(socket, name):  # platforms differ
                    listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            listening.bind(address)
            failing.pop_all()
        port = listening.getsockname()[1]
        if self._own_hosts is not None and is_loopback(str(address[0])):
            self._guard.hosts = frozenset(("localhost", "127.0.0.1", "::1", str(address[0]), host, *self._own_hosts))
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)
        if self._server.started:
            listening.listen(_WAITING_CONNECTIONS)
        return port

    async def stop(self) -> None:
        """Stops listening. Active calls have a second to end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
