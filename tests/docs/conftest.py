"""The demo model's engine, and a server on it, for everything that the pages show."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from server.app import ServerApp


@contextmanager
def served(engine: Engine, **settings: Any) -> Iterator[tuple[int, int]]:
    """The ports of gRPC and HTTP of a server on an engine, in a thread of its own."""
    ports: asyncio.Future[Any] | Any = None
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        nonlocal ports
        # An engine of the tests compiles at its first iterations, which may take as long as they like.
        app = ServerApp(engine, name="demo", version="1.2.3", **{"stall_seconds": 1e9} | settings)
        ports = await app.start("127.0.0.1", 0, 0)
        ready.set()
        await asyncio.to_thread(over.wait)
        await app.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield ports
    finally:
        over.set()
        thread.join(20)


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    config = EngineConfig(buckets=(8, 32), slots=4096, max_rows=4, max_context=256)
    with Engine.from_checkpoint(DEMO_MODEL, config) as engine:
        yield engine
