"""Static (request-level) batching, the baseline that Orca compares itself with.

See OSDI'22, section 3.1.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import FinishReason, TokenEvent
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.state import RequestState, StateEvent


class StaticBatchScheduler(Scheduler):
    """Forms a batch only when no request runs.

    No request joins a running batch, and no event is emitted before all its requests have ended.

    A batch takes waiting requests in order, one for each row. It ends at the first request that the pool has no blocks
    for; that request and those behind it wait for the next batch.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `Scheduler`."""
        super().__init__(*args, **settings)
        self._next: list[tuple[tuple[float, int], RequestState]] = []  # a heap: requests that wait for the next batch
        self._next_tokens = 0
        self._batch: dict[str, RequestState] = {}  # those of its requests that have not ended
        self._held: list[StateEvent] = []  # until the batch has ended

    @property
    def num_waiting(self) -> int:
        """Requests without a row, in this batch or the next."""
        return super().num_waiting + len(self._next)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests without a row."""
        return super().waiting_tokens + self._next_tokens

    def enqueue(self, state: RequestState) -> None:
        """Queue a request for the next batch (see `Scheduler.enqueue`).

        Parallel samples share nothing.
        """
        state.request = dataclasses.replace(state.request, fork_of=None)
        self._set_key(state)
        self._queue(state)

    def abort(self, request_id: str) -> list[StateEvent]:
        """End a request now and drop its events.

        Returns its last event, and the events of the batch if it was the last to run.
        """
        state = self.requests.live.get(request_id)
        if state is None:
            return []
        if request_id in self._batch:
            self._end(state)
            del self._batch[request_id]
        for entry in [entry for entry in self._next if entry[1] is state]:
            self._next.remove(entry)
            heapq.heapify(self._next)
            self._next_tokens -= len(state.request.prompt)
        super()._forget(state)
        self._held = [each for each in self._held if each[0] is not state]
        ended = TokenEvent(request_id, finish_reason=FinishReason.ABORTED, cached_tokens=state.cached)
        return [(state, ended), *self._released()]

    def schedule(self) -> IterationPlan | None:
        """The next plan of the batch. Forms a batch first if none runs."""
        if not self._batch:
            for _ in range(min(len(self._next), len(self.requests.free_rows))):
                _, state = heapq.heappop(self._next)
                self._next_tokens -= len(state.request.prompt)
                self._batch[state.name] = state
                self.requests.enqueue(state)
        plan = super().schedule()
        first = self.requests.waiting.first()
        if first is not None and not self.pool.can_admit(first.allocation):
            self._close_batch()
        return plan

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[StateEvent]:
        """Apply a result (see `Scheduler.complete`). Returns the batch's events once it has ended."""
        self._held += super().complete(plan, result)
        return self._released()

    def _close_batch(self) -> None:
        """Return the requests that have not begun to the queue for the next batch."""
        for state in [state for state in self._batch.values() if not state.has_begun]:
            self._end(state)
            del self._batch[state.name]
            again = RequestState.of(state.request, self.eos_token_ids, caller=state.caller)
            again.key = state.key
            self.requests.live[state.name] = again
            self._queue(again)

    def _queue(self, state: RequestState) -> None:
        heapq.heappush(self._next, (state.key, state))
        self._next_tokens += len(state.request.prompt)

    def _forget(self, *states: RequestState) -> None:
        """Keep requests that have ended among the live ones until their last events are released."""
        for state in states:
            del self._batch[state.name]

    def _released(self) -> list[StateEvent]:
        if self._batch:
            return []
        released, self._held = self._held, []
        super()._forget(*(state for state, event in released if event.finish_reason is not None))
        return released
