"""The Open Inference Protocol, version 2, over HTTP: `/v2` and what is below it."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from server.door import Door
from server.errors import Refusal
from server.http.exchange import Endpoint, Exchange
from server.routers.kserve import check_model, infer_refusal, model_metadata, server_metadata

_MODEL = "/v2/models/{name}"
_VERSION = f"{_MODEL}/versions/{{version}}"


def error_of(refusal: Refusal) -> dict[str, Any]:
    """A refusal in the protocol's form."""
    return {"error": str(refusal)}


def routes(door: Door, name: str, version: str) -> list[Route]:
    """Everything of the protocol.

    Args:
      name: what the model is called.
      version: of the server.
    """

    async def live(exchange: Exchange) -> None:
        await exchange.json({"live": True})

    async def ready(exchange: Exchange) -> None:
        is_ready = door.unwell is None
        await exchange.json({"ready": is_ready}, 200 if is_ready else 503)

    async def server(exchange: Exchange) -> None:
        await exchange.json(server_metadata(version))

    async def model_ready(exchange: Exchange) -> None:
        _check(exchange)
        is_ready = door.unwell is None
        await exchange.json({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    async def model(exchange: Exchange) -> None:
        _check(exchange)
        await exchange.json(model_metadata(name))

    async def infer(exchange: Exchange) -> None:
        _check(exchange)
        raise infer_refusal()

    def _check(exchange: Exchange) -> None:
        check_model(name, exchange.path_params["name"], exchange.path_params.get("version", ""))

    calls = [("GET", "/v2", server), ("GET", "/v2/", server)]
    calls += [("GET", "/v2/health/live", live), ("GET", "/v2/health/ready", ready)]
    for path in (_MODEL, _VERSION):
        calls += [("GET", path, model), ("GET", f"{path}/ready", model_ready), ("POST", f"{path}/infer", infer)]
    return [Route(path, Endpoint(door, handle, error_of), methods=[method]) for method, path, handle in calls]
