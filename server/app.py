"""Every protocol on one engine: they start, drain and stop together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.auth import ApiKeys, KeyMiddleware
from server.grpc.server import GrpcServer
from server.handler import RequestHandler
from server.http.app import OPEN_CALLS, make_app
from server.http.listener import HttpListener
from server.live import Live
from server.metrics import Metrics
from server.tls import Tls
from server.watchdog import Watchdog

if TYPE_CHECKING:
    from server.served_engine import ServedEngine

_log = logging.getLogger(__name__)

_STOPPING = "the server is stopping"
_PATIENCE = 3.0  # seconds behind its deadline that an engine may come back in


class ServerApp:
    """What callers of one engine reach, whatever they speak.

    Args:
      engine: a started engine, or one that will be ready before long.
      name: what the model is called.
      version: of the server.
      tls: None listens without encryption.
      keys: one of which callers must show; None asks for none.
      stall_seconds: how long the engine may have work and complete no iteration; None goes by what the iteration that
        is due was measured to take.
      health_seconds: how often the engine is looked at.
      on_wedged: told why when the engine has been behind its deadline for so long that it is given up; None leaves it
        alone, and it serves again should it come back.
      wedged_seconds: how long an engine that has completed no iteration is given for that; None goes by its deadline.
        One of several hosts knows more of what is wrong with it, and says so unless it is stopped itself.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        name: str,
        version: str,
        tls: Tls | None = None,
        keys: ApiKeys | None = None,
        stall_seconds: float | None = None,
        health_seconds: float = 0.5,
        on_wedged: Callable[[str], None] | None = None,
        wedged_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.handler = RequestHandler(engine, tenants=lambda: keys.tenants if keys is not None else {})
        self._grpc = GrpcServer(self.handler, name=name, version=version, tls=tls, keys=keys)
        self.metrics = Metrics(engine, model=name, healthy=lambda: self.handler.unhealthy_reason is None)
        self.handler.observers.append(self.metrics)
        live = Live(engine)
        self.handler.observers.append(live)
        app = make_app(self.handler, self.metrics, live, name=name, version=version)
        self._http = HttpListener(KeyMiddleware(app, keys, OPEN_CALLS) if keys is not None else app, tls)
        self._watchdog = Watchdog(engine, deadline=stall_seconds, interval=health_seconds)
        self._health_seconds, self._on_wedged, self._wedged_seconds = health_seconds, on_wedged, wedged_seconds
        self._watch: asyncio.Task[None] | None = None
        self._told: str | None = None  # by health, of what keeps the engine from serving
        self._has_served = False

    async def start(self, host: str, port: int, http_port: int | None) -> tuple[int, int | None]:
        """Listens for gRPC on one port and for HTTP on another, or not at all.

        Returns:
          The ports, which matter when 0 was asked for.

        Raises:
          RuntimeError, OSError: a port cannot be had.
        """
        self._told = self._watchdog.problem()
        self._has_served = self._told is None
        port = await self._grpc.start(host, port)
        if http_port is not None:
            http_port = await self._http.start(host, http_port)
        self._watch = asyncio.create_task(self._watch_engine())
        return port, http_port

    async def drain(self, seconds: float) -> int:
        """Refuses new calls, gives those under way this long, then stops.

        Returns:
          How many requests had to be cut short.
        """
        self.handler.close(_STOPPING)
        await self._grpc.announce_end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.handler.idle(), seconds)
        left = self.handler.num_alive
        await self.stop()
        return left

    async def stop(self) -> None:
        """Ends what is under way with UNAVAILABLE, and stops listening."""
        self.handler.close(_STOPPING)
        self.handler.fail_all("the server stopped before the answer was whole")
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(self._grpc.stop(), self._http.stop())

    async def _watch_engine(self) -> None:
        while True:
            await self.look()
            self.handler.admission.sample()
            self.metrics.drain()
            await asyncio.sleep(self._health_seconds)

    def _is_wedged(self) -> bool:
        if self._wedged_seconds is None:
            return self._watchdog.overdue > _PATIENCE
        return 0 < self._watchdog.still > self._wedged_seconds()

    async def look(self) -> None:
        """Has health follow the engine now, and nobody wait for an engine that will never answer."""
        problem, own = self._watchdog.problem(), self.handler.engine.problem
        self.handler.problem = problem if own is None else None  # of its own one the engine is asked when a call comes
        if own is not None and not self.handler.engine.takes_requests:
            self.handler.fail_all(own)
        if problem is not None and self._on_wedged is not None and self._is_wedged():
            self._on_wedged(problem)
        before, self._told = self._told, problem
        if (problem is None) == (before is None):
            return
        if problem is not None:
            _log.error("not serving: %s", problem)
        elif self._has_served:
            _log.warning("serving again")
        self._has_served = True
        await self._grpc.set_health(problem is None)
