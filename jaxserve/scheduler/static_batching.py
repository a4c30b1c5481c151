"""Static (request-level) batching, the baseline that Orca compares itself with.

See OSDI'22, section 3.1.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.scheduler import Scheduler


class StaticBatchScheduler(Scheduler):
    """Forms a batch only when no request runs.

    No request joins a running batch, and no event is emitted before all its requests have ended.

    A batch takes waiting requests in order, one for each row. It ends at the first request that the pool has no blocks
    for; that request and those behind it wait for the next batch.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `Scheduler`."""
        super().__init__(*args, **settings)
        self._next: list[tuple[tuple[float, int], Request]] = []  # a heap: requests that wait for the next batch
        self._next_tokens = 0
        self._arrivals = 0
        self._held: list[TokenEvent] = []  # until the batch has ended
        self._keys: dict[str, tuple[float, int]] = {}  # of requests whose last event has not been emitted

    @property
    def num_waiting(self) -> int:
        """Requests without a row, in this batch or the next."""
        return super().num_waiting + len(self._next)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests without a row."""
        return super().waiting_tokens + self._next_tokens

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or an event is held back."""
        return super().has_work or bool(self._next or self._held)

    def submit(self, request: Request, allocation: BlockAllocation | None = None) -> None:
        """Queue `request` for the next batch (see `Scheduler.submit`).

        Parallel samples share nothing.
        """
        if request.request_id in self._keys:
            raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not finished")
        key = (self.order.key(request.arrival, request.priority, len(request.prompt)), self._arrivals)
        self._arrivals += 1
        self._keys[request.request_id] = key
        self._queue(key, request)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End a request now and drop its events.

        Returns its last event, and the events of the batch if it was the last to run.
        """
        if request_id not in self._keys:
            return []
        ended = super().abort(request_id) or [TokenEvent(request_id, finish_reason=FinishReason.ABORTED)]
        for entry in [entry for entry in self._next if entry[1].request_id == request_id]:
            self._next.remove(entry)
            heapq.heapify(self._next)
            self._next_tokens -= len(entry[1].prompt)
        del self._keys[request_id]
        self._held = [event for event in self._held if event.request_id != request_id]
        return ended + self._released()

    def schedule(self) -> IterationPlan | None:
        """The next plan of the batch. Forms a batch first if none runs."""
        if not self.requests.live:
            for _ in range(min(len(self._next), len(self.requests.free_rows))):
                _, request = heapq.heappop(self._next)
                self._next_tokens -= len(request.prompt)
                super().submit(dataclasses.replace(request, fork_of=None))
        plan = super().schedule()
        first = self.requests.waiting.first()
        if first is not None and not self.pool.can_admit(first.allocation):
            self._close_batch()
        return plan

    def complete(self, plan: IterationPlan, result: IterationResult) -> list[TokenEvent]:
        """Apply a result (see `Scheduler.complete`). Returns the batch's events once it has ended."""
        self._held += super().complete(plan, result)
        return self._released()

    def _close_batch(self) -> None:
        """Return the requests that have not begun to the queue for the next batch."""
        for state in [state for state in self.requests.live.values() if not state.has_begun]:
            self._end(state)
            self._queue(self._keys[state.name], state.request)

    def _queue(self, key: tuple[float, int], request: Request) -> None:
        heapq.heappush(self._next, (key, request))
        self._next_tokens += len(request.prompt)

    def _released(self) -> list[TokenEvent]:
        if self.requests.live:
            return []
        released, self._held = self._held, []
        for event in released:
            if event.finish_reason is not None:
                del self._keys[event.request_id]
        return released
