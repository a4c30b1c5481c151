"""The HTTP routes. What is not listed here is not served."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.compat import kserve, tgi
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import openai, page
from server.http.call import Endpoint, HttpCall
from server.http.schemas import DetokenizeBody, TokenizeBody
from server.live import LiveStats
from server.metrics import CONTENT_TYPE, Metrics

OPEN_CALLS = (("GET", "/health"), ("GET", "/"))  # need no API key

Handler = Callable[[HttpCall], Awaitable[None]]


def make_app(handler: RequestHandler, metrics: Metrics, live: LiveStats) -> Starlette:
    """The ASGI application of one model.

    Args:
      metrics: shown by /metrics.
      live: shown by the page and /live.
    """

    def route(method: str, path: str, handle: Handler, *, queued: bool = False) -> Route:
        return Route(path, Endpoint(handler, handle, openai.error_of, queued=queued), methods=[method])

    def tgi_route(path: str, *, streams: bool | None) -> Route:
        endpoint = Endpoint(handler, tgi.Generate(handler, streams=streams), tgi.error_of, tgi.STATUSES, queued=True)
        return Route(path, endpoint, methods=["POST"])

    async def scrape(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    about = _About(handler)
    app = Starlette(
        routes=[
            route("POST", "/v1/completions", openai.Completions(handler, chat=False), queued=True),
            route("POST", "/v1/chat/completions", openai.Completions(handler, chat=True), queued=True),
            route("GET", "/v1/models", about.models),
            route("GET", "/v1/models/{name:path}", about.model),
            route("POST", "/tokenize", about.tokenize),
            route("POST", "/detokenize", about.detokenize),
            route("GET", "/health", about.health),
            route("GET", "/version", about.version),
            Route("/metrics", scrape),
            tgi_route("/generate", streams=False),
            tgi_route("/generate_stream", streams=True),
            tgi_route("/", streams=None),
            route("GET", "/info", about.info),
            *kserve.routes(handler),
            *page.routes(live, handler.model_name),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, problem: Exception) -> JSONResponse:
    """404 and 405 with the same JSON body as other errors."""
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.url.path[:200]} is not served here"
    error = {"message": message, "type": "not_found_error", "param": None, "code": str(problem.status_code)}
    return JSONResponse({"error": error}, problem.status_code, dict(problem.headers or {}))


class _About:
    """Endpoints that generate nothing."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._created = int(time.time())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._handler.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "max_model_len": self._handler.engine.max_context,
        }

    async def models(self, http_call: HttpCall) -> None:
        await http_call.json({"object": "list", "data": [self._card()]})

    async def model(self, http_call: HttpCall) -> None:
        asked, served = http_call.path_params["name"], self._handler.model_name
        if asked != served:
            raise ApiError(ErrorKind.NOT_FOUND, f"{asked[:100]!r} is not served here; {served!r} is", field="model")
        await http_call.json(self._card())

    async def tokenize(self, http_call: HttpCall) -> None:
        body = await http_call.body(TokenizeBody)
        openai.check_model(body, self._handler.model_name)
        ids = await self._handler.text.tokenize(body.prompt, special_tokens=body.add_special_tokens, field="prompt")
        await http_call.json({"count": len(ids), "max_model_len": self._handler.engine.max_context, "tokens": ids})

    async def detokenize(self, http_call: HttpCall) -> None:
        body = await http_call.body(DetokenizeBody)
        openai.check_model(body, self._handler.model_name)
        await http_call.json({"prompt": await self._handler.text.detokenize(body.tokens, field="tokens")})

    async def health(self, http_call: HttpCall) -> None:
        if self._handler.unhealthy_reason is not None:
            raise ApiError(ErrorKind.UNAVAILABLE, self._handler.unhealthy_reason)
        await http_call.json({"status": "ok"})

    async def version(self, http_call: HttpCall) -> None:
        await http_call.json({"version": self._handler.version})

    async def info(self, http_call: HttpCall) -> None:
        await http_call.json(tgi.info(self._handler))
