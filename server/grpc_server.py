"""The gRPC server: the service with health checks, reflection, limits, and an end in good order."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from server.door import Door
from server.proto.jaxserve.v1 import inference_pb2, inference_pb2_grpc
from server.service import InferenceService

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
    """The service on one port.

    Args:
      name: what GetModel calls the model.
      version: of the server.
    """

    def __init__(self, door: Door, *, name: str, version: str) -> None:
        self._engine = door.engine
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server = grpc.aio.server(options=_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(door, name=name, version=version), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port, which matters when 0 was asked for. Raises RuntimeError if it cannot be had."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        port = self._server.add_insecure_port(address)
        await self.set_health(self._engine.is_healthy)
        await self._server.start()
        return port

    async def set_health(self, healthy: bool) -> None:
        """What the health service answers from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def announce_end(self) -> None:
        """Has the health service answer NOT_SERVING for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Stops listening; calls under way have a second to end."""
        await self._server.stop(grace=1.0)
