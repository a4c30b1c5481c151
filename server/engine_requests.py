"""Requests of a call in the engine, and the delivery of their events to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.request import Request, TokenEvent

if TYPE_CHECKING:
    from server.engine_client import EngineClient, Sink

Receive = Callable[[list[TokenEvent]], None]


class EventDelivery:
    """Delivers events of an engine to an event loop. Make it on the loop's thread.

    One wake-up of the loop serves all sinks. Events that come on the loop's own thread, as those of an engine process
    do, are passed on at once.
    """

    def __init__(self, engine: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop, self._thread = loop, threading.get_ident()
        self._waiting: deque[tuple[Receive, list[TokenEvent]]] = deque()
        self._is_scheduled = False

    def sink(self, receive: Receive) -> Sink:
        """A sink for the engine; `receive` is called on the loop."""

        def sink(events: list[TokenEvent]) -> None:
            if threading.get_ident() == self._thread:
                receive(events)
                return
            self._waiting.append((receive, events))
            if not self._is_scheduled:
                self._is_scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(self._deliver)

        return sink

    def _deliver(self) -> None:
        self._is_scheduled = False  # first, so that later events schedule another turn
        while self._waiting:
            receive, events = self._waiting.popleft()
            receive(events)


class EngineRequests:
    """The requests of one call that the engine has.

    Args:
      put: called on the event loop with every event of these requests, until they have ended or were aborted.
    """

    def __init__(self, delivery: EventDelivery, put: Callable[[TokenEvent], None]) -> None:
        self._engine, self._put = delivery.engine, put
        self._ids: set[str] = set()
        self._sink = delivery.sink(self._receive)  # one for all, as the engine groups events by sink

    def submit(self, request: Request) -> None:
        """Submits a request. Raises what `Engine.submit` raises."""
        self._ids.add(request.request_id)
        try:
            self._engine.submit(request, self._sink)
        except BaseException:
            self._ids.discard(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request in the engine, unless it has ended there."""
        if request_id in self._ids:
            self._ids.discard(request_id)
            self._engine.abort(request_id)

    def abort_all(self) -> None:
        """Ends every request that has not ended."""
        for request_id in list(self._ids):
            self.abort(request_id)

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self._ids:
                if event.finish_reason is not None:
                    self._ids.discard(event.request_id)
                self._put(event)
