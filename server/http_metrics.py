"""Counts HTTP calls by route, under the names that dashboards of other servers ask for."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LEFT = 499  # the caller left before the answer began
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """How many calls had which class of status, and how long they took, streams to their end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "http_requests",
            "HTTP calls, by route and status.",
            ("method", "handler", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time of HTTP calls, by route.",
            ("method", "handler"),
            registry=registry,
            buckets=_SECONDS,
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self._calls.labels(method, route, f"{status // 100}xx").inc()
        self._seconds.labels(method, route).observe(seconds)


class CountedRoute:
    """An ASGI application whose calls are counted."""

    def __init__(self, app: ASGIApp, route: str, metrics: HttpMetrics) -> None:
        self._app, self._route, self._metrics = app, route, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), _LEFT

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._metrics.observe(scope["method"], self._route, status, time.monotonic() - began)
