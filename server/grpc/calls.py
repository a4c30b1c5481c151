"""Shared by the gRPC services: ending calls with a status, deadlines, and rates."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar, cast

import grpc

from server import errors
from server.call import new_id, traceparent
from server.grpc import messages
from server.handler import RequestHandler

_Method = TypeVar("_Method", bound=Callable[..., Any])


@contextlib.asynccontextmanager
async def answering(handler: RequestHandler, context: Any, call_id: str) -> AsyncIterator[None]:
    """Ends the call with an error status if the block raises."""
    try:
        with handler.answering(call_id):
            try:
                yield
            except grpc.aio.InternalError:  # a write that was blocked when the caller left
                raise asyncio.CancelledError from None
    except errors.ApiError as error:
        await context.abort_with_status(messages.status_of(error))


def answered(method: _Method) -> _Method:
    """A method of a service, whose exceptions end the call with an error status."""

    @functools.wraps(method)
    async def call(service: Any, request: Any, context: Any) -> Any:
        async with answering(service._handler, context, new_id()):
            return await method(service, request, context)

    return cast(_Method, call)


def deadline(context: Any) -> float | None:
    """The deadline of a call in monotonic seconds; None without one."""
    seconds = context.time_remaining()
    return None if seconds is None else time.monotonic() + seconds


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Notes the caller's span (metadata `traceparent`) for the spans of the call."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        given = dict(handler_call_details.invocation_metadata or ()).get("traceparent", "")
        traceparent.set(given if isinstance(given, str) else "")  # every RPC has its own task
        return await continuation(handler_call_details)


class RateInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls on a used-up rate, before their message is read.

    Args:
      methods: methods whose calls wait in the queue, such as /jaxserve.v1.Inference/Generate.
    """

    def __init__(self, handler: RequestHandler, methods: Iterable[str]) -> None:
        self._handler, self._methods = handler, frozenset(methods)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method not in self._methods:
            return await continuation(handler_call_details)
        try:
            self._handler.enter()
        except errors.ApiError as error:
            refusal = error
        else:
            return await continuation(handler_call_details)

        async def refuse(_requests: Any, context: Any) -> None:
            async with answering(self._handler, context, new_id()):
                raise refusal

        # A handler of streams reads no message first, so it fits every method.
        return grpc.stream_stream_rpc_method_handler(refuse)
