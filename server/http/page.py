"""The page at `/`, and `/live`, which it and `jaxserve top` poll ten times a second."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from server.engine_client import EngineNotReady
from server.live import LiveStats

_PAGE = resources.files("server.http").joinpath("page.html").read_text(encoding="utf-8")
# The page is self-contained and calls only this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def routes(live: LiveStats, model: str) -> list[Route]:
    """The routes `/` and `/live`.

    Args:
      model: name of the served model.
    """

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})

    async def live_data(request: Request) -> Response:
        given = request.query_params.get("since", "0")
        since = int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else 0
        data = live.since(since)
        if since == 0 or data["next"] < since:  # the first poll, or the server has restarted
            try:
                data["about"] = {"model": model} | live.about()
            except EngineNotReady as problem:
                return JSONResponse({"error": str(problem)}, 503, {"Retry-After": "1"})
        return JSONResponse(data, headers={"Cache-Control": "no-store"})

    return [Route("/", page, methods=["GET"]), Route("/live", live_data, methods=["GET"])]
