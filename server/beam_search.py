"""A beam search: many short requests in the engine, which observers see as one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxserve.generation.beam_search import BeamSearch, completions
from jaxserve.generation.completion import Assembler, Completion
from jaxserve.request import Alternatives, FinishReason, TokenEvent
from server import errors
from server.call import ActiveCall, Call, Observer
from server.engine_client import EventDelivery

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer


class BeamSearchCall(ActiveCall):
    """A beam search of one call, as `Generation` is for sampled answers.

    Args:
      new_id: makes an id of a request.
    """

    def __init__(
        self,
        call: Call,
        search: BeamSearch,
        observers: Sequence[Observer],
        delivery: EventDelivery,
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(call, (search.request,), observers, delivery)
        self._search, self._new_id = search, new_id
        (self._timing,) = self._timings
        self._answers: dict[str, Alternatives | None] = {}  # of the requests of this step, None until they come
        self._open = 0

    def _put(self, event: TokenEvent) -> None:
        if event.started is not None and self._timing.began is None:
            self._timing.began = event.started
        if event.top_logprobs:
            self._answers[event.request_id] = event.top_logprobs[0]
            self._open -= 1
        elif event.finish_reason is FinishReason.ABORTED:
            self._problem = errors.unavailable(event.error or "the request was ended by the server")
        elif event.finish_reason is FinishReason.ERROR:
            self._problem = RuntimeError(event.error)
        if not self._open or self._problem is not None:
            self._arrived.set()

    async def run(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> list[Completion]:
        """Searches to the end, and reports to the observers.

        Returns:
          The completions, best first.

        Raises:
          ApiError: the call was ended; Exception: a request failed in the engine.
        """
        completion = Assembler(self._search.request, tokenizer, eos_token_ids).completion()
        for observer in self._observers:
            observer.started(self._timing)
        try:
            while not self._search.is_finished:
                await self._step()
            answers = completions(self._search, tokenizer, eos_token_ids)
            completion = answers[0]
            return answers
        finally:
            self.abort_all()
            for observer in self._observers:
                observer.ended(self._timing, completion)

    async def _step(self) -> None:
        self._arrived.clear()
        requests = self._search.requests(self._new_id)
        self._answers = {request.request_id: None for request in requests}
        self._open = len(requests)
        for request in requests:
            self._submit(request)
        if self._problem is None:
            await self._arrived.wait()
        if self._problem is not None:
            raise self._problem
        self._search.take([answer for answer in self._answers.values() if answer is not None])
        self._tokens_came(self._timing, 1)  # counts once for all beams
