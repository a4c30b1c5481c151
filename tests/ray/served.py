"""Serves an application of this process through Ray Serve: its proxy, and the ingress of a deployment.

The deployment's application passes the ASGI messages of each call to this process, where the tests' engine is.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import pickle
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import Message, Receive, Scope, Send

from server.ray.replica import without_request_id
from tests.ray.local_cluster import Cluster

_PLAIN = (str, bytes, int, list, tuple, type(None))  # what a scope has that goes to another process


async def _read(reader: asyncio.StreamReader) -> Any:
    (size,) = struct.unpack("!I", await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(size))


async def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    packed = pickle.dumps(message)
    writer.write(struct.pack("!I", len(packed)) + packed)
    await writer.drain()


class _Passing:
    """The application of the deployment."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            return await send({"type": "lifespan.shutdown.complete"})
        reader, writer = await asyncio.open_unix_connection(self._socket)
        passing = asyncio.create_task(_pass_on(receive, writer))
        try:
            await _write(writer, {key: value for key, value in scope.items() if isinstance(value, _PLAIN)})
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    await send(await _read(reader))
        finally:
            passing.cancel()
            writer.close()


async def _pass_on(receive: Receive, writer: asyncio.StreamWriter) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
        await _write(writer, message)


@functools.cache
def deployed() -> tuple[Path, int]:
    """The socket at which the deployment calls this process, and the port of Serve's proxy.

    The first call starts a cluster, and must be made by the main thread.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    cluster = Cluster()
    atexit.register(cluster.close)
    socket = Path(folder.name) / "calls"

    @serve.deployment(max_ongoing_requests=1000)
    @serve.ingress(_Passing(str(socket)))
    class Passing:
        pass

    serve.run(Passing.bind(), route_prefix="/")
    return socket, int(cluster.url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def under_ray(app: Any) -> AsyncIterator[int]:
    socket, port = deployed()
    served = without_request_id(app)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def receive() -> Message:
            try:
                return await _read(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return {"type": "http.disconnect"}

        try:
            await served(await _read(reader), receive, functools.partial(_write, writer))
        finally:
            writer.close()

    socket.unlink(missing_ok=True)
    async with app.lifespan(), await asyncio.start_unix_server(answer, socket):
        yield port
