"""The Open Inference Protocol (version 2): liveness, readiness and metadata, over gRPC and HTTP."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from server.errors import ApiError, ErrorKind
from server.grpc.calls import answered
from server.handler import RequestHandler
from server.http.call import Endpoint, HttpCall
from server.proto.inference import open_inference_grpc_pb2 as pb
from server.proto.inference import open_inference_grpc_pb2_grpc

PLATFORM = "jax_xla"  # the protocol names platforms as project_format
_MODEL = "/v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_NO_TENSORS = (
    "inference on tensors is not served; ask for text with jaxserve.v1.Inference/Generate or "
    "vllm.grpc.engine.VllmEngine/Generate over gRPC, or POST /v1/completions over HTTP"
)


class OpenInferenceService(open_inference_grpc_pb2_grpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService` without inference on tensors."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._handler.unhealthy_reason is None)

    @answered
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        _check_model(self._handler, request.name, request.version)
        return pb.ModelReadyResponse(ready=self._handler.unhealthy_reason is None)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**_server_metadata(self._handler))

    @answered
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        _check_model(self._handler, request.name, request.version)
        return pb.ModelMetadataResponse(**_model_metadata(self._handler))

    @answered
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        raise ApiError(ErrorKind.UNIMPLEMENTED, _NO_TENSORS)


def error_of(refusal: ApiError) -> dict[str, Any]:
    return {"error": str(refusal)}


def routes(handler: RequestHandler) -> list[Route]:
    async def live(http_call: HttpCall) -> None:
        await http_call.json({"live": True})

    async def ready(http_call: HttpCall) -> None:
        is_ready = handler.unhealthy_reason is None
        await http_call.json({"ready": is_ready}, 200 if is_ready else 503)

    async def server(http_call: HttpCall) -> None:
        await http_call.json(_server_metadata(handler))

    async def model_ready(http_call: HttpCall) -> None:
        _check(http_call)
        is_ready = handler.unhealthy_reason is None
        await http_call.json({"name": handler.model_name, "ready": is_ready}, 200 if is_ready else 503)

    async def model(http_call: HttpCall) -> None:
        _check(http_call)
        await http_call.json(_model_metadata(handler))

    async def infer(http_call: HttpCall) -> None:
        _check(http_call)
        raise ApiError(ErrorKind.UNIMPLEMENTED, _NO_TENSORS)

    def _check(http_call: HttpCall) -> None:
        _check_model(handler, http_call.path_params["name"], http_call.path_params.get("version", ""))

    calls = [("GET", "/v2", server), ("GET", "/v2/", server)]
    calls += [("GET", "/v2/health/live", live), ("GET", "/v2/health/ready", ready)]
    for path in (_MODEL, _VERSION):
        calls += [("GET", path, model), ("GET", f"{path}/ready", model_ready), ("POST", f"{path}/infer", infer)]
    return [Route(path, Endpoint(handler, handle, error_of), methods=[method]) for method, path, handle in calls]


def _check_model(handler: RequestHandler, name: str, version: str) -> None:
    """Raises ApiError (NOT_FOUND) for a model or a version that is not served."""
    served = handler.model_name
    if name != served:
        raise ApiError(ErrorKind.NOT_FOUND, f"name: {name[:100]!r} is not served here; {served!r} is", field="name")
    if version:
        text = f"version: {served!r} has no versions, so not {version[:100]!r}; leave it out"
        raise ApiError(ErrorKind.NOT_FOUND, text, field="version")


def _server_metadata(handler: RequestHandler) -> dict[str, Any]:
    return {"name": "jaxserve", "version": handler.version, "extensions": []}


def _model_metadata(handler: RequestHandler) -> dict[str, Any]:
    """Metadata of the model, without tensors: text goes in and out by other calls."""
    return {"name": handler.model_name, "versions": [], "platform": PLATFORM, "inputs": [], "outputs": []}
