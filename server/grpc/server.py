"""The gRPC server: services, health checks, reflection, limits and a graceful stop."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from server import ports
from server.auth import OPEN_SERVICES, ApiKeys, KeyInterceptor
from server.compat import kserve, vllm
from server.grpc import calls
from server.grpc.receive import MessageInterceptor
from server.grpc.service import InferenceService
from server.handler import RequestHandler
from server.limits import MAX_BODY_BYTES
from server.proto.inference import open_inference_grpc_pb2, open_inference_grpc_pb2_grpc
from server.proto.jaxserve.v1 import inference_pb2, inference_pb2_grpc
from server.proto.vllm.grpc.engine import vllm_engine_pb2, vllm_engine_pb2_grpc
from server.tls import Tls

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ROUTER_SERVICES = (  # protocols of other projects, for their routers
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name,
    open_inference_grpc_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
_QUEUED = (
    *(f"/{SERVICE}/Generate", f"/{SERVICE}/GenerateStream"),
    *(f"/{ROUTER_SERVICES[0]}/Generate", f"/{ROUTER_SERVICES[1]}/ModelInfer"),
)
IDLE_SECONDS = 600.0  # after which a connection without a call is closed; clients connect again by themselves
_MAX_PENDING = 65_536
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", -1),  # answers are bounded by the context
    ("grpc.max_metadata_size", 16 * 2**10),
    ("grpc.absolute_max_metadata_size", 32 * 2**10),
    ("grpc.max_concurrent_streams", 4096),  # of one connection
    # Calls that the event loop has not reached yet. Beyond its default bounds (1,000 and 3,000), grpc drops some at
    # random with CANCELLED and no message. Instead, the handler refuses with a message; the option above bounds each
    # connection.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    ("grpc.so_reuseport", 0),  # a second server on the port fails, instead of getting a part of the calls
    # Detects a client whose machine has gone, so that its slots are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class GrpcServer:
    """The services on one port.

    Args:
      tls: None listens without encryption.
      keys: callers must send one of them; None requires none.
    """

    def __init__(self, handler: RequestHandler, *, tls: Tls | None = None, keys: ApiKeys | None = None) -> None:
        self._handler = handler
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._tls = tls
        interceptors: list[grpc.aio.ServerInterceptor] = [
            calls.TraceInterceptor(),
            calls.RateInterceptor(handler, _QUEUED),
            MessageInterceptor(handler, (SERVICE, *ROUTER_SERVICES)),
        ]
        if keys is not None:
            interceptors.insert(0, KeyInterceptor(keys, OPEN_SERVICES))
        options = (*_OPTIONS, ("grpc.max_connection_idle_ms", round(1e3 * IDLE_SECONDS)))
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        for add, service in (
            (inference_pb2_grpc.add_InferenceServicer_to_server, InferenceService(handler)),
            (vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, vllm.VllmEngineService(handler)),
            (
                open_inference_grpc_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
                kserve.OpenInferenceService(handler),
            ),
            (health_pb2_grpc.add_HealthServicer_to_server, self._health),
        ):
            add(service, self._server)
        reflection.enable_server_reflection(
            (SERVICE, *ROUTER_SERVICES, *OPEN_SERVICES, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port in use. Raises OSError if it cannot be opened."""
        ports.check_free(host, port)  # grpc would log, and not tell why
        where = ports.address(host, port)
        with ports.opening(host, port):
            if self._tls is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, self._tls.grpc_credentials())
        await self.set_health(self._handler.unhealthy_reason is None)
        await self._server.start()
        return port

    async def set_health(self, healthy: bool) -> None:
        """Sets what the health service answers."""
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE, *ROUTER_SERVICES):
            await self._health.set(service, status)

    async def announce_end(self) -> None:
        """Makes the health service answer NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Stops listening. Active calls have a second to end."""
        await self._server.stop(grace=1.0)
