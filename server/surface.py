"""Every protocol on one engine: they start, drain and stop together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from server.door import Door
from server.grpc_server import GrpcServer
from server.http.app import make_app
from server.http.listener import HttpListener
from server.http.template import ChatTemplate

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_STOPPING = "the server is stopping"


class Surface:
    """What callers of one engine reach, whatever they speak.

    Args:
      engine: a started engine.
      name: what the model is called.
      version: of the server.
      chat_template: the checkpoint's, if it has one.
      health_seconds: how often health is compared with the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        version: str,
        chat_template: ChatTemplate | None = None,
        health_seconds: float = 0.5,
    ) -> None:
        self.door = Door(engine)
        self._grpc = GrpcServer(self.door, name=name, version=version)
        self._http = HttpListener(make_app(self.door, name=name, version=version, chat_template=chat_template))
        self._health_seconds = health_seconds
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, http_port: int | None) -> tuple[int, int | None]:
        """Listens for gRPC on one port and for HTTP on another, or not at all.

        Returns:
          The ports, which matter when 0 was asked for.

        Raises:
          RuntimeError, OSError: a port cannot be had.
        """
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
        self.door.close(_STOPPING)
        await self._grpc.announce_end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.door.idle(), seconds)
        left = self.door.num_alive
        await self.stop()
        return left

    async def stop(self) -> None:
        """Ends what is under way with UNAVAILABLE, and stops listening."""
        self.door.close(_STOPPING)
        self.door.fail_all("the server stopped before the answer was whole")
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(self._grpc.stop(), self._http.stop())

    async def _watch_engine(self) -> None:
        """Has health follow the engine, and nobody wait for an engine that will never answer."""
        healthy = True
        while True:
            if self.door.engine.is_healthy != healthy:
                healthy = not healthy
                await self._grpc.set_health(healthy)
            if not healthy:
                self.door.fail_all("the engine has failed")
            await asyncio.sleep(self._health_seconds)
