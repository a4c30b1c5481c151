"""What the gRPC services share: how a call is ended, when its caller stops waiting, and what a full queue costs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from server import errors
from server.call import new_id
from server.grpc import messages
from server.handler import RequestHandler


@contextlib.asynccontextmanager
async def answering(handler: RequestHandler, context: Any, call_id: str) -> AsyncIterator[None]:
    """Ends a call with a status where it is refused, or goes wrong, inside."""
    try:
        with handler.answering(call_id):
            try:
                yield
            except grpc.aio.InternalError:  # a write that was blocked when the caller left
                raise asyncio.CancelledError from None
    except errors.ApiError as refusal:
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

    def __init__(self, handler: RequestHandler, methods: Iterable[str]) -> None:
        self._handler, self._methods = handler, frozenset(methods)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method not in self._methods or (refusal := self._handler.full()) is None:
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: Any) -> None:
            async with answering(self._handler, context, new_id()):
                raise refusal

        # As a stream of both kinds it asks for no message first, and so it fits every method.
        return grpc.stream_stream_rpc_method_handler(refuse)
