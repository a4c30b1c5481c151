"""The Open Inference Protocol (version 2) over gRPC: liveness, readiness and metadata."""

from __future__ import annotations

from typing import Any

from server.call import new_id
from server.errors import ApiError, ErrorKind
from server.grpc import calls
from server.handler import RequestHandler
from server.proto.inference import open_inference_grpc_pb2 as pb
from server.proto.inference import open_inference_grpc_pb2_grpc

PLATFORM = "jax_xla"  # as the protocol names platforms: project_format


class OpenInferenceService(open_inference_grpc_pb2_grpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService` without inference on tensors.

    Args:
      name: of the served model.
      version: of the server.
    """

    def __init__(self, handler: RequestHandler, *, name: str, version: str) -> None:
        self._handler, self._name, self._version = handler, name, version

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._handler.unhealthy_reason is None)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        async with calls.answering(self._handler, context, new_id()):
            check_model(self._name, request.name, request.version)
            return pb.ModelReadyResponse(ready=self._handler.unhealthy_reason is None)
        raise AssertionError  # `answering` has raised

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**server_metadata(self._version))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        async with calls.answering(self._handler, context, new_id()):
            check_model(self._name, request.name, request.version)
            return pb.ModelMetadataResponse(**model_metadata(self._name))
        raise AssertionError

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        async with calls.answering(self._handler, context, new_id()):
            raise infer_error()
        raise AssertionError


def check_model(served: str, name: str, version: str) -> None:
    """Raises ApiError (NOT_FOUND) for a model or a version that is not served."""
    if name != served:
        raise ApiError(ErrorKind.NOT_FOUND, f"name: {name[:100]!r} is not served here; {served!r} is", field="name")
    if version:
        raise ApiError(
            ErrorKind.NOT_FOUND,
            f"version: {served!r} has no versions, so not {version[:100]!r}; leave it out",
            field="version",
        )


def server_metadata(version: str) -> dict[str, Any]:
    """Name and version of the server."""
    return {"name": "jaxserve", "version": version, "extensions": []}


def model_metadata(name: str) -> dict[str, Any]:
    """Metadata of the model, without tensors: text goes in and out by other calls."""
    return {"name": name, "versions": [], "platform": PLATFORM, "inputs": [], "outputs": []}


def infer_error() -> ApiError:
    """The error for inference on tensors."""
    return ApiError(
        ErrorKind.UNIMPLEMENTED,
        "inference on tensors is not served; ask for text with jaxserve.v1.Inference/Generate or "
        "vllm.grpc.engine.VllmEngine/Generate over gRPC, or POST /v1/completions over HTTP",
    )
