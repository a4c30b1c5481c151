"""One budget for the bytes of all bodies that have begun to arrive and are not parsed yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from server import errors
from server.limits import LONG_BYTES


class UnfinishedBodies:
    """Bounds the bytes of unfinished bodies: beyond `most`, the calls with the oldest are ended.

    So callers who send endless bodies take a bounded amount of memory, and do not keep others out. A body that has
    arrived counts while it waits to be parsed; beyond the bound its call is refused.
    """

    def __init__(self, most: int) -> None:
        self._most, self._total = most, 0
        self._sizes: dict[asyncio.Timeout, int] = {}  # by the time limit of each, the oldest first

    @contextlib.contextmanager
    def reading(self, limit: asyncio.Timeout) -> Iterator[Callable[[int], None]]:
        """Counts a body while the block reads it.

        Args:
          limit: expires if the body is ended.

        Yields:
          A function to call with the number of bytes whenever more have come.
        """
        self._sizes[limit] = 0
        try:
            yield lambda size: self._has(limit, size)
        finally:
            self._total -= self._sizes.pop(limit, 0)

    def _has(self, limit: asyncio.Timeout, size: int) -> None:
        if limit not in self._sizes:  # it has been ended
            return
        self._total += size - self._sizes[limit]
        self._sizes[limit] = size
        self._end_oldest()

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Counts a long body while the block parses it. ApiError if there are too many."""
        if size <= LONG_BYTES:
            yield
            return
        self._total += size
        try:
            self._end_oldest()
            if self._total > self._most:
                raise errors.queue_full("too many long calls have come at once")
            yield
        finally:
            self._total -= size

    def _end_oldest(self) -> None:
        while self._total > self._most and self._sizes:
            oldest = next(iter(self._sizes))
            self._total -= self._sizes.pop(oldest)
            oldest.reschedule(asyncio.get_running_loop().time())
