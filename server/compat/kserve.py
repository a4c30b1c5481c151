"""The Open Inference Protocol v2 over gRPC and HTTP: health, metadata, text inference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.routing import Route

from server.call import new_id
from server.compat import kserve_infer, kserve_messages
from server.compat.kserve_messages import GenerateBody, HttpInference
from server.compat.kserve_tensors import Tensor
from server.errors import ApiError, ErrorKind
from server.grpc.calls import answered, answering, deadline
from server.handler import RequestHandler
from server.http.call import Endpoint, HttpCall, HttpError
from server.proto.inference import open_inference_grpc_pb2 as pb
from server.proto.inference import open_inference_grpc_pb2_grpc

PLATFORM = "jax_xla"  # the protocol names platforms as project_format
_MODEL = "/v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_EXTENSIONS = ("binary_tensor_data", "generate", "model_streaming")
_MAX_AT_ONCE = 256  # requests of one stream


class OpenInferenceService(open_inference_grpc_pb2_grpc.GRPCInferenceServiceServicer):
    """`inference.GRPCInferenceService`."""

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
        _check_model(self._handler, request.model_name, request.model_version)
        asked = kserve_messages.of_message(request)
        call = asked.call(request.id or new_id(), "grpc", deadline(context))
        tensors = await kserve_infer.whole(self._handler, asked, call)
        return kserve_messages.to_message(request, self._handler.model_name, tensors)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        answers: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue()
        free, unread = asyncio.Semaphore(_MAX_AT_ONCE), asyncio.Semaphore(_MAX_AT_ONCE)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                async for response in self._parts(request, deadline(context)):
                    await unread.acquire()
                    answers.put_nowait(response)
            finally:
                free.release()

        async def read() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    async for request in request_iterator:
                        await free.acquire()
                        tasks.create_task(answer(request))
            finally:
                answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await answers.get()) is not None:
                unread.release()
                yield response
            async with answering(self._handler, context, new_id()):
                try:
                    await reading
                except ExceptionGroup as problems:  # of the iterator: `answer` raises nothing
                    raise problems.exceptions[0] from None
        finally:
            reading.cancel()

    async def _parts(
        self, request: pb.ModelInferRequest, ends: float | None
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """The responses to one request of a stream; an error is one too."""
        call_id = request.id or new_id()
        try:
            with self._handler.answering(call_id):
                _check_model(self._handler, request.model_name, request.model_version)
                asked = kserve_messages.of_message(request)
                async for tensors, is_last in kserve_infer.parts(
                    self._handler, asked, asked.call(call_id, "grpc", ends)
                ):
                    response = kserve_messages.to_message(request, self._handler.model_name, tensors)
                    response.parameters["triton_final_response"].bool_param = is_last
                    yield pb.ModelStreamInferResponse(infer_response=response)
        except ApiError as refusal:
            response = pb.ModelInferResponse(id=request.id)
            yield pb.ModelStreamInferResponse(error_message=str(refusal), infer_response=response)


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
        if http_call.content_type not in ("", "application/json", "application/octet-stream"):
            raise HttpError(415, "the body must be application/json or application/octet-stream")
        inference = await HttpInference.of(http_call)
        call = inference.asked.call(http_call.id, "http")
        await inference.answer(http_call, handler.model_name, await kserve_infer.whole(handler, inference.asked, call))

    async def generate(http_call: HttpCall) -> None:
        _check(http_call)
        body = await http_call.body(GenerateBody)
        asked = body.asked
        (text,) = await kserve_infer.whole(handler, asked, asked.call(http_call.id, "http"))
        await http_call.json(_text(body, text))

    async def generate_stream(http_call: HttpCall) -> None:
        _check(http_call)
        body = await http_call.body(GenerateBody)
        asked = body.asked
        async for (text,), _ in kserve_infer.parts(handler, asked, asked.call(http_call.id, "http")):
            await http_call.events([_text(body, text)])
        await http_call.end()

    def _text(body: GenerateBody, text: Tensor) -> dict[str, Any]:
        head = {"model_name": handler.model_name} | ({} if body.id is None else {"id": body.id})
        return head | {text.name: text.values[0]}

    def _check(http_call: HttpCall) -> None:
        _check_model(handler, http_call.path_params["name"], http_call.path_params.get("version", ""))

    calls = [("GET", "/v2", server), ("GET", "/v2/", server)]
    calls += [("GET", "/v2/health/live", live), ("GET", "/v2/health/ready", ready)]
    for path in (_MODEL, _VERSION):
        calls += [("GET", path, model), ("GET", f"{path}/ready", model_ready)]
        calls += [("POST", f"{path}/infer", infer), ("POST", f"{path}/generate", generate)]
        calls += [("POST", f"{path}/generate_stream", generate_stream)]
    return [
        Route(path, Endpoint(handler, handle, error_of, queued=method == "POST"), methods=[method])
        for method, path, handle in calls
    ]


def _check_model(handler: RequestHandler, name: str, version: str) -> None:
    """Raises ApiError (NOT_FOUND) for a model or a version that is not served."""
    served = handler.model_name
    if name not in handler.model_names:
        raise ApiError(ErrorKind.NOT_FOUND, f"name: {name[:100]!r} is not served here; {served!r} is", field="name")
    if version:
        text = f"version: {served!r} has no versions, so not {version[:100]!r}; leave it out"
        raise ApiError(ErrorKind.NOT_FOUND, text, field="version")


def _server_metadata(handler: RequestHandler) -> dict[str, Any]:
    return {"name": "jaxserve", "version": handler.version, "extensions": list(_EXTENSIONS)}


def _model_metadata(handler: RequestHandler) -> dict[str, Any]:
    inputs, outputs = list(kserve_infer.INPUTS), list(kserve_infer.OUTPUTS)
    return {"name": handler.model_name, "versions": [], "platform": PLATFORM, "inputs": inputs, "outputs": outputs}
