"""Calls of clients, their requests while the engine works on them, and their observers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from jaxserve.generation.completion import Assembler, Completion, Delta, merge_deltas
from jaxserve.generation.samples import PromptScores, without_fork_scores
from jaxserve.request import FinishReason, Request, TokenEvent
from server import errors
from server.admission import AdmissionController, Ticket
from server.auth import Tenant, current
from server.engine_client import EventDelivery
from server.text import REQUEST_WORK

# The W3C traceparent of the current call, or "": set where a call comes in.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
_MOST_EVENTS = _MOST_REQUESTS = 64  # of a call handled at once, so that one with many delays no other call
_GRACE_SECONDS = 0.2  # after a deadline, in which a protocol with deadlines ends its calls itself


def new_id() -> str:
    """An id for a call whose caller gave none; unique among all servers."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a client.

    Attributes:
      id: for answers and logs; need not be unique.
      protocol: such as "grpc".
      priority / cache_salt: of its requests.
      arrival / deadline: monotonic seconds; the caller wants no answer after its deadline.
      tenant: the tenant whose share and rate it counts against.
      traceparent: the span of the caller, as a W3C traceparent; "" if it sent none.
      has_defaults: whether the checkpoint's defaults replace sampling parameters that the call leaves out.
    """

    id: str = field(default_factory=new_id)
    protocol: str
    priority: int = 0
    cache_salt: str = ""
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    tenant: Tenant = field(default_factory=current.get)
    traceparent: str = field(default_factory=traceparent.get)
    has_defaults: bool = True


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """The times of one request in monotonic seconds; None until it is that far.

    Attributes:
      began: when it got a row.
      first_token / last_token: when they reached this process.
    """

    call: Call
    request: Request
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def token(self) -> float | None:
        """Records that tokens came; returns the seconds since the last ones, None for the first."""
        now = time.monotonic()
        gap = None if self.last_token is None else now - self.last_token
        self.last_token = now
        if gap is None:
            self.first_token = now
        return gap


class Observer:
    """Observes every request that the engine takes and every refused call, on the event loop."""

    def started(self, timing: RequestTiming) -> None:
        """The engine has taken the request."""

    def tokens(self, timing: RequestTiming, count: int, gap: float | None) -> None:
        """Tokens of the request have come, `gap` seconds after the last ones (None for the first)."""

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        """The request has ended. Without a finish reason, the caller or the server has cut it short."""

    def refused(self, call_id: str, refusal: errors.ApiError) -> None:
        """A call ends without an answer."""


class ActiveCall:
    """A call while the engine works on its requests."""

    def __init__(
        self, call: Call, requests: Sequence[Request], observers: Sequence[Observer], delivery: EventDelivery
    ) -> None:
        self.call, self.requests = call, tuple(requests)
        self._timings = [RequestTiming(call=call, request=request) for request in requests]
        self._observers = observers
        self._engine = delivery.engine
        self._in_engine: set[str] = set()  # ids of requests that the engine has
        self._sink = delivery.sink(self._receive)  # one for all requests, because the engine groups events by sink
        self._problem: Exception | None = None
        self._arrived = asyncio.Event()

    def fail(self, problem: errors.ApiError) -> None:
        """Ends the call with this error, as soon as its handler waits for events."""
        self._problem = problem
        self._arrived.set()

    def abort_all(self) -> None:
        """Aborts all requests at once, even while the handler waits for a slow reader."""
        for request_id in list(self._in_engine):
            self._abort(request_id)

    def _submit(self, request: Request) -> None:
        """Submits a request. Raises what `Engine.submit` raises."""
        self._in_engine.add(request.request_id)
        try:
            self._engine.submit(request, self._sink)
        except BaseException:
            self._in_engine.discard(request.request_id)
            raise

    def _abort(self, request_id: str) -> None:
        """Aborts a request, unless the engine has ended it."""
        if request_id in self._in_engine:
            self._in_engine.discard(request_id)
            self._engine.abort(request_id)

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self._in_engine:
                if event.finish_reason is not None:
                    self._in_engine.discard(event.request_id)
                self._put(event)

    def _put(self, event: TokenEvent) -> None:
        """Takes an event of a request that has not ended, on the event loop."""
        raise NotImplementedError

    def _tokens_came(self, timing: RequestTiming, count: int) -> None:
        gap = timing.token()
        for observer in self._observers:
            observer.tokens(timing, count, gap)


class ActiveCalls:
    """All calls under way. It belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: set[ActiveCall] = set()
        self._emptied = asyncio.Event()

    @contextlib.contextmanager
    def under_way(self, active: ActiveCall) -> Iterator[None]:
        """Counts a call while the block lasts, and ends it at its deadline."""
        timer = None
        if (deadline := active.call.deadline) is not None:
            late = errors.ApiError(errors.ErrorKind.TOO_LATE, "the deadline has passed")
            seconds = deadline - time.monotonic() + _GRACE_SECONDS
            timer = asyncio.get_running_loop().call_later(seconds, active.fail, late)
        self._calls.add(active)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._calls.remove(active)
            if not self._calls:
                self._emptied.set()

    @property
    def num_requests(self) -> int:
        """Requests of all calls."""
        return sum(len(active.requests) for active in self._calls)

    def fail_all(self, message: str) -> None:
        """Ends every call with UNAVAILABLE."""
        for active in self._calls:
            active.fail(errors.unavailable(message))

    async def wait_until_none(self) -> None:
        """Returns once no call is under way."""
        while self._calls:
            self._emptied.clear()
            await self._emptied.wait()


class Generation(ActiveCall):
    """The requests of one call while the engine works on them.

    `async for deltas in generation` gives a list of (index of the request, its new delta) whenever events have
    come; it ends when all requests are answered. Where `by_token`, each token has a delta of its own, however its
    event came; else a request has one delta in a list.

    Raises:
      ApiError: the call was ended; Exception: a request failed in the engine.
    """

    def __init__(
        self,
        call: Call,
        requests: Sequence[Request],
        observers: Sequence[Observer],
        delivery: EventDelivery,
        assemblers: Iterable[Assembler],
        ticket: Ticket,
        *,
        by_token: bool = False,
    ) -> None:
        super().__init__(call, requests, observers, delivery)
        self._scores = PromptScores(requests)
        self._assemblers, self._ticket, self._by_token = list(assemblers), ticket, by_token
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._completions: dict[int, Completion] = {}  # of finished requests, by their index
        self._submitted: list[RequestTiming] = []
        self._unfinished = len(requests)
        self._events: list[TokenEvent] = []

    async def submit(self) -> None:
        """Submits all requests. Raises what `Engine.submit` raises."""
        for index, timing in enumerate(self._timings):
            if index % _MOST_REQUESTS == _MOST_REQUESTS - 1:
                await asyncio.sleep(0)  # lets other calls run first
            self._submit(without_fork_scores(timing.request))
            self._submitted.append(timing)
            for observer in self._observers:
                observer.started(timing)
        self._ticket.submitted()

    def end(self, admission: AdmissionController) -> None:
        """Aborts what has not ended, and reports the outcome of every request."""
        self.abort_all()
        for index, timing in enumerate(self._submitted):
            completion = self.completion(index)
            if completion.finish_reason is not None and completion.finish_reason.is_answer:
                admission.finished(len(completion.token_ids), timing.request.sampling.max_tokens)
            for observer in self._observers:
                observer.ended(timing, completion)

    def _put(self, event: TokenEvent) -> None:
        self._ticket.started()
        self._events += self._scores.copy_to_forks(event)
        self._arrived.set()
        timing = self._timings[self._index[event.request_id]]
        if event.started is not None:
            timing.began = event.started
        if event.token_ids:
            self._tokens_came(timing, len(event.token_ids))

    async def finish(self) -> None:
        """Waits until all requests are answered. Raises as iteration does."""
        async for _ in self:
            pass

    @property
    def answer_work(self) -> int:
        """The size of the complete answer, for `offload_if_long`."""
        work = 0
        for request in self.requests:
            sampling = request.sampling
            # A scored token takes as long as a line of text.
            work += REQUEST_WORK + 100 * len(request.prompt) * (sampling.prompt_logprobs is not None)
            work += 100 * sampling.max_tokens * (sampling.logprobs is not None)
        return work

    def completions(self) -> list[Completion]:
        """The completions of all requests so far."""
        return [self.completion(index) for index in range(len(self.requests))]

    def completion(self, index: int = 0) -> Completion:
        """The completion of a request so far."""
        found = self._completions.get(index)
        if found is None:
            found = self._assemblers[index].completion()
            if self._assemblers[index].finished:
                self._completions[index] = found
        return found

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self._unfinished:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        if self._problem is not None:
            raise self._problem
        events, self._events = self._events[:_MOST_EVENTS], self._events[_MOST_EVENTS:]
        if self._events:
            self._arrived.set()
            await asyncio.sleep(0)  # lets other calls run first
        found: dict[int, list[Delta]] = {}
        for event in events:
            index = self._index[event.request_id]
            for each in event.by_token() if self._by_token else (event,):
                found.setdefault(index, []).append(self._push(index, each))
        if self._by_token:
            return [(index, delta) for index, deltas in found.items() for delta in deltas]
        return [(index, merge_deltas(deltas)) for index, deltas in found.items()]

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
            self._abort(event.request_id)  # the engine does not know that a stop string has ended it
        return delta
