"""A call's beam search while the engine works on it: many short requests, one call to everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from jaxserve.generation.beam_search import BeamSearch
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from server import errors
from server.call import Call, Observer, RequestTiming


class BeamSearchCall:
    """A beam search and its place in the door, where it stands for its requests as a `Generation` does for its own.

    Args:
      submit: hands a request to the engine, whose events come to `put`; leave: ends one there, if it is alive.
      name: makes names of requests.
    """

    def __init__(
        self,
        call: Call,
        search: BeamSearch,
        observers: Sequence[Observer],
        *,
        submit: Callable[[Request], None],
        leave: Callable[[str], None],
        name: Callable[[], str],
    ) -> None:
        self.call, self.search = call, search
        self.requests = (search.request,)
        self.timing = RequestTiming(call=call, request=search.request)
        self._observers, self._submit, self._leave, self._name = observers, submit, leave, name
        self._answers: dict[str, Alternatives | None] = {}  # by request of this step, once it is there
        self._open = 0
        self._problem: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Takes an event of the engine's."""
        if event.request_id not in self._answers:
            return
        if event.started is not None and self.timing.began is None:
            self.timing.began = event.started
        if event.top_logprobs:
            self._answers[event.request_id] = event.top_logprobs[0]
            self._open -= 1
        elif event.finish_reason is FinishReason.ABORTED:
            self._problem = errors.unavailable(event.error or "the request was ended by the server")
        elif event.finish_reason is FinishReason.ERROR:
            self._problem = RuntimeError(event.error)
        if not self._open or self._problem is not None:
            self._arrived.set()

    def fail(self, refusal: errors.ApiError) -> None:
        """Has the search end with this."""
        self._problem = refusal
        self._arrived.set()

    async def run(self) -> None:
        """Searches to the end.

        Raises:
          ApiError: it was given up; Exception: a request of it failed in the engine.
        """
        try:
            while not self.search.is_finished:
                await self._step()
        finally:
            for name in self._answers:
                self._leave(name)

    async def _step(self) -> None:
        self._arrived.clear()
        requests = self.search.requests(self._name)
        self._answers = {request.request_id: None for request in requests}
        self._open = len(requests)
        for request in requests:
            self._submit(request)
        if self._problem is None:
            await self._arrived.wait()
        if self._problem is not None:
            raise self._problem
        self.search.take([answer for answer in self._answers.values() if answer is not None])
        self._tell()

    def _tell(self) -> None:
        """Tells the observers of a token: one, however many beams have got theirs."""
        timing, now = self.timing, time.monotonic()
        gap = None if timing.last_token is None else now - timing.last_token
        timing.last_token = now
        if gap is None:
            timing.first_token = now
        for observer in self._observers:
            observer.tokens(timing, 1, gap)
