"""The server: every protocol on one engine, its health checks and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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

_STOPPING = "the server is stopping"
_RECOVERY_SECONDS = 3.0  # after its deadline, in which an engine may recover


class ServerApp:
    """Serves gRPC and HTTP for one engine; the protocols start, drain and stop together.

    Args:
      engine: a started engine, or one that is still starting.
      name: served name of the model.
      aliases: other names that calls may give it.
      version: version of the server.
      tls: None listens without encryption.
      allowed_origins: origins of web pages that may call over HTTP, with commas between them, or "*"; None allows none.
      keys: API keys; callers must send one of them. None accepts every caller.
      stall_seconds: seconds that an engine with work may take for an iteration; None derives them from the measured
        bucket costs.
      health_seconds: interval of the health checks.
      on_wedged: called with the reason when the engine has missed its deadline for too long; None fails the active
        calls.
      wedged_seconds: seconds without an iteration after which that is so; None uses the deadline plus a margin. An
        engine on several hosts reports its own failures, so it gets more time.
      kv_events: whether to collect KV events, for routers.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        name: str,
        version: str,
        aliases: Sequence[str] = (),
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        allowed_origins: str | None = None,
        stall_seconds: float | None = None,
        health_seconds: float = 0.5,
        on_wedged: Callable[[str], None] | None = None,
        wedged_seconds: Callable[[], float] | None = None,
        kv_events: bool = False,
    ) -> None:
        self.handler = RequestHandler(
            engine,
            model_name=name,
            aliases=aliases,
            version=version,
            tenants=lambda: keys.tenants if keys is not None else {},
        )
        self.handler.kv_events = KvEventLog(engine) if kv_events else None
        self._grpc = GrpcServer(self.handler, tls=tls, keys=keys)
        self.metrics = Metrics(engine, model=name, healthy=lambda: self.handler.unhealthy_reason is None)
        self.handler.observers.append(self.metrics)
        live = LiveStats(engine)
        self.handler.observers.append(live)
        app = make_app(self.handler, self.metrics, live)
        guarded = KeyMiddleware(app, keys, OPEN_CALLS) if keys is not None else app
        own_hosts = hosts_of(allowed_origins) if keys is None else None
        self._http = HttpListener(with_origins(guarded, allowed_origins), tls, own_hosts=own_hosts)
        self._watchdog = EngineWatchdog(engine, deadline=stall_seconds, interval=health_seconds)
        self._health_seconds, self._on_wedged, self._wedged_seconds = health_seconds, on_wedged, wedged_seconds
        self._watch: asyncio.Task[None] | None = None
        self._reported_problem: str | None = None  # at the last health check
        self._has_served = False

    async def start(self, host: str, port: int, http_port: int | None) -> tuple[int, int | None]:
        """Listens for gRPC on `port` and for HTTP on `http_port`, unless that is None.

        Returns:
          The ports in use (port 0 picks a free one).

        Raises:
          RuntimeError, OSError: a port cannot be opened.
        """
        self._reported_problem = self._watchdog.problem()
        self._has_served = self._reported_problem is None
        port = await self._grpc.start(host, port)
        if http_port is not None:
            http_port = await self._http.start(host, http_port)
        self._watch = asyncio.create_task(self._watch_engine())
        return port, http_port

    async def drain(self, seconds: float) -> int:
        """Refuses new calls, waits at most `seconds` for active ones, then stops.

        Returns:
          The number of requests that did not finish.
        """
        self.handler.close(_STOPPING)
        await self._grpc.announce_end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.handler.calls.wait_until_none(), seconds)
        left = self.handler.calls.num_requests
        await self.stop()
        return left

    async def stop(self) -> None:
        """Ends active calls with UNAVAILABLE and stops listening."""
        self.handler.close(_STOPPING)
        self.handler.calls.fail_all("the server stopped before the answer was whole")
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(self._grpc.stop(), self._http.stop())

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
        await self._grpc.set_health(problem is None)
