"""The queue of requests that wait for a row, ordered by priority and arrival.

The cost of an operation hardly grows with the length of the queue.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """A queue entry: anything with a key and tokens."""

    key: tuple[float, int]
    tokens: list[int]


E = TypeVar("E", bound=Entry)


class WaitingQueue(Generic[E]):
    """A heap by `key`.

    Removal from the middle only marks an entry; marked entries are dropped when they reach the front.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], E]] = []
        self._gone: set[tuple[float, int]] = set()
        self.num_tokens = 0  # of all entries

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def push(self, entry: E) -> None:
        """Add `entry`; its key must be unique in the queue."""
        heapq.heappush(self._heap, (entry.key, entry))
        self.num_tokens += len(entry.tokens)

    def first(self) -> E | None:
        """The next entry, which stays in the queue; None if the queue is empty."""
        while self._gone and self._heap[0][0] in self._gone:
            self._gone.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1] if self._heap else None

    def pop(self) -> E:
        """Remove and return the next entry."""
        key, entry = heapq.heappop(self._heap)
        assert key not in self._gone
        self.num_tokens -= len(entry.tokens)
        return entry

    def remove(self, entry: E) -> None:
        """Remove `entry`, wherever it is in the queue."""
        self._gone.add(entry.key)
        self.num_tokens -= len(entry.tokens)
        if len(self._gone) > 64 and 2 * len(self._gone) > len(self._heap):
            self._heap = [item for item in self._heap if item[0] not in self._gone]
            heapq.heapify(self._heap)
            self._gone.clear()
