"""What the gRPC services share: how a call is ended, when its caller stops waiting, and what a full queue costs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from server import errors, messages
from server.door import Door
from server.generation import new_id


@contextlib.asynccontextmanager
async def answering(door: Door, context: Any, call_id: str) -> AsyncIterator[None]:
    """Ends a call with a status where it is refused, or goes wrong, inside."""
    try:
        with door.answering(call_id):
            try:
                yield
            except grpc.aio.InternalError:  # a write that was blocked when the caller left
                raise asyncio.CancelledError from None
    except errors.Refusal as refusal:
        await context.abort_with_status(messages.status_of(refusal))


def deadline(context: Any) -> float | None:
    """In monotonic seconds; None for a caller who waits for ever."""
    seconds = context.time_remaining()
    return None if seconds is None else time.monotonic() + seconds


class FullQueueInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls while the queue takes none, before their message is read: half of what a refusal costs otherwise,
    and what counts under overload is how many of them a second the event loop has time for.

    Args:
      methods: whose calls wait in the queue, such as /jaxserve.v1.Inference/Generate.
    """

    def __init__(self, door: Door, methods: Iterable[str]) -> None:
        self._door, self._methods = door, frozenset(methods)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method not in self._methods or (refusal := self._door.full()) is None:
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: Any) -> None:
            async with answering(self._door, context, new_id()):
                raise refusal

        # As a stream of both kinds it asks for no message first, and so it fits every method.
        return grpc.stream_stream_rpc_method_handler(refuse)
