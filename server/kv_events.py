"""The log of KV events: what has changed in the prefix cache, for routers that follow it.

Every batch of changes has a number, from 1. Readers keep their own place in the log, which is bounded, so that a slow
reader or one that is gone costs nothing and holds nobody back. It finds out that it has missed some, and starts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.scheduler.prefix_changes import PrefixChange, size_of

if TYPE_CHECKING:
    from server.engine_client import EngineClient

MOST_BATCHES = 10_000  # that are kept, as in vLLM
_MOST_BYTES = 64 * 2**20


class KvEventBatch(NamedTuple):
    """Changes of the prefix cache.

    Attributes:
      sequence: its number.
      time: Unix time.
    """

    sequence: int
    time: float
    changes: tuple[PrefixChange, ...]


class Missed(LookupError):
    """Some batches after a number are gone, or the number is of another run of the server."""


class KvEventLog:
    """Keeps the last batches of an engine's KV events. Make it on the event loop that serves.

    Args:
      engine: its changes are collected from now on.

    Attributes:
      listeners: called on the event loop after a batch was added.
    """

    def __init__(
        self, engine: EngineClient, *, most_batches: int = MOST_BATCHES, most_bytes: int = _MOST_BYTES
    ) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._lock = threading.Lock()
        self._kept: deque[tuple[KvEventBatch, int]] = deque()  # and their bytes
        self._bytes = 0
        self._latest = 0
        self._is_scheduled = False
        self._take = engine.follow_prefixes(self._wake)

    @property
    def latest(self) -> int:
        """Number of the newest batch; 0 before there is one."""
        return self._latest

    def after(self, sequence: int) -> list[KvEventBatch]:
        """The kept batches with higher numbers. Any thread may call this."""
        newest_first: list[KvEventBatch] = []
        with self._lock:
            for batch, _ in reversed(self._kept):
                if batch.sequence <= sequence:
                    break
                newest_first.append(batch)
        return newest_first[::-1]

    async def follow(self, sequence: int) -> AsyncIterator[KvEventBatch]:
        """Yields the batches after a number, those to come included; from 0 on, all that are kept.

        Raises:
          Missed: some of them are not kept, or there has never been that number.
        """
        changed = asyncio.Event()
        self.listeners.append(changed.set)
        try:
            while True:
                changed.clear()
                batches = self.after(sequence)
                oldest = self._kept[0][0].sequence if self._kept else 1
                if sequence > self._latest or 0 < sequence < oldest - 1:
                    raise Missed(f"batch {sequence + 1} is not kept: the log has {oldest} to {self._latest}")
                for batch in batches:
                    yield batch
                    sequence = batch.sequence
                await changed.wait()
        finally:
            self.listeners.remove(changed.set)

    def _wake(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._is_scheduled = False  # first, so that later changes schedule another turn
        changes = tuple(self._take())
        if not changes:
            return
        size = sum(map(size_of, changes))
        with self._lock:
            self._latest += 1
            self._kept.append((KvEventBatch(self._latest, time.time(), changes), size))
            self._bytes += size
            while len(self._kept) > self._most_batches or (self._bytes > self._most_bytes and len(self._kept) > 1):
                self._bytes -= self._kept.popleft()[1]
        for listener in self.listeners:
            listener()


def number_of(digest: bytes) -> int:
    """A block's number in events: the last 64 bits of its digest, as in vLLM."""
    return int.from_bytes(digest[-8:], "big")
