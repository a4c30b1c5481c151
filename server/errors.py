"""How a call ends without an answer, whatever its protocol; each protocol says in its own file what it makes of it."""

from __future__ import annotations

import enum

RETRY_SECONDS = 1.0  # what a refused caller is told to wait: a queue of requests moves on in seconds, not in minutes


class Kind(enum.Enum):
    """Whose fault it is, and whether trying again may help."""

    INVALID = "invalid"  # the caller's; the same call will never be served
    UNAUTHENTICATED = "unauthenticated"  # the caller has not shown who it is
    NOT_FOUND = "not found"  # what the call names is not there
    UNSUPPORTED = "unsupported"  # this checkpoint cannot do it
    UNIMPLEMENTED = "unimplemented"  # nothing served here can
    QUEUE_FULL = "queue full"  # too much waits already; again in `retry_after` seconds
    RATE_LIMITED = "rate limited"  # the caller calls more often than it may; likewise
    TOO_LATE = "too late"  # the answer would come after the caller's deadline
    UNAVAILABLE = "unavailable"  # this server cannot serve now, another one may
    FAILED = "failed"  # ours; the log explains it


class ApiError(Exception):
    """A call that ends without an answer.

    Attributes:
      kind: see Kind.
      field: name of the field at fault, with Kind.INVALID.
      retry_after: seconds after which trying again makes sense, with Kind.QUEUE_FULL and Kind.RATE_LIMITED, and with
        Kind.UNAVAILABLE where the engine may be back by then.
    """

    def __init__(self, kind: Kind, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
        self.retry_after = retry_after


def invalid(field: str, message: str) -> ApiError:
    """A wrong field."""
    return ApiError(Kind.INVALID, message, field=field)


def queue_full(message: str, retry_after: float = RETRY_SECONDS) -> ApiError:
    """Too much waits already."""
    return ApiError(Kind.QUEUE_FULL, message, retry_after=retry_after)


def unavailable(message: str, retry_after: float | None = None) -> ApiError:
    """This server cannot serve now."""
    return ApiError(Kind.UNAVAILABLE, message, retry_after=retry_after)


def failed(call_id: str) -> ApiError:
    """A failure of ours, without its cause, which is none of the caller's business; the log has it under the id."""
    return ApiError(Kind.FAILED, f"the request failed; the server's log explains it under {call_id}")
