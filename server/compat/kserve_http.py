"""The Open Inference Protocol (version 2) over HTTP: `/v2` and the paths below it."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from server.compat.kserve_grpc import check_model, infer_error, model_metadata, server_metadata
from server.errors import ApiError
from server.handler import RequestHandler
from server.http.call import Endpoint, HttpCall

_MODEL = "/v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"


def error_of(refusal: ApiError) -> dict[str, Any]:
    """An error as the JSON of the protocol."""
    return {"error": str(refusal)}


def routes(handler: RequestHandler, name: str, version: str) -> list[Route]:
    """The routes of the protocol.

    Args:
      name: what the model is called.
      version: of the server.
    """

    async def live(http_call: HttpCall) -> None:
        await http_call.json({"live": True})

    async def ready(http_call: HttpCall) -> None:
        is_ready = handler.unhealthy_reason is None
        await http_call.json({"ready": is_ready}, 200 if is_ready else 503)

    async def server(http_call: HttpCall) -> None:
        await http_call.json(server_metadata(version))

    async def model_ready(http_call: HttpCall) -> None:
        _check(http_call)
        is_ready = handler.unhealthy_reason is None
        await http_call.json({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    async def model(http_call: HttpCall) -> None:
        _check(http_call)
        await http_call.json(model_metadata(name))

    async def infer(http_call: HttpCall) -> None:
        _check(http_call)
        raise infer_error()

    def _check(http_call: HttpCall) -> None:
        check_model(name, http_call.path_params["name"], http_call.path_params.get("version", ""))

    calls = [("GET", "/v2", server), ("GET", "/v2/", server)]
    calls += [("GET", "/v2/health/live", live), ("GET", "/v2/health/ready", ready)]
    for path in (_MODEL, _VERSION):
        calls += [("GET", path, model), ("GET", f"{path}/ready", model_ready), ("POST", f"{path}/infer", infer)]
    return [Route(path, Endpoint(handler, handle, error_of), methods=[method]) for method, path, handle in calls]
