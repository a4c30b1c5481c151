"""Frames and iterations: whatever a socket brings is either what was sent, or refused."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.iteration import Admission, Chunk
from jaxserve.request import TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import IterationRecord, Load
from server.engine_process import iterations
from server.engine_process.frames import (
    MAX_BODY,
    BadFrame,
    FrameKind,
    Splitter,
    TooLarge,
    frame,
    json_frame,
    parse_json,
)
from tests.server.engine_process.test_codec import events, floats, texts
from tests.server.fake_engine import FakeEngine, made_up_record

few = settings(max_examples=50, deadline=None)
usual = st.builds(
    lambda name, tokens, cached: TokenEvent(
        name, tuple(token for token, _ in tokens), tuple(logprob for _, logprob in tokens), cached_tokens=cached
    ),
    texts,
    st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=5),
    st.integers(0, 2**31),
)


def load(**changes: float) -> Load:
    names = {name: index for index, name in enumerate(Load.__dataclass_fields__)}
    return Load(**(names | changes))  # pyright: ignore[reportArgumentType]


def record(sequence: int) -> IterationRecord:
    taken = Admission(row=3, request_id="é", tokens=(), prompt_length=0, blocks=(), sampling=SamplingParams())
    chunks = (Chunk(0, 5, 1, 1), Chunk(3, 0, 17, 0))
    return made_up_record(sequence, chunks, waiting=2, finished_at=12.5, admissions=(taken,), replica=1)


@few
@given(sent=st.lists(usual | events, max_size=5))
def test_iterations_arrive_as_they_left(sent: list[TokenEvent]) -> None:
    loads, records = (load(), load(due_seconds=0.25)), [record(2**40), record(1)]
    told = iterations.decode(iterations.encode(2**33, loads, sent, records))
    assert told == (2**33, loads, sent, records)
    assert [each.num_tokens for each in told.records] == [18, 18]


def test_an_engine_that_does_nothing_is_told_of_too() -> None:
    idle = FakeEngine(tokenizer=None).loads()
    assert iterations.decode(iterations.encode(0, idle, [], [])) == (0, tuple(idle), [], [])


@few
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_no_iterations(data: bytes) -> None:
    with pytest.raises(BadFrame):
        iterations.decode(data)


@few
@given(cut=st.data())
def test_damaged_iterations_never_raise_anything_else(cut: st.DataObject) -> None:
    body = bytearray(iterations.encode(1, (load(),), [TokenEvent("a", (1,), (-0.5,)), TokenEvent("b", error="x")], []))
    for at in cut.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[at] = cut.draw(st.integers(0, 255))
    body = body[: cut.draw(st.integers(0, len(body)))]
    with contextlib.suppress(BadFrame):
        iterations.decode(bytes(body))


@few
@given(bodies=st.lists(st.binary(max_size=20), max_size=5), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_frames_are_whole_however_they_come(bodies: list[bytes], cuts: list[int]) -> None:
    stream, splitter, found, turn = b"".join(frame(FrameKind.ITERATION, body) for body in bodies), Splitter(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        found += splitter.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert found == [(FrameKind.ITERATION, body) for body in bodies]


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x00\x00\x00\x00\x63", b"\xff\xff\xff\xff\x01"])
def test_what_is_no_frame_is_refused_before_it_is_waited_for(garbage: bytes) -> None:
    splitter = Splitter()
    assert list(splitter.feed(json_frame(FrameKind.STOP, None))) == [(FrameKind.STOP, b"null")]
    with pytest.raises(BadFrame):
        list(splitter.feed(garbage))


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(TooLarge, match="more than the 67108864 that one message holds"):
        frame(FrameKind.ITERATION, bytes(MAX_BODY + 1))


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame):
        parse_json(body)
