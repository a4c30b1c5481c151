"""The server of one engine: an ASGI application, or ports for every protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

import jaxserve
from server.auth import OPEN_CALLS, ApiKeys, KeyMiddleware
from server.grpc.server import GrpcServer
from server.handler import RequestHandler
from server.http.app import hosts_of, make_app, with_origins
from server.http.listener import HttpListener
from server.kv_events import KvEventLog
from server.live import LiveStats
from server.metrics import Metrics
from server.tls import Tls
from server.watchdog import EngineWatchdog

if TYPE_CHECKING:
    from server.engine_client import EngineClient

_log = logging.getLogger(__name__)

_NOT_STARTED = "the application has not started: its server must run its lifespan"
_STOPPING = "the server is stopping"
_RECOVERY_SECONDS = 3.0  # after its deadline, in which an engine may recover


def create_app(
    engine: EngineClient,
    *,
    name: str,
    version: str | None = None,
    aliases: Sequence[str] = (),
    keys: ApiKeys | None = None,
    allowed_origins: str | None = None,
    drain_seconds: float = 30.0,
    stall_seconds: float | None = None,
    health_seconds: float = 0.5,
    on_wedged: Callable[[str], None] | None = None,
    wedged_seconds: Callable[[], float] | None = None,
    kv_events: bool = False,
) -> Application:
    """The HTTP API of one engine as an ASGI application, which needs no socket and no signal.

    Any ASGI server can serve it. It may be made before an event loop runs.

    Args:
      engine: a `jaxserve.Engine`, which the application's lifespan starts and stops, or another that has started or is
        still starting.
      name: served name of the model.
      version: of the server; jaxserve's by default.
      aliases: other names that calls may give the model.
      keys: API keys; callers must send one of them. None accepts every caller.
      allowed_origins: origins of web pages that may call, with commas between them, or "*"; None allows none.
      drain_seconds: how long active calls may go on after the lifespan has ended.
      stall_seconds: seconds that an engine with work may take for an iteration; None derives them from the measured
        bucket costs.
      health_seconds: interval of the health checks.
      on_wedged: called with the reason when the engine has missed its deadline for too long; None fails the active
        calls.
      wedged_seconds: seconds without an iteration after which that is so; None uses the deadline plus a margin. An
        engine on several hosts reports its own failures, so it gets more time.
      kv_events: whether to collect KV events, for routers; only where an event loop already runs.
    """
    handler = RequestHandler(
        engine,
        model_name=name,
        aliases=aliases,
        version=version if version is not None else jaxserve.__version__,
        tenants=lambda: keys.tenants if keys is not None else {},
    )
    handler.kv_events = KvEventLog(engine) if kv_events else None
    handler.close(_NOT_STARTED)
    metrics = Metrics(
        engine,
        model=name,
        healthy=lambda: handler.unhealthy_reason is None,
        outstanding_seconds=handler.admission.outstanding_seconds,
    )
    live = LiveStats(engine)
    handler.observers += [metrics, live]
    routes = make_app(handler, metrics, live)
    guarded = KeyMiddleware(routes, keys, OPEN_CALLS) if keys is not None else routes
    return Application(
        with_origins(guarded, allowed_origins),
        handler,
        metrics,
        EngineWatchdog(engine, deadline=stall_seconds, interval=health_seconds),
        drain_seconds=drain_seconds,
        health_seconds=health_seconds,
        on_wedged=on_wedged,
        wedged_seconds=wedged_seconds,
    )


class Application:
    """The ASGI application that `create_app` makes: the API, health checks and drain.

    Its server runs the lifespan. Where none does, as for an application that another one mounts, run `lifespan`.

    Attributes:
      handler: handles the calls of every protocol.
      metrics: of the engine and its calls.
      on_health: called with whether the engine serves, when that changes.
    """

    def __init__(
        self,
        http: ASGIApp,
        handler: RequestHandler,
        metrics: Metrics,
        watchdog: EngineWatchdog,
        *,
        drain_seconds: float,
        health_seconds: float,
        on_wedged: Callable[[str], None] | None,
        wedged_seconds: Callable[[], float] | None,
    ) -> None:
        self.handler, self.metrics = handler, metrics
        self.on_health: Callable[[bool], Awaitable[None]] | None = None
        self._http, self._lifespan = http, Router(lifespan=lambda _: self.lifespan())
        self._watchdog = watchdog
        self._drain_seconds, self._health_seconds = drain_seconds, health_seconds
        self._on_wedged, self._wedged_seconds = on_wedged, wedged_seconds
        self._watch: asyncio.Task[None] | None = None
        self._reported_problem: str | None = None  # at the last health check
        self._has_served = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(scope, receive, send)
            case _:
                await WebSocketClose()(scope, receive, send)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Serves while the block lasts; then waits for active calls, and stops the engine."""
        engine = self.handler.engine
        with engine if isinstance(engine, AbstractContextManager) else contextlib.nullcontext():
            self.start()
            try:
                yield
            finally:
                await self.drain(self._drain_seconds)

    def start(self) -> None:
        """Takes calls and watches the engine from now on. Needs a running event loop."""
        self.handler.open()
        self._reported_problem = self._watchdog.problem()
        self._has_served = self._reported_problem is None
        self._watch = asyncio.create_task(self._watch_engine())

    async def drain(self, seconds: float) -> int:
        """Refuses new calls, waits at most `seconds` for active ones, then ends those that are left.

        Returns:
          The number of requests that did not finish.
        """
        self.handler.close(_STOPPING)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.handler.calls.wait_until_none(), seconds)
        left = self.handler.calls.num_requests
        self.stop()
        return left

    def stop(self) -> None:
        """Ends active calls with an error and watches the engine no longer."""
        self.handler.close(_STOPPING)
        self.handler.calls.fail_all("the server stopped before the answer was whole")
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_engine(self) -> None:
        while True:
            await self.check_health()
            self.handler.admission.sample()
            self.metrics.drain()
            await asyncio.sleep(self._health_seconds)

    def _is_wedged(self) -> bool:
        if self._wedged_seconds is None:
            return self._watchdog.overdue > _RECOVERY_SECONDS
        return 0 < self._watchdog.still > self._wedged_seconds()

    async def check_health(self) -> None:
        """Updates the health status; fails active calls if the engine will not recover."""
        problem, own = self._watchdog.problem(), self.handler.engine.problem
        self.handler.problem = problem if own is None else None  # the handler reads the engine's own problem itself
        if own is not None and not self.handler.engine.takes_requests:
            self.handler.calls.fail_all(own)
        if problem is not None and self._is_wedged():
            if self._on_wedged is not None:
                self._on_wedged(problem)
            else:  # nobody waits for an engine that may never return; if it does, it drops their requests
                self.handler.calls.fail_all(problem)
        before, self._reported_problem = self._reported_problem, problem
        if (problem is None) == (before is None):
            return
        if problem is not None:
            _log.error("not serving: %s", problem)
        elif self._has_served:
            _log.warning("serving again")
        self._has_served = True
        if self.on_health is not None:
            await self.on_health(problem is None)


class ServerApp:
    """Serves one engine on gRPC and HTTP ports that start, drain and stop together.

    Args:
      tls: None listens without encryption.
      allowed_origins / keys / settings: as of `create_app`.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        allowed_origins: str | None = None,
        **settings: Any,
    ) -> None:
        self.application = create_app(engine, keys=keys, allowed_origins=allowed_origins, **settings)
        self.handler, self.metrics = self.application.handler, self.application.metrics
        self._grpc = GrpcServer(self.handler, tls=tls, keys=keys)
        self.application.on_health = self._grpc.set_health
        own_hosts = hosts_of(allowed_origins) if keys is None else None
        self._http = HttpListener(self.application, tls, own_hosts=own_hosts)

    async def start(self, host: str, port: int, http_port: int | None) -> tuple[int, int | None]:
        """Listens for gRPC on `port` and for HTTP on `http_port`, unless that is None.

        Returns:
          The ports in use (port 0 picks a free one).

        Raises:
          OSError: a port cannot be opened; the message names its address.
        """
        self.application.start()
        try:
            port = await self._grpc.start(host, port)
            if http_port is not None:
                http_port = await self._http.start(host, http_port)
        except BaseException:
            await self.stop()
            raise
        return port, http_port

    async def drain(self, seconds: float) -> int:
        """Refuses new calls, waits at most `seconds` for active ones, then stops.

        Returns:
          The number of requests that did not finish.
        """
        self.handler.close(_STOPPING)
        await self._grpc.announce_end()
        left = await self.application.drain(seconds)
        await self.stop()
        return left

    async def stop(self) -> None:
        """Ends active calls with UNAVAILABLE and stops listening."""
        self.application.stop()
        await asyncio.gather(self._grpc.stop(), self._http.stop())

    async def check_health(self) -> None:
        """See `Application.check_health`."""
        await self.application.check_health()
