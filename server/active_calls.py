"""The calls that the engine works on: counted, ended at their deadlines, and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from server import errors
from server.call import ActiveCall

_GRACE_SECONDS = 0.2  # after a deadline, in which a protocol that knows of deadlines ends its calls itself


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
