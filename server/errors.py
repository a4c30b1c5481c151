"""Failures as gRPC clients see them: a status code, a sentence, and details a program can read (google.rpc)."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

RETRY_SECONDS = 1.0  # what a refused caller is told to wait: a queue of requests moves on in seconds, not in minutes


class Refusal(Exception):
    """A call that ends without an answer, with the status its caller gets."""

    def __init__(self, code: grpc.StatusCode, message: str, *details: Message) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    @property
    def status(self) -> grpc.Status:
        """The status in the form `abort_with_status` takes."""
        packed = []
        for detail in self.details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        number: int = self.code.value[0]
        return rpc_status.to_status(status_pb2.Status(code=number, message=str(self), details=packed))


def invalid(field: str, message: str) -> Refusal:
    """INVALID_ARGUMENT whose google.rpc.BadRequest names the field at fault."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
    return Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, message, error_details_pb2.BadRequest(field_violations=[violation])
    )


def queue_full(message: str) -> Refusal:
    """RESOURCE_EXHAUSTED whose google.rpc.RetryInfo says when to try again."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(RETRY_SECONDS * 1000))
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, error_details_pb2.RetryInfo(retry_delay=delay))


def unavailable(message: str) -> Refusal:
    """UNAVAILABLE: this server cannot serve now, another one may."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, message)


def internal(call_id: str) -> Refusal:
    """INTERNAL without the cause, which is none of the caller's business; the log has it under the same id."""
    return Refusal(grpc.StatusCode.INTERNAL, f"the request failed; the server's log explains it under {call_id}")
