"""The gRPC server: the service with health checks, reflection, limits, and an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from server.proto.jaxserve.v1 import inference_pb2, inference_pb2_grpc
from server.service import InferenceService

if TYPE_CHECKING:
    from jaxserve.engine import Engine

MAX_MESSAGE_BYTES = 4 * 2**20  # of a request
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # answers are bounded by the context
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss
    # A caller whose machine has vanished without a word is noticed, and its slots come back.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class GrpcServer:
    """One engine on one port.

    Args:
      engine: a started engine.
      name: what GetModel calls the model.
      version: of the server.
      health_seconds: how often health is compared with the engine's.
    """

    def __init__(self, engine: Engine, *, name: str, version: str, health_seconds: float = 0.5) -> None:
        self.service = InferenceService(engine, name=name, version=version)
        self._engine = engine
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._health_seconds = health_seconds
        self._server = grpc.aio.server(options=_OPTIONS)
        self._watch: asyncio.Task[None] | None = None
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which matters when 0 was asked for. Raises RuntimeError if it cannot be had."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        port = self._server.add_insecure_port(address)
        await self._set_health(self._engine.is_healthy)
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_engine())
        return port

    async def drain(self, seconds: float) -> int:
        """Refuses new generations, gives those under way this long, then stops.

        Returns:
          How many had to be cut short.
        """
        self.service.close("the server is stopping")
        await self._health.enter_graceful_shutdown()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.service.idle(), seconds)
        left = self.service.num_alive
        await self.stop()
        return left

    async def stop(self) -> None:
        """Ends what is under way with UNAVAILABLE, and stops listening."""
        self.service.close("the server is stopping")
        self.service.fail_all("the server stopped before the answer was whole")
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop(grace=1.0)

    async def _watch_engine(self) -> None:
        """Has health follow the engine, and nobody wait for an engine that will never answer."""
        healthy = True
        while True:
            if self._engine.is_healthy != healthy:
                healthy = not healthy
                await self._set_health(healthy)
            if not healthy:
                self.service.fail_all("the engine has failed")
            await asyncio.sleep(self._health_seconds)

    async def _set_health(self, healthy: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
