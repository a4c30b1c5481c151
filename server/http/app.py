"""All HTTP routes of the server."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from server.auth import current
from server.compat import kserve, tgi
from server.engine_client import EngineNotReady
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import openai, openapi, responses
from server.http.call import Endpoint, HttpCall
from server.http.embeddings import EmbeddingsEndpoint
from server.http.listener import host_of
from server.http.schemas import DetokenizeBody, TokenizeBody
from server.http.score import Scoring
from server.http_metrics import CountedRoute
from server.live import LiveStats
from server.metrics import CONTENT_TYPE, Metrics

_PAGE = resources.files("server.http").joinpath("page.html").read_text(encoding="utf-8")
# The page is self-contained and calls only this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

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

    about, scoring = _About(handler), Scoring(handler)
    app = Starlette(
        routes=[
            route("POST", "/v1/completions", openai.Completions(handler, chat=False), queued=True),
            route("POST", "/v1/chat/completions", openai.Completions(handler, chat=True), queued=True),
            route("POST", "/v1/responses", responses.Responses(handler), queued=True),
            route("POST", "/v1/embeddings", EmbeddingsEndpoint(handler), queued=True),
            *(route("POST", path, scoring.score, queued=True) for path in ("/score", "/v1/score")),
            *(route("POST", path, scoring.rerank, queued=True) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            route("GET", "/v1/models", about.models),
            route("GET", "/v1/models/{name:path}", about.model),
            route("POST", "/tokenize", about.tokenize),
            route("POST", "/detokenize", about.detokenize),
            route("GET", "/health", about.health),
            route("GET", "/version", about.version),
            route("POST", "/start_profile", partial(about.profile, True)),
            route("POST", "/stop_profile", partial(about.profile, False)),
            Route("/metrics", scrape),
            tgi_route("/generate", streams=False),
            tgi_route("/generate_stream", streams=True),
            tgi_route("/", streams=None),
            route("GET", "/info", about.info),
            *kserve.routes(handler),
            *_page_routes(live, handler.model_name),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    for each in app.routes:
        if isinstance(each, Route) and isinstance(each.endpoint, Endpoint) and "POST" in (each.methods or ()):
            each.app = CountedRoute(each.app, each.path, metrics.http)
    described = openapi.description(app.routes, handler.version)

    async def describe(_: Request) -> Response:
        return JSONResponse(described)

    app.router.routes.append(Route("/openapi.json", describe))
    return app


def with_origins(app: ASGIApp, origins: str | None) -> ASGIApp:
    """The application; it answers web pages of these origins (CORS): comma-separated, or "*"."""
    if origins is None:
        return app
    allowed = [origin.strip().rstrip("/") for origin in origins.split(",")]
    headers = ["x-request-id", "retry-after", "warning"]
    return CORSMiddleware(
        app, allow_origins=allowed, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=headers
    )


def hosts_of(origins: str | None) -> list[str] | None:
    """The hosts of these origins; None for "*", which stands for any."""
    allowed = [origin.strip() for origin in (origins or "").split(",")]
    return None if "*" in allowed else [host_of(origin.partition("://")[2].rstrip("/")) for origin in allowed if origin]


def _page_routes(live: LiveStats, model: str) -> list[Route]:
    """The page at `/`, and `/live`, which the page and `jaxserve top` poll ten times a second."""

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    async def live_data(request: Request) -> Response:
        given = request.query_params.get("since", "0")
        since = int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else 0
        data = live.since(since)
        tenant = current.get()
        if tenant.name and not tenant.operator:
            data["iterations"] = []  # they tell of other tenants' requests
        if since == 0 or data["next"] < since:  # the first poll, or the server has restarted
            try:
                data["about"] = {"model": model} | live.about()
            except EngineNotReady as problem:
                return JSONResponse({"error": str(problem)}, 503, {"Retry-After": "1"})
        return JSONResponse(data, headers={"Cache-Control": "no-store"})

    return [Route("/", page, methods=["GET"]), Route("/live", live_data, methods=["GET"])]


async def _no_route(request: Request, problem: Exception) -> JSONResponse:
    """Answers 404 and 405 with the same JSON body as other errors."""
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {request.url.path[:200]} is not served here"
    error = {"message": message, "type": "not_found_error", "param": None, "code": str(problem.status_code)}
    return JSONResponse({"error": error}, problem.status_code, dict(problem.headers or {}))


class _About:
    """Endpoints that generate nothing."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._created = int(time.time())

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxserve",
            "max_model_len": self._handler.engine.max_context,
        }

    async def models(self, http_call: HttpCall) -> None:
        await http_call.json({"object": "list", "data": [self._card(name) for name in self._handler.model_names]})

    async def model(self, http_call: HttpCall) -> None:
        asked, names = http_call.path_params["name"], self._handler.model_names
        if asked not in names:
            raise ApiError(ErrorKind.NOT_FOUND, f"{asked[:100]!r} is not served here; {names[0]!r} is", field="model")
        await http_call.json(self._card(asked))

    async def tokenize(self, http_call: HttpCall) -> None:
        body = await http_call.body(TokenizeBody)
        openai.check_model(body, self._handler.model_names)
        ids = await self._handler.text.tokenize(body.prompt, special_tokens=body.add_special_tokens, field="prompt")
        await http_call.json({"count": len(ids), "max_model_len": self._handler.engine.max_context, "tokens": ids})

    async def detokenize(self, http_call: HttpCall) -> None:
        body = await http_call.body(DetokenizeBody)
        openai.check_model(body, self._handler.model_names)
        await http_call.json({"prompt": await self._handler.text.detokenize(body.tokens, field="tokens")})

    async def health(self, http_call: HttpCall) -> None:
        if self._handler.unhealthy_reason is not None:
            raise ApiError(ErrorKind.UNAVAILABLE, self._handler.unhealthy_reason)
        await http_call.json({"status": "ok"})

    async def version(self, http_call: HttpCall) -> None:
        await http_call.json({"version": self._handler.version})

    async def profile(self, running: bool, http_call: HttpCall) -> None:
        await self._handler.set_profile(running)
        await http_call.whole(b"", "text/plain")

    async def info(self, http_call: HttpCall) -> None:
        await http_call.json(tgi.info(self._handler))
