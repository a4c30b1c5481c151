"""Conversion between protobuf messages and values, and from errors to gRPC statuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import InvalidRequest
from jaxserve.generation import beam_search as beams
from jaxserve.generation import chat
from jaxserve.generation.completion import Completion, Delta
from jaxserve.request import Alternatives, FinishReason
from server.errors import ApiError, ErrorKind
from server.proto.jaxserve.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}
_CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.WRONG_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.FAILED: grpc.StatusCode.INTERNAL,
}


def fields_of(message: pb.GenerateRequest) -> dict[str, Any]:
    """The fields that a caller has set, as `parse_request` takes them."""
    fields = set_fields(message)
    if "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = list(message.prompt_token_ids.ids)
    if "messages" in fields:
        first = message.messages[: chat.MAX_MESSAGES + 1]  # one too many is enough for a refusal
        fields["messages"] = [_message(each) for each in first]
    if "grammar" in fields:
        fields["grammar"] = _grammar(message.grammar)
    for name in ("request_id", "priority", "cache_salt", *beams.FIELDS):  # these belong to the call
        fields.pop(name, None)
    return fields


def input_of(message: pb.EmbedInput) -> dict[str, Any]:
    """The prompt, as `parse_request` takes it."""
    if message.HasField("prompt_token_ids"):
        return {"prompt_token_ids": list(message.prompt_token_ids.ids)}
    return {"prompt": message.prompt} if message.HasField("prompt") else {}


def set_fields(message: Message) -> dict[str, Any]:
    """The fields set in a message (nonzero where there is no presence), as plain values."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        is_list = field.is_repeated and field.message_type is None
        fields[field.name] = dict(value) if isinstance(value, Mapping) else list(value) if is_list else value
    return fields


def _message(message: pb.ChatMessage) -> dict[str, str]:
    name = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content} | name


def _grammar(message: pb.Grammar) -> dict[str, Any]:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("grammar", "is empty; set one of its kinds")
    value: Any = getattr(message, kind)
    if kind == "json_object":
        if not value:
            raise InvalidRequest("grammar", "has json_object false; leave the grammar out instead")
        return {"type": kind}
    return {"type": kind, "value": list(value.options) if kind == "choice" else value}


def add(response: pb.GenerateResponse, delta: Delta) -> None:
    response.text += delta.text
    response.token_ids.extend(delta.token_ids)
    response.logprobs.extend(delta.logprobs)
    response.top_logprobs.extend(map(_alternatives, delta.top_logprobs))
    for logprob, alternatives in delta.prompt_logprobs:
        response.prompt_logprobs.append(logprob)
        if alternatives is not None:
            response.prompt_top_logprobs.append(_alternatives(alternatives))


def whole(completion: Completion, index: int) -> pb.GenerateResponse:
    response = pb.GenerateResponse(index=index)
    add(response, completion.delta)
    conclude(response, completion)
    return response


def conclude(response: pb.GenerateResponse, completion: Completion) -> None:
    """Adds what only the last message has: finish reason, usage, seed and score."""
    assert completion.finish_reason is not None
    response.finish_reason = _REASONS[completion.finish_reason]
    response.usage.prompt_tokens = completion.prompt_tokens
    response.usage.completion_tokens = len(completion.token_ids)
    response.usage.cached_tokens = completion.cached_tokens
    if completion.seed is not None:
        response.seed = completion.seed
    if completion.score is not None:
        response.score = completion.score


def _alternatives(alternatives: Alternatives) -> pb.Alternatives:
    return pb.Alternatives(token_ids=alternatives.token_ids, logprobs=alternatives.logprobs)


def status_of(refusal: ApiError) -> grpc.Status:
    """The gRPC status of an error, with BadRequest (the field) or RetryInfo (when to retry)."""
    details = []
    if refusal.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=str(refusal))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refusal.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(refusal.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number: int = _CODES[refusal.kind].value[0]
    return rpc_status.to_status(status_pb2.Status(code=number, message=str(refusal), details=packed))
