"""One call and its requests while the engine works on them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.generation.completion import Assembler, Completion, Delta, joined
from jaxserve.generation.samples import PromptScores
from jaxserve.request import FinishReason, Request, TokenEvent
from server import errors
from server.admission import Ticket
from server.auth import Tenant, current

_MOST_EVENTS = 64  # taken at once, so that catching up with a reader who was slow delays nobody


def new_id() -> str:
    """A name for a call whose caller gave none; no two are alike, in one server or in several."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, whatever it asks for.

    Attributes:
      id: what answers and log call it; need not be unique.
      protocol: that it came by, such as "grpc".
      priority / cache_salt: of its requests.
      arrival / deadline: monotonic seconds; the caller wants no answer after its deadline.
      tenant: whom it is counted for.
    """

    id: str = field(default_factory=new_id)
    protocol: str
    priority: int = 0
    cache_salt: str = ""
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    tenant: Tenant = field(default_factory=current.get)


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """What happened when to one request: monotonic seconds, None until it has.

    Attributes:
      began: it got a row.
      first_token / last_token: the door heard of them.
    """

    call: Call
    request: Request
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Observer(Protocol):
    """What is told of every request that the engine has taken, and of every call that ends without an answer; on the
    event loop."""

    def started(self, timing: RequestTiming) -> None:
        """The engine has taken the request."""
        ...

    def tokens(self, timing: RequestTiming, count: int, gap: float | None) -> None:
        """Tokens of it have come, so many seconds after the ones before; None for the first."""
        ...

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        """It is over; a completion without a finish reason was cut short, by its caller or by the server."""
        ...

    def refused(self, call_id: str, refusal: errors.ApiError) -> None:
        """A call ends without an answer."""
        ...


class Generation:
    """The requests of one call while the engine works on them.

    `async for deltas in generation` gives, whenever the engine has been heard of, a list of (index of the request,
    what has come for it since); it ends when all requests are answered.

    Raises:
      ApiError: the requests were given up; Exception: one of them failed in the engine.
    """

    def __init__(
        self,
        call: Call,
        requests: Sequence[Request],
        assemblers: Sequence[Assembler],
        observers: Sequence[Observer],
        ticket: Ticket,
        leave: Callable[[str], None],
    ) -> None:
        self.call, self.requests = call, tuple(requests)
        self._scores = PromptScores(requests)
        self.timings = [RequestTiming(call=call, request=request) for request in requests]
        self._assemblers = assemblers
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._observers, self._ticket, self._leave = observers, ticket, leave
        self._unfinished = len(requests)
        self._events: list[TokenEvent] = []
        self._refusal: errors.ApiError | None = None
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Keeps an event of the engine's for the handler."""
        self._ticket.begun()
        self._events += self._scores.spread(event)
        self._arrived.set()
        timing = self.timings[self._index[event.request_id]]
        if event.started is not None:
            timing.began = event.started
        if event.token_ids:
            now = time.monotonic()
            gap = None if timing.last_token is None else now - timing.last_token
            timing.last_token = now
            if gap is None:
                timing.first_token = now
            for observer in self._observers:
                observer.tokens(timing, len(event.token_ids), gap)

    def fail(self, refusal: errors.ApiError) -> None:
        """Has the handler end with this as soon as it looks."""
        self._refusal = refusal
        self._arrived.set()

    def leave(self) -> None:
        """Has the engine end the requests at once, though the handler may be waiting for a slow reader."""
        for request in self.requests:
            self._leave(request.request_id)

    def completion(self, index: int = 0) -> Completion:
        """What became of a request, so far."""
        return self._assemblers[index].completion()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self._unfinished:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events[:_MOST_EVENTS], self._events[_MOST_EVENTS:]
        if self._events:
            self._arrived.set()
            await asyncio.sleep(0)  # others have their turn first
        found: dict[int, list[Delta]] = {}
        for event in events:
            index = self._index[event.request_id]
            found.setdefault(index, []).append(self._push(index, event))
        return [(index, joined(deltas)) for index, deltas in found.items()]

    def _push(self, index: int, event: TokenEvent) -> Delta:
        assembler = self._assemblers[index]
        was_finished = assembler.finished
        delta = assembler.push(event)
        if event.finish_reason is FinishReason.ABORTED and not was_finished:
            raise errors.unavailable(event.error or "the request was ended by the server")
        if event.field is not None:
            raise errors.invalid(event.field, event.error or "is wrong")
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(event.error)
        if assembler.finished and not was_finished:
            self._unfinished -= 1
            self._leave(event.request_id)
        return delta
