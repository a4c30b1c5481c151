"""Errors that end a call; each protocol maps them to its own status codes."""

from __future__ import annotations

import enum

RETRY_SECONDS = 1.0  # default Retry-After


class ErrorKind(enum.Enum):
    """Why a call failed: who is at fault, and whether a retry may succeed."""

    INVALID = "invalid"  # the call is wrong; a retry fails again
    NOT_FOUND = "not found"  # the call names a model or route that does not exist
    UNSUPPORTED = "unsupported"  # this checkpoint lacks what the call needs
    FORBIDDEN = "forbidden"  # the tenant is no operator
    WRONG_STATE = "wrong state"  # this server, or what it does now, does not allow the call
    UNIMPLEMENTED = "unimplemented"  # this server does not implement the call
    QUEUE_FULL = "queue full"  # retry after `retry_after` seconds
    RATE_LIMITED = "rate limited"  # the tenant exceeds its rate; retry after `retry_after` seconds
    TOO_LATE = "too late"  # the deadline has passed, or cannot be met
    UNAVAILABLE = "unavailable"  # this server cannot serve now; another one may
    FAILED = "failed"  # an error of the server; the log has the traceback


class ApiError(Exception):
    """Ends a call with an error that its caller sees.

    Attributes:
      kind: see ErrorKind.
      field: name of the field at fault, with ErrorKind.INVALID.
      retry_after: seconds after which a retry makes sense: with QUEUE_FULL and RATE_LIMITED, and with UNAVAILABLE where
        the engine may be back by then.
    """

    def __init__(
        self, kind: ErrorKind, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
        self.retry_after = retry_after


def invalid(field: str, message: str) -> ApiError:
    return ApiError(ErrorKind.INVALID, message, field=field)


def queue_full(message: str, retry_after: float = RETRY_SECONDS) -> ApiError:
    return ApiError(ErrorKind.QUEUE_FULL, message, retry_after=retry_after)


def unavailable(message: str, retry_after: float | None = None) -> ApiError:
    return ApiError(ErrorKind.UNAVAILABLE, message, retry_after=retry_after)


def failed(call_id: str) -> ApiError:
    """The error for an internal failure. It hides the cause; the log has it under the call's id."""
    return ApiError(ErrorKind.FAILED, f"the request failed; the server's log explains it under {call_id}")
