"""Values that one task puts and another takes, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

_END = object()

Put = Callable[[Any], Awaitable[None]]


async def put_by(run: Callable[[Put], Awaitable[Any]]) -> AsyncIterator[list[Any]]:
    """Yields what `run` puts, all there is at a time; raises its error, cancels it if closed."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.ensure_future(run(queue.put))
    running.add_done_callback(lambda _: queue.put_nowait(_END))
    try:
        while True:
            values = [await queue.get()]
            while not queue.empty():
                values.append(queue.get_nowait())
            has_ended = values[-1] is _END
            if given := values[: len(values) - has_ended]:
                yield given
            if has_ended:
                break
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])
