"""Fair shares of the device between tenants: their waiting requests, and whose turn it is.

It is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI'24: every tenant has
a counter of the tokens computed for it, and the waiting tenant with the smallest counter is next. A tenant that begins
to wait is lifted to the smallest counter of those that wait, so nobody saves up turns while it asks for nothing. Tokens
count with the seconds that the device takes for them, divided by the tenant's share.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.iteration import Chunk
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxserve.scheduler.state import RequestState


@dataclass(slots=True, eq=False)
class TenantQueue:
    """A tenant with live requests.

    Attributes:
      share: weight relative to other tenants.
      served: seconds of the device that it got, divided by its share; counted while several tenants have requests.
      num_live: requests that have not ended.
      is_listed: whether the heap of turns has it.
      waiting: its waiting requests, by key.
    """

    name: str
    share: float = 1.0
    served: float = 0.0
    num_live: int = 0
    is_listed: bool = False
    waiting: WaitingQueue[RequestState] = field(default_factory=WaitingQueue)


class FairQueue:
    """Waiting requests of all tenants: first the tenant whose turn it is, its requests by key.

    With one tenant it is that tenant's queue, and nothing is counted. Otherwise the cost of an operation grows with the
    logarithm of the number of tenants that wait.

    Attributes:
      num_tokens: of all waiting requests.
      is_shared: whether several tenants have live requests.
    """

    def __init__(self, ladder: BucketLadder, max_rows: int) -> None:
        """
        Args:
          ladder: gives the seconds of a prompt's token, and of a token in a batch of `max_rows` decodes.
        """
        last = len(ladder.sizes) - 1
        self._prompt_seconds = ladder.costs_ms[last] / ladder.largest / 1000
        self._decode_seconds = ladder.costs_ms[min(bisect_left(ladder.sizes, max_rows), last)] / max_rows / 1000
        self.num_tokens = 0
        self.is_shared = False
        self._tenants: dict[str, TenantQueue] = {}  # with live requests, or ahead of the others
        self._turns: list[
            tuple[float, int, TenantQueue]
        ] = []  # a heap of those that wait; counters may have risen since
        self._num_waiting = self._num_active = self._listed = 0
        self._last_served = 0.0  # counter of the tenant that had the last turn

    def __len__(self) -> int:
        return self._num_waiting

    def join(self, state: RequestState) -> None:
        """Find the tenant of a new request."""
        request = state.request
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = TenantQueue(request.tenant)
        tenant.share = request.share
        tenant.num_live += 1
        if tenant.num_live == 1:
            self._num_active += 1
            self.is_shared = self._num_active > 1
        state.tenant = tenant

    def leave(self, state: RequestState) -> None:
        """Note that a request has ended."""
        tenant = state.tenant
        tenant.num_live -= 1
        if tenant.num_live == 0:
            self._num_active -= 1
            self.is_shared = self._num_active > 1
            if not self._num_active:  # an idle device owes nobody
                self._tenants.clear()
            elif tenant.served <= self._last_served:  # it would be lifted in any case
                del self._tenants[tenant.name]

    def push(self, state: RequestState) -> None:
        """Add a request. Its tenant is lifted to the others if nothing of it waits."""
        tenant = state.tenant
        if not tenant.waiting:
            self._drop_empty()
            tenant.served = max(tenant.served, self._turns[0][2].served if self._turns else self._last_served)
        self._add(state)

    def put_back(self, state: RequestState) -> None:
        """Return a request that was charged for its prompt and did not begin."""
        self._add(state)
        if not self.is_shared:
            return
        state.tenant.served -= self._prompt_seconds * (state.length - state.computed) / state.tenant.share
        self._turns = [(tenant.served, number, tenant) for _, number, tenant in self._turns]
        heapq.heapify(self._turns)

    def _add(self, state: RequestState) -> None:
        tenant = state.tenant
        if not tenant.is_listed:
            tenant.is_listed = True
            self._listed += 1
            heapq.heappush(self._turns, (tenant.served, self._listed, tenant))
        tenant.waiting.push(state)
        self._num_waiting += 1
        self.num_tokens += len(state.tokens)

    def first(self) -> RequestState | None:
        """The next request, which stays in the queue; None if nothing waits."""
        self._drop_empty()
        return self._turns[0][2].waiting.first() if self._turns else None

    def pop(self) -> RequestState:
        """Remove and return the next request."""
        self._drop_empty()
        tenant = self._turns[0][2]
        tenant.waiting.first()  # drops those that were removed
        state = tenant.waiting.pop()
        self._last_served = tenant.served
        self._num_waiting -= 1
        self.num_tokens -= len(state.tokens)
        return state

    def remove(self, state: RequestState) -> None:
        """Remove a request, wherever it is in the queue."""
        state.tenant.waiting.remove(state)
        self._num_waiting -= 1
        self.num_tokens -= len(state.tokens)

    def charge_prompt(self, state: RequestState) -> None:
        """Counts an admitted request's uncomputed tokens at once: the next turn may be another's."""
        if self.is_shared:
            state.tenant.served += self._prompt_seconds * (state.length - state.computed) / state.tenant.share

    def charge_samples(self, states: Sequence[RequestState], chunks: Sequence[Chunk]) -> None:
        """Count the tokens that a plan samples."""
        if self.is_shared:
            for state, chunk in zip(states, chunks, strict=True):
                if chunk.samples:
                    state.tenant.served += self._decode_seconds * chunk.samples / state.tenant.share

    def _drop_empty(self) -> None:
        """Bring the tenant whose turn it is to the front of the heap."""
        turns = self._turns
        while turns:
            served, number, tenant = turns[0]
            if not tenant.waiting:
                heapq.heappop(turns)
                tenant.is_listed = False
            elif served != tenant.served:
                heapq.heapreplace(turns, (tenant.served, number, tenant))
            else:
                return
