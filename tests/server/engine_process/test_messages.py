"""Messages between the processes: each arrives as it left, and anything else is refused."""

import contextlib
import dataclasses
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.iteration import Admission, Chunk
from jaxserve.multihost.config import ClusterConfig, TlsFiles
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SAMPLING_PARAMS, Grammar, SamplingParams
from jaxserve.scheduler.prefix_changes import BlocksRemoved, BlocksStored, CacheCleared
from jaxserve.stats import IterationRecord, Load
from server.engine_process import messages
from server.engine_process import messages_pb2 as pb
from server.engine_process.frames import HEAD_BYTES, MAX_BODY, BadFrame, Splitter, TooLarge, frame
from server.engine_process.job import EngineInfo, EngineJob
from tests.server.fake_engine import FakeEngine, made_up_record

few = settings(max_examples=50, deadline=None)
texts = st.text(st.characters(codec="utf-8"), max_size=5)
floats = st.integers(-(2**20), 0).map(lambda n: n / 1024) | st.just(-math.inf)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
alternatives = st.builds(Alternatives, token_ids, st.lists(floats, max_size=3).map(tuple))
events = st.builds(
    TokenEvent,
    texts,
    token_ids,
    st.lists(floats, max_size=5).map(tuple),
    st.lists(alternatives, max_size=2).map(tuple),
    st.lists(st.tuples(floats, st.none() | alternatives), max_size=2).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.integers(0, 2**31),
    st.none() | floats,
    st.none() | texts,
    st.none() | texts,
    embedding=st.lists(floats, max_size=3).map(tuple),
)
plain_events = st.builds(
    lambda name, tokens, cached: TokenEvent(
        name, tuple(token for token, _ in tokens), tuple(logprob for _, logprob in tokens), cached_tokens=cached
    ),
    texts,
    st.lists(st.tuples(st.integers(0, 2**31 - 1), floats), max_size=5),
    st.integers(0, 2**31),
)
# Every sampling parameter, none with its default.
SAMPLING = SamplingParams(
    max_tokens=100,
    min_tokens=3,
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    typical_p=0.8,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=-0.4,
    logit_bias=((5, -100.0), (6, 0.5)),
    seed=2**64 - 1,
    stop=("a", "é"),
    stop_token_ids=(7, 8),
    bad_words=("bad",),
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=2,
    grammar=Grammar(kind="regex", text="a+", field="guided_regex"),
    sample_index=4,
    bad_word_tokens=((1, 2), (3,)),
)


def sent(request: Request) -> Request:
    _, message = messages.parse(pb.FromFront, messages.to_engine(submit=messages.encode_request(request))[HEAD_BYTES:])
    return messages.decode_request(message.submit)


def reported(*report: Any) -> messages.Iterations:
    _, message = messages.parse(pb.FromEngine, messages.encode_iterations(*report)[HEAD_BYTES:])
    return messages.decode_iterations(message.iterations)


def load(**changes: float) -> Load:
    names = {name: index for index, name in enumerate(Load.__dataclass_fields__)}
    return Load(**(names | changes))  # pyright: ignore[reportArgumentType]


def record(sequence: int) -> IterationRecord:
    taken = Admission(row=3, request_id="é", tokens=(), prompt_length=0, blocks=(), sampling=SamplingParams())
    chunks = (Chunk(0, 5, 1, 1), Chunk(3, 0, 17, 0))
    return made_up_record(sequence, chunks, waiting=2, finished_at=12.5, admissions=(taken,), replica=1)


# Requests


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams()])
def test_request(sampling: SamplingParams) -> None:
    request = Request(
        request_id="12", prompt=(1, 2**31 - 1), sampling=sampling, priority=-5, arrival=1.5, cache_salt="é", fork_of="a"
    )
    assert sent(request) == request
    assert sent(dataclasses.replace(request, fork_of=None)).fork_of is None


def test_request_has_every_sampling_parameter() -> None:
    for name in SAMPLING_PARAMS:
        assert getattr(SAMPLING, name) != getattr(SamplingParams(), name), f"give {name} a value above"


def test_negative_seed_arrives_modulo_2_to_64() -> None:
    request = Request(request_id="a", prompt=(1,), sampling=SamplingParams(seed=-1))
    assert sent(request).sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    "message",
    [
        pb.Request(request_id="a", prompt=[1]),
        pb.Request(
            request_id="a",
            prompt=[1],
            max_tokens=1,
            sampling=messages.encode_request(
                Request(request_id="a", prompt=(1,), sampling=SamplingParams(min_tokens=5))
            ).sampling,
        ),
    ],
)
def test_wrong_request_is_refused(message: pb.Request) -> None:
    with pytest.raises(BadFrame, match="not a request"):
        messages.decode_request(message)


# Iterations


@few
@given(told=st.lists(plain_events | events, max_size=5))
def test_iterations(told: list[TokenEvent]) -> None:
    loads, records = (load(), load(expected_seconds=0.25)), [record(2**40), record(1)]
    found = reported(2**33, loads, told, records)
    assert found == (2**33, loads, told, records)
    assert [each.num_tokens for each in found.records] == [18, 18]


def test_load_of_an_idle_engine() -> None:
    idle = FakeEngine(tokenizer=None).loads()
    assert reported(0, idle, [], []) == (0, tuple(idle), [], [])


@few
@given(cut=st.data())
def test_damaged_iterations_are_refused_or_read(cut: st.DataObject) -> None:
    events = [TokenEvent("a", (1,), (-0.5,)), TokenEvent("b", error="x")]
    body = bytearray(messages.encode_iterations(1, (load(),), events, [record(1)])[HEAD_BYTES:])
    for at in cut.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[at] = cut.draw(st.integers(0, 255))
    body = body[: cut.draw(st.integers(0, len(body)))]
    with contextlib.suppress(BadFrame):
        _, message = messages.parse(pb.FromEngine, bytes(body))
        messages.decode_iterations(message.iterations)


@pytest.mark.parametrize(
    "wrong",
    [
        pb.Iterations(tokens=pb.TokenColumns(request_id=["a"], count=[2], cached_tokens=[0], token=[1], logprob=[0.5])),
        pb.Iterations(tokens=pb.TokenColumns(request_id=["a"], count=[1], cached_tokens=[0], token=[1])),
        pb.Iterations(tokens=pb.TokenColumns(request_id=["a"], count=[0])),
        pb.Iterations(others=[pb.Event(index=1, request_id="a")]),
        pb.Iterations(others=[pb.Event(request_id="a", finish_reason="no reason")]),
    ],
)
def test_wrong_iterations_are_refused(wrong: pb.Iterations) -> None:
    with pytest.raises(BadFrame, match="not a report of iterations"):
        messages.decode_iterations(wrong)


# Values of the start


def test_job_and_info() -> None:
    config = EngineConfig(dtype="bfloat16", buckets=(8, 64), target_tpot=0.1, layers_per_stage=(1, 2), max_rows=3)
    secrets = TlsFiles(authority=b"\xff\x00", certificate=b"", key=b"k")
    cluster = ClusterConfig(hosts=2, host=1, coordinator="a:9000", secrets=secrets, record_folder=Path("/x"))
    for job in (EngineJob(model="/m", config=config, profile="p", cluster=cluster), EngineJob.of("m", EngineConfig())):
        assert messages.from_json(EngineJob, messages.to_json(EngineJob, job)) == job
    engine = FakeEngine(tokenizer=None)
    report = dataclasses.replace(engine.report, slot_milliseconds=math.inf)
    info = EngineInfo(report=report, limits=engine.limits, eos_token_ids=(7,), bos_token_id=None)
    assert messages.from_json(EngineInfo, messages.to_json(EngineInfo, info)) == info


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000, b"{}", b'{"model": 5, "config": {}}'])
def test_wrong_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame, match="not the JSON of EngineJob"):
        messages.from_json(EngineJob, data)


def test_the_engine_process_has_no_bound_on_its_queue() -> None:
    """The front has judged what may wait."""
    assert EngineJob.of("m", EngineConfig(max_queued_requests=1)).config.max_queued_requests > 10**9


# Frames


@few
@given(bodies=st.lists(st.binary(max_size=20), max_size=5), cuts=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_frames_are_whole_however_they_come(bodies: list[bytes], cuts: list[int]) -> None:
    stream, splitter, found, turn = b"".join(map(frame, bodies)), Splitter(), [], 0
    while stream:
        size = cuts[turn % len(cuts)]
        found += splitter.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert found == bodies


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\xff\xff\xff\xff\x01"])
def test_garbage_is_refused_before_it_is_waited_for(garbage: bytes) -> None:
    splitter = Splitter()
    assert list(splitter.feed(frame(b"abc"))) == [b"abc"]
    with pytest.raises(BadFrame):
        list(splitter.feed(garbage))


@few
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        messages.parse(pb.FromFront, data)


def test_empty_message_is_refused() -> None:
    with pytest.raises(BadFrame, match="without a field"):
        messages.parse(pb.FromFront, b"")


def test_too_large_a_frame_is_not_sent() -> None:
    with pytest.raises(TooLarge, match="more than the 67108864 that one message holds"):
        frame(bytes(MAX_BODY + 1))


def test_changes_of_the_prefix_caches_arrive() -> None:
    digests = (b"a" * 32, b"b" * 32)
    changes = [
        BlocksStored(digests, None, array("I", [1, 2, 2**31, 0]), 2, "salt"),
        BlocksRemoved(digests[:1]),
        CacheCleared(),
        BlocksStored(digests[:1], digests[1], array("I", [7, 8]), 2, ""),
    ]
    (body,) = Splitter().feed(messages.encode_changes(changes))
    name, message = messages.parse(pb.FromEngine, body)
    assert name == "prefix_changes"
    assert messages.decode_changes(message.prefix_changes) == changes
    del message.prefix_changes.changes[0].stored.tokens[0]
    for wrong in (message.prefix_changes, pb.PrefixChanges(changes=[pb.PrefixChange()])):
        with pytest.raises(BadFrame):
            messages.decode_changes(wrong)
