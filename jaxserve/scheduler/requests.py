"""The live requests of a scheduler: their phases, rows and queues. It makes no decisions."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.host_cache import Fetch
from jaxserve.scheduler.parallel_samples import ParallelSampleGroups
from jaxserve.scheduler.state import Phase, RequestState
from jaxserve.scheduler.tenants import FairQueue

_by_key = attrgetter("key")


def _by_turn(state: RequestState) -> tuple[float, tuple[float, int]]:
    return state.tenant.served, state.key


class RequestTable:
    """Moves requests between phases and keeps the counts of each.

    Attributes:
      live: requests that have not ended, by id; those included that are in no queue yet.
      waiting: requests in phase WAITING, except deferred samples.
      running: requests in phase RUNNING, by key.
      num_counted / counted_slots: others in phase RUNNING, which decode and are only counted (in the simulator), and
        the slots that they read.
      samples: groups of requests with one prompt; a group may defer some of its requests.
      fetching: what is on its way from the host, oldest first, and for which WAITING request, unless it has ended; it
        is in no queue meanwhile.
      free_rows: rows that no request has, as a heap.
      num_preempted / preempted_tokens: preempted requests, and their tokens.
      finishing: number of requests whose last token is in flight, by the part of the pool with their blocks.
    """

    def __init__(self, n_rows: int, waiting: FairQueue, *, rows_are_exclusive: bool, boundary: int | None) -> None:
        """Args:
        rows_are_exclusive: whether plans in flight must not share a row.
        boundary: samples of one prompt take over keys and values up to a multiple of this many tokens.
        """
        self.live: dict[str, RequestState] = {}
        self.waiting = waiting
        self.running: list[RequestState] = []
        self.samples = ParallelSampleGroups(self.waiting, boundary=boundary)
        self.fetching: dict[Fetch, RequestState | None] = {}
        self.free_rows = list(range(n_rows))
        self.num_counted = self.counted_slots = self.num_preempted = self.preempted_tokens = 0
        self.finishing: Counter[int] = Counter()
        self._exclusive = rows_are_exclusive

    @property
    def num_waiting(self) -> int:
        """Requests without a row: new or preempted."""
        return len(self.waiting) + self.num_preempted + self.samples.num_deferred + len(self._fetching)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting requests must compute before they generate."""
        fetching = sum([len(state.tokens) for state in self._fetching])
        return self.waiting.num_tokens + self.preempted_tokens + self.samples.deferred_tokens + fetching

    @property
    def _fetching(self) -> list[RequestState]:
        return [state for state in self.fetching.values() if state is not None] if self.fetching else []

    @property
    def num_running(self) -> int:
        """Requests with work in the batch or a last token in flight."""
        return len(self.running) + self.num_counted + sum(self.finishing.values())

    def register(self, state: RequestState) -> None:
        """Add a new request, which is in no queue yet. Any thread may call it.

        Raises:
          ValueError: a live request has its id.
        """
        if self.live.setdefault(state.name, state) is not state:
            raise ValueError(f"request_id {state.name!r} is in use by a request that has not finished")

    def enqueue(self, state: RequestState) -> None:
        """Add a registered request to the waiting queue.

        If it names another sample of its prompt, it joins that one's group.

        Raises:
          InvalidRequest: it names a request with another prompt. It is no longer live.
        """
        if (fork_of := state.request.fork_of) is not None:
            try:
                self.samples.join(state, self.live.get(fork_of))
            except InvalidRequest:
                del self.live[state.name]
                raise
        self.waiting.join(state)
        self.waiting.push(state)

    def wait_for(self, fetch: Fetch) -> None:
        """Take the first request out of the queue until its prefix has come."""
        state = self.waiting.pop()
        state.has_fetched = True
        self.fetching[fetch] = state

    def fetched(self, fetch: Fetch) -> None:
        """Return a request whose prefix has come to the queue, if it has not ended."""
        state = self.fetching.pop(fetch)
        if state is not None:
            self.waiting.push(state)

    def begin(self, state: RequestState) -> None:
        """Assign a row to an admitted request."""
        state.phase = Phase.RUNNING
        state.row = heapq.heappop(self.free_rows)
        if not state.has_begun:
            state.has_begun = True
            state.cached = state.computed
        insort(self.running, state, key=_by_key)

    def finish(self, state: RequestState) -> None:
        """Remove a request from the batch when its last token is in flight."""
        state.phase = Phase.FINISHING
        self.running.remove(state)
        self.finishing[state.allocation.part] += 1
        # The next plan may use the row: the device runs it after this one. A constrained request may need it back.
        if not self._exclusive and not state.is_constrained:
            self.leave_row(state)

    def take_back_token(self, state: RequestState) -> None:
        """Undo the newest launched token of a request, because it was withdrawn."""
        if state.phase == Phase.FINISHING:
            state.phase = Phase.RUNNING
            self.finishing[state.allocation.part] -= 1
            insort(self.running, state, key=_by_key)
        assert state.phase == Phase.RUNNING
        state.length -= 1
        state.computed = state.length - 1

    def by_turn(self) -> list[RequestState]:
        """The running requests: the tenant whose turn it is first, by key within a tenant."""
        if not self.waiting.is_shared:
            return self.running.copy()
        return sorted(self.running, key=_by_turn)

    def victims(self) -> Iterator[BlockAllocation]:
        """The running requests' blocks in order of preemption: last whose turn it is first."""
        for state in reversed(self.by_turn()):
            yield state.allocation

    def preempt(self, victim: BlockAllocation) -> RequestState:
        """Preempt the running request whose blocks these were; they have been released."""
        index = next(at for at in reversed(range(len(self.running))) if self.running[at].allocation is victim)
        state = self.running.pop(index)
        self.leave_row(state)
        if state.in_flight:
            state.phase = Phase.PREEMPTED
            self.num_preempted += 1
            self.preempted_tokens += state.length
        else:
            self._wait_again(state)
        return state

    def preempted_has_landed(self, state: RequestState) -> None:
        """Return a preempted request to the queue when its last chunk in flight has landed."""
        self.num_preempted -= 1
        self.preempted_tokens -= state.length
        self._wait_again(state)

    def _wait_again(self, state: RequestState) -> None:
        self.leave_row(state)
        state.phase = Phase.WAITING
        state.computed = 0
        state.has_fetched = False
        state.drafts = None  # the draft model's keys were lost with the blocks
        # A prompt with scores is computed whole. Once that is done, its prefix need not be computed again.
        state.allocation.takes_hits = state.scored == state.score_end
        self.waiting.push(state)

    def end(self, state: RequestState) -> None:
        """End a request, whatever its phase. The caller releases its blocks."""
        was_deferred = self.samples.leave(state)
        self.waiting.leave(state)
        if state.phase == Phase.WAITING:
            fetch = next((fetch for fetch, waiting in self.fetching.items() if waiting is state), None)
            if fetch is not None:
                self.fetching[fetch] = None
            elif not was_deferred:
                self.waiting.remove(state)
        elif state.phase == Phase.RUNNING:
            self.running.remove(state)
        elif state.phase == Phase.FINISHING:
            self.finishing[state.allocation.part] -= 1
        else:
            self.num_preempted -= 1
            self.preempted_tokens -= state.length
        state.phase = Phase.ENDED
        self.leave_row(state)

    def leave_row(self, state: RequestState) -> None:
        """Free the row of a request, unless a plan in flight must not share it."""
        if state.row >= 0 and not (self._exclusive and state.in_flight):
            heapq.heappush(self.free_rows, state.row)
            state.row = -1
