"""The page at `/`, and what it and `jaxserve top` ask for ten times a second."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from server.engine_client import EngineNotReady
from server.live import LiveStats

_PAGE = resources.files("server.http").joinpath("page.html").read_text(encoding="utf-8")
# The page holds everything it needs and talks to this server only.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def routes(live: LiveStats, model: str) -> list[Route]:
    """`/` and `/live`.

    Args:
      model: the name callers know the model by.
    """

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    async def news(request: Request) -> Response:
        given = request.query_params.get("since", "0")
        since = int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else 0
        told = live.since(since)
        if since == 0 or told["next"] < since:  # the first question, or the server has been started again
            try:
                told["about"] = {"model": model} | live.about()
            except EngineNotReady as problem:
                return JSONResponse({"error": str(problem)}, 503, {"Retry-After": "1"})
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    return [Route("/", page, methods=["GET"]), Route("/live", news, methods=["GET"])]
