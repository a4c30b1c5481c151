"""What the gRPC services share: how a call is ended, and when its caller stops waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from server import errors, messages
from server.door import Door


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
