"""Every protocol on one engine: they start, drain and stop together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from server.door import Door
from server.grpc_server import GrpcServer

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_STOPPING = "the server is stopping"


class Surface:
    """What callers of one engine reach, whatever they speak.

    Args:
      engine: a started engine.
      name: what the model is called.
      version: of the server.
      health_seconds: how often health is compared with the engine's.
    """

    def __init__(self, engine: Engine, *, name: str, version: str, health_seconds: float = 0.5) -> None:
        self.door = Door(engine)
        self._grpc = GrpcServer(self.door, name=name, version=version)
        self._health_seconds = health_seconds
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which matters when 0 was asked for. Raises RuntimeError if it cannot be had."""
        port = await self._grpc.start(host, port)
        self._watch = asyncio.create_task(self._watch_engine())
        return port

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
        await self._grpc.stop()

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
