"""What iterations brought, as bytes: all of their events at once, their records, and how busy the engine is.

The usual event (some tokens of a request that goes on) is spread over columns: names, counts, tokens, logprobs. An
event that says more is plain data as it is. For 64 events writing takes about half the time that protobuf takes, and
reading a third to a half. Numbers are in the order of the machine, on which both processes run.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from jaxserve.iteration import Admission, Chunk, IterationPlan
from jaxserve.request import TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import IterationRecord, Load
from server.engine_process import codec as plain
from server.engine_process.frames import BadFrame

_HEAD = struct.Struct("=QHHIIII")  # received, loads, records, usual events, tokens, bytes of names, of other events
_LOAD_TYPES = [int if field.type in ("int", int) else float for field in dataclasses.fields(Load)]
_LOAD_NAMES = [field.name for field in dataclasses.fields(Load)]
_load_values = operator.attrgetter(*_LOAD_NAMES)
_LOAD = struct.Struct("=" + "".join("q" if kind is int else "d" for kind in _LOAD_TYPES))
_RECORD = struct.Struct("=HQIIIIddddddII")  # its numbers, in the order of `_numbers`; then chunks, bytes of admissions
_SAMPLING = SamplingParams()
_USUAL = TokenEvent("")  # but for the first three fields and cached_tokens
_CACHED = TokenEvent._fields.index("cached_tokens")


class Iterations(NamedTuple):
    """What one message says.

    Attributes:
      received: how many requests the engine process had taken in when it was made.
      loads: of each replica, after all of this.
      events: of every request, in order.
      records: of the iterations; their plans say what is shown of them (chunks, and which request took which row).
    """

    received: int
    loads: tuple[Load, ...]
    events: list[TokenEvent]
    records: list[IterationRecord]


def encode(
    received: int, loads: Sequence[Load], events: Sequence[TokenEvent], records: Sequence[IterationRecord]
) -> bytes:
    """The bytes of one message."""
    usual = [event for event in events if _is_usual(event)]
    other = []
    if len(usual) < len(events):
        event_codec = plain.codec(TokenEvent)
        other = [[index, event_codec.encode(event)] for index, event in enumerate(events) if not _is_usual(event)]
    tokens = array("i", chain.from_iterable(event.token_ids for event in usual))
    names = _json([event.request_id for event in usual])
    others = _json(other) if other else b""
    return b"".join(
        (
            _HEAD.pack(received, len(loads), len(records), len(usual), len(tokens), len(names), len(others)),
            *(_LOAD.pack(*_load_values(load)) for load in loads),
            names,
            array("I", [len(event.token_ids) for event in usual]).tobytes(),
            array("I", [event.cached_tokens for event in usual]).tobytes(),
            tokens.tobytes(),
            array("d", chain.from_iterable(event.logprobs for event in usual)).tobytes(),
            others,
            *map(_record, records),
        )
    )


def decode(data: bytes) -> Iterations:
    """What `encode` was given. Raises BadFrame for anything else."""
    try:
        return _decode(_Reader(data))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, struct.error) as problem:
        raise BadFrame(f"no iterations: {problem}") from None


def _is_usual(event: TokenEvent) -> bool:
    return len(event.logprobs) == len(event.token_ids) and (
        event[3:_CACHED] + event[_CACHED + 1 :] == _USUAL[3:_CACHED] + _USUAL[_CACHED + 1 :]
    )


def _record(record: IterationRecord) -> bytes:
    plan = record.plan
    chunks = array("i", chain.from_iterable(plan.chunks)).tobytes()
    taken = _json([[admission.row, admission.request_id] for admission in plan.admissions])
    return _RECORD.pack(*_numbers(record), len(plan.chunks), len(taken)) + chunks + taken


def _numbers(record: IterationRecord) -> tuple[Any, ...]:
    return (
        record.replica,
        record.plan.sequence,
        record.plan.bucket,
        record.decodes,
        record.prompt_tokens,
        record.waiting,
        record.schedule_s,
        record.pack_s,
        record.launch_s,
        record.wait_s,
        record.complete_s,
        record.finished_at,
    )


class _Reader:
    """Takes a message apart from its front; raises ValueError where it ends too soon."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("it ends too soon")
        return self._data[start : self._at]

    def numbers(self, code: str, count: int) -> array[Any]:
        found = array(code)
        found.frombytes(self.take(count * found.itemsize))
        return found

    def unpack(self, of: struct.Struct) -> tuple[Any, ...]:
        return of.unpack(self.take(of.size))

    def json(self, size: int) -> Any:
        return json.loads(self.take(size))

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("it goes on behind its end")


def _decode(reader: _Reader) -> Iterations:
    received, n_loads, n_records, n_usual, n_tokens, name_bytes, other_bytes = reader.unpack(_HEAD)
    loads = tuple(
        Load(**dict(zip(_LOAD_NAMES, reader.unpack(_LOAD), strict=True)))  # pyright: ignore[reportArgumentType]
        for _ in range(n_loads)
    )
    names = reader.json(name_bytes)
    counts, cached = reader.numbers("I", n_usual), reader.numbers("I", n_usual)
    tokens, logprobs = reader.numbers("i", n_tokens).tolist(), reader.numbers("d", n_tokens).tolist()
    if type(names) is not list or len(names) != n_usual or sum(counts) != n_tokens:
        raise ValueError("its counts do not agree")
    events, at = [], 0
    for name, count, hit in zip(names, counts, cached, strict=True):
        if type(name) is not str:
            raise ValueError("a request's name is no text")
        events.append(
            TokenEvent(name, tuple(tokens[at : at + count]), tuple(logprobs[at : at + count]), cached_tokens=hit)
        )
        at += count
    if other_bytes:
        event_codec = plain.codec(TokenEvent)
        for index, data in reader.json(other_bytes):  # in order: each finds its place as those before it are in theirs
            if type(index) is not int or not 0 <= index <= len(events):
                raise ValueError("an event has no place")
            events.insert(index, event_codec.decode(data))
    records = [_read_record(reader) for _ in range(n_records)]
    reader.end()
    return Iterations(received, loads, events, records)


def _read_record(reader: _Reader) -> IterationRecord:
    *numbers, n_chunks, taken_bytes = reader.unpack(_RECORD)
    replica, sequence, bucket, decodes, prompt_tokens, waiting, *seconds = numbers
    flat = reader.numbers("i", 4 * n_chunks).tolist()
    plan = IterationPlan(
        sequence=sequence,
        bucket=bucket,
        admissions=tuple(_admission(row, name) for row, name in reader.json(taken_bytes)),
        chunks=tuple(map(Chunk, flat[0::4], flat[1::4], flat[2::4], flat[3::4])),
        table_changes=(),
        sampler=None,
        scoring=False,
    )
    return IterationRecord(replica, plan, decodes, prompt_tokens, waiting, *seconds)


def _admission(row: int, name: str) -> Admission:
    if type(row) is not int or type(name) is not str:
        raise ValueError("a row was taken by nobody")
    return Admission(row=row, request_id=name, tokens=(), prompt_length=0, blocks=(), sampling=_SAMPLING)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
