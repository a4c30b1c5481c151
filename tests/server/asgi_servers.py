"""Other people's ASGI servers, each of which serves an application on a free port of the running event loop."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import hypercorn.asyncio
import hypercorn.config
import uvicorn


@contextlib.asynccontextmanager
async def _under_uvicorn(app: Any) -> AsyncIterator[int]:
    with _listening() as listening:
        config = uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def _under_hypercorn(app: Any) -> AsyncIterator[int]:
    with _listening() as listening:
        config = hypercorn.config.Config()
        config.bind = [f"fd://{os.dup(listening.fileno())}"]  # which it closes
        config.graceful_timeout, config.errorlog = 1.0, None
        end = asyncio.Event()
        serving = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=end.wait))
        try:
            yield listening.getsockname()[1]
        finally:
            end.set()
            await serving


@contextlib.contextmanager
def _listening() -> Any:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        it.listen()
        yield it


def _under_ray(app: Any) -> contextlib.AbstractAsyncContextManager[int]:
    from tests.ray.served import under_ray  # which has its own environment

    return under_ray(app)


RUN = {"uvicorn": _under_uvicorn, "hypercorn": _under_hypercorn, "ray": _under_ray}
