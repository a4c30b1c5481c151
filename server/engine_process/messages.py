"""Requests and iterations as the protobuf messages of messages.proto, and back.

The values of the start (EngineJob, EngineInfo) are JSON. Received bytes are checked: BadFrame is raised for those that
the other side would not send.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from pydantic import ConfigDict, TypeAdapter

from jaxserve.iteration import Admission, IterationPlan
from jaxserve.multihost import wire
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.prefix_changes import BlocksRemoved, BlocksStored, CacheCleared, PrefixChange
from jaxserve.stats import IterationRecord, Load
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import BadFrame, frame

_T = TypeVar("_T")

_SAMPLING = SamplingParams()
_PLAIN = TokenEvent("")  # has the values from the fourth field on of an event with tokens only
_CACHED = TokenEvent._fields.index("cached_tokens")
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Load))
_RECORD_FIELDS = tuple(name for name in IterationRecord._fields if name != "plan")
_JSON = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")


def _shared(message: Any, names: Iterable[str]) -> list[tuple[str, bool, bool]]:
    """The plain fields of a message that a value has too: (name, is repeated, may be absent)."""
    return [
        (field.name, field.is_repeated, field.has_presence)
        for field in message.DESCRIPTOR.fields
        if field.name in names and field.message_type is None
    ]


_REQUEST = _shared(pb.Request, Request.__dataclass_fields__)
_LIMITS = _shared(pb.Request, SamplingParams.__dataclass_fields__)
_EVENT = _shared(pb.Event, {*TokenEvent._fields} - {"finish_reason"})


class Iterations(NamedTuple):
    """The contents of one message about iterations.

    Attributes:
      received: number of requests that the engine process had read when it wrote the message.
      loads: load of each replica after these iterations.
      events: events of all requests, in order.
      records: records of the iterations; their plans have only chunks and admissions.
    """

    received: int
    loads: tuple[Load, ...]
    events: list[TokenEvent]
    records: list[IterationRecord]


# Frames


def to_engine(**message: Any) -> bytes:
    """A frame with a FromFront message, given its one field."""
    return frame(pb.FromFront(**message).SerializeToString())


def to_front(**message: Any) -> bytes:
    """A frame with a FromEngine message, given its one field."""
    return frame(pb.FromEngine(**message).SerializeToString())


def parse(kind: type[_T], body: bytes) -> tuple[str, _T]:
    """The message in a frame and the name of its one field. Raises BadFrame."""
    message: Any = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as problem:
        raise BadFrame(f"not a {kind.__name__} message: {problem}") from None
    name = message.WhichOneof("message")
    if name is None:
        raise BadFrame(f"a {kind.__name__} message without a field")
    return name, message


# Values of the start


def to_json(kind: type[_T], value: _T) -> bytes:
    return _adapter(kind).dump_json((value,))


def from_json(kind: type[_T], data: bytes) -> _T:
    """The dataclass in JSON. Raises BadFrame for anything else."""
    try:
        return _adapter(kind).validate_json(data, strict=True)[0]
    except ValueError as problem:
        raise BadFrame(f"not the JSON of {kind.__name__}: {problem}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # In a tuple, because pydantic takes no configuration for a dataclass alone.
    return TypeAdapter(tuple[kind], config=_JSON)  # pyright: ignore[reportInvalidTypeForm]


# Requests


def encode_request(request: Request) -> pb.Request:
    """The message of a request. Its seed arrives modulo 2**64, as the sampler reads it."""
    return pb.Request(
        sampling=wire.encode_sampling(request.sampling),
        **_fields(request, _REQUEST),
        **_fields(request.sampling, _LIMITS),
    )


def decode_request(message: pb.Request) -> Request:
    """The request in a message. Raises BadFrame for one that cannot be a request."""
    try:
        sampling = dataclasses.replace(wire.decode_sampling(message.sampling), **_values(message, _LIMITS))
        return Request(sampling=sampling, **_values(message, _REQUEST))
    except ValueError as problem:
        raise BadFrame(f"not a request: {problem}") from None


def _fields(value: Any, shared: Sequence[tuple[str, bool, bool]]) -> dict[str, Any]:
    return {name: getattr(value, name) for name, _, _ in shared}


def _values(message: Any, shared: Sequence[tuple[str, bool, bool]]) -> dict[str, Any]:
    found = _fields(message, shared)
    for name, is_repeated, may_be_absent in shared:
        if is_repeated:
            found[name] = tuple(found[name])
        elif may_be_absent and not message.HasField(name):
            found[name] = None
    return found


# Iterations


def encode_iterations(
    received: int, loads: Sequence[Load], events: Sequence[TokenEvent], records: Sequence[IterationRecord]
) -> bytes:
    """A frame that reports iterations. Raises TooLarge."""
    message = pb.FromEngine()
    report = message.iterations
    report.received = received
    for load in loads:
        report.loads.add(**{name: getattr(load, name) for name in _LOAD_FIELDS})
    plain = [event for event in events if _is_plain(event)]
    columns = report.tokens
    columns.request_id.extend([event.request_id for event in plain])
    columns.count.extend([len(event.token_ids) for event in plain])
    columns.cached_tokens.extend([event.cached_tokens for event in plain])
    columns.token.extend(chain.from_iterable([event.token_ids for event in plain]))
    columns.logprob.extend(chain.from_iterable([event.logprobs for event in plain]))
    if len(plain) < len(events):
        report.others.extend(_event(index, each) for index, each in enumerate(events) if not _is_plain(each))
    for record in records:
        _write_record(report.records.add(), record)
    return frame(message.SerializeToString())


def decode_iterations(message: pb.Iterations) -> Iterations:
    """What a message reports. Raises BadFrame for one that cannot be a report."""
    try:
        loads = tuple(Load(**{name: getattr(load, name) for name in _LOAD_FIELDS}) for load in message.loads)
        events = list(_plain_events(message.tokens))
        for other in message.others:  # in order: an index counts the events before it
            if other.index > len(events):
                raise ValueError(f"an event has index {other.index} among {len(events)}")
            events.insert(other.index, _read_event(other))
        return Iterations(message.received, loads, events, [_read_record(record) for record in message.records])
    except ValueError as problem:
        raise BadFrame(f"not a report of iterations: {problem}") from None


def _is_plain(event: TokenEvent) -> bool:
    return len(event.logprobs) == len(event.token_ids) and (
        event[3:_CACHED] + event[_CACHED + 1 :] == _PLAIN[3:_CACHED] + _PLAIN[_CACHED + 1 :]
    )


def _plain_events(columns: pb.TokenColumns) -> Iterator[TokenEvent]:
    tokens, logprobs = tuple(columns.token), tuple(columns.logprob)
    if sum(columns.count) != len(tokens) or len(tokens) != len(logprobs):
        raise ValueError("the counts of its tokens do not agree")
    at = 0
    for name, count, cached in zip(columns.request_id, columns.count, columns.cached_tokens, strict=True):
        end = at + count
        yield TokenEvent(name, tokens[at:end], logprobs[at:end], cached_tokens=cached)
        at = end


def _event(index: int, event: TokenEvent) -> pb.Event:
    return pb.Event(
        index=index,
        top_logprobs=map(_alternatives, event.top_logprobs),
        prompt_logprobs=[
            pb.Score(logprob=logprob, alternatives=None if others is None else _alternatives(others))
            for logprob, others in event.prompt_logprobs
        ],
        finish_reason=event.finish_reason and event.finish_reason.value,
        **_fields(event, _EVENT),
    )


def _read_event(message: pb.Event) -> TokenEvent:
    return TokenEvent(
        top_logprobs=tuple(map(_read_alternatives, message.top_logprobs)),
        prompt_logprobs=tuple(
            (score.logprob, _read_alternatives(score.alternatives) if score.HasField("alternatives") else None)
            for score in message.prompt_logprobs
        ),
        finish_reason=FinishReason(message.finish_reason) if message.HasField("finish_reason") else None,
        **_values(message, _EVENT),
    )


def _alternatives(alternatives: Alternatives) -> pb.Alternatives:
    return pb.Alternatives(token_ids=alternatives.token_ids, logprobs=alternatives.logprobs)


def _read_alternatives(message: pb.Alternatives) -> Alternatives:
    return Alternatives(tuple(message.token_ids), tuple(message.logprobs))


def _write_record(message: pb.Record, record: IterationRecord) -> None:
    for name in _RECORD_FIELDS:
        setattr(message, name, getattr(record, name))
    plan, shown = record.plan, message.plan
    shown.sequence, shown.bucket = plan.sequence, plan.bucket
    for admission in plan.admissions:
        shown.admissions.add(row=admission.row, request_id=admission.request_id)
    if plan.chunks:
        wire.write_chunks(shown.chunks, plan.chunks)


def _read_record(message: pb.Record) -> IterationRecord:
    shown = message.plan
    plan = IterationPlan(
        sequence=shown.sequence,
        bucket=shown.bucket,
        admissions=tuple(
            Admission(
                row=each.row, request_id=each.request_id, tokens=(), prompt_length=0, blocks=(), sampling=_SAMPLING
            )
            for each in shown.admissions
        ),
        chunks=wire.read_chunks(shown.chunks),
        table_changes=(),
        sampler=None,
        scoring=False,
    )
    return IterationRecord(plan=plan, **{name: getattr(message, name) for name in _RECORD_FIELDS})


# Changes of the prefix caches


def encode_changes(changes: Iterable[PrefixChange]) -> bytes:
    """A frame with changes of the prefix caches."""
    message = pb.FromEngine()
    message.prefix_changes.SetInParent()
    for change in changes:
        written = message.prefix_changes.changes.add()
        match change:
            case BlocksStored():
                written.stored.digests.extend(change.digests)
                written.stored.tokens.extend(change.tokens)
                written.stored.block_size, written.stored.salt = change.block_size, change.salt
                if change.parent is not None:
                    written.stored.parent = change.parent
            case BlocksRemoved():
                written.removed.digests.extend(change.digests)
            case CacheCleared():
                written.cleared.SetInParent()
    return frame(message.SerializeToString())


def decode_changes(message: pb.PrefixChanges) -> list[PrefixChange]:
    """The changes in a message. Raises BadFrame for one that cannot be a list of changes."""
    return [_read_change(change) for change in message.changes]


def _read_change(message: pb.PrefixChange) -> PrefixChange:
    match message.WhichOneof("change"):
        case "stored":
            stored = message.stored
            if len(stored.tokens) != len(stored.digests) * stored.block_size:
                raise BadFrame("the tokens of stored blocks do not fill them")
            parent = stored.parent if stored.HasField("parent") else None
            return BlocksStored(
                tuple(stored.digests), parent, array("I", stored.tokens), stored.block_size, stored.salt
            )
        case "removed":
            return BlocksRemoved(tuple(message.removed.digests))
        case "cleared":
            return CacheCleared()
    raise BadFrame("a change of the prefix caches without a kind")
