import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxserve.config import EngineConfig
from server.app import ServerApp
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import RestartPolicy, Supervisor
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.fake_engine import WAIT_SECONDS, byte_tokenizer

STALL_SECONDS = 0.5  # the deadline of an iteration
QUICK = RestartPolicy(first_delay=0.01)


class Remote:
    """A front in this process, a fake engine in another, and clients."""

    def __init__(self, supervisor: Supervisor, engine: RemoteEngine, orders: Path) -> None:
        self.supervisor, self.engine, self._orders = supervisor, engine, orders
        self.app: ServerApp
        self.stub: Any
        self.http: httpx.AsyncClient
        self.health: Any
        self.channel: grpc.aio.Channel
        self.running: asyncio.Task[None]

    def order(self, **orders: Any) -> None:
        """What the next engine process does."""
        self._orders.write_text(json.dumps(orders))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something is so; the test's own bound ends it otherwise."""
        while not condition():
            await asyncio.sleep(0.005)

    async def until_health(self, status: str) -> None:
        """Waits until the health service says so."""
        watch = self.health.Watch(HealthCheckRequest())
        while (await watch.read()).status != HealthCheckResponse.ServingStatus.Value(status):
            pass
        watch.cancel()


@contextlib.asynccontextmanager
async def remote(
    folder: Path,
    orders: dict[str, Any],
    *,
    restarts: RestartPolicy | None,
    ready: bool = True,
    profile: str | None = None,
    **config: Any,
) -> AsyncIterator[Remote]:
    engine = RemoteEngine(EngineConfig(**{"max_rows": 4} | config), byte_tokenizer())
    path = folder / "orders.json"
    command = (sys.executable, "-m", "tests.server.fake_engine_process", str(path))
    job = EngineJob.of("fake", engine.config, profile, kv_events=True)
    supervisor = Supervisor(engine, job, restarts=restarts, command=command)
    it = Remote(supervisor, engine, path)
    it.order(**orders)
    on_wedged = supervisor.give_up if restarts is not None else None
    it.app = ServerApp(
        engine,
        name="echo",
        version="1.2.3",
        health_seconds=0.02,
        stall_seconds=STALL_SECONDS,
        on_wedged=on_wedged,
        kv_events=True,
    )
    port, http_port = await it.app.start("127.0.0.1", 0, 0)
    it.running = asyncio.create_task(supervisor.run())
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=WAIT_SECONDS) as it.http,
    ):
        it.channel, it.stub, it.health = channel, InferenceStub(channel), HealthStub(channel)
        try:
            if ready:
                await supervisor.ready.wait()
                await it.until_health("SERVING")
            yield it
        finally:
            await it.app.stop()
            await supervisor.close()
            await asyncio.wait([it.running])
            it.running.exception()  # which is the test's to look at


Scenario = Callable[[Remote], Coroutine[Any, Any, None]]


@pytest.fixture
def run_remote(tmp_path: Path) -> Callable[..., None]:
    """Runs a coroutine with a front and a fake engine's process: `run_remote(scenario, wedged_after=3, ...)`."""

    def run(
        scenario: Scenario,
        restarts: RestartPolicy | None = QUICK,
        ready: bool = True,
        profile: str | None = None,
        config: dict[str, Any] | None = None,
        **orders: Any,
    ) -> None:
        async def bounded() -> None:
            async with (
                asyncio.timeout(3 * WAIT_SECONDS),
                remote(tmp_path, orders, restarts=restarts, ready=ready, profile=profile, **(config or {})) as it,
            ):
                await scenario(it)

        asyncio.run(bounded())

    return run
