"""Values that cross between processes: the same on the other side, and nothing else gets through."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.engine_process import codec as plain
from server.engine_process.job import EngineInfo, EngineJob
from tests.server.fake_engine import FakeEngine


def there_and_back(kind: Any, value: Any) -> Any:
    return plain.decode(kind, json.loads(json.dumps(plain.encode(kind, value))))


texts = st.text(max_size=5)
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
)
requests = st.builds(
    Request,
    request_id=texts,
    prompt=token_ids,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 100),
        temperature=st.sampled_from((0.0, 0.7, 2.0)),
        logit_bias=st.lists(st.tuples(st.integers(0, 99), st.sampled_from((-100.0, 0.5))), max_size=3).map(tuple),
        seed=st.integers(-(2**63), 2**64 - 1),
        stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    ),
    priority=st.integers(-5, 5),
    arrival=floats,
)


@settings(max_examples=50, deadline=None)
@given(request=requests)
def test_requests_arrive_as_they_left(request: Request) -> None:
    assert there_and_back(Request, request) == request


@settings(max_examples=50, deadline=None)
@given(event=events)
def test_events_arrive_as_they_left(event: TokenEvent) -> None:
    assert there_and_back(TokenEvent, event) == event


def test_every_setting_and_fact_crosses() -> None:
    config = EngineConfig(dtype="bfloat16", buckets=(8, 64), target_tpot=0.1, layers_per_stage=(1, 2), max_rows=3)
    job = EngineJob(model="/a model", config=config, profile="p")
    assert there_and_back(EngineJob, job) == job
    assert there_and_back(EngineConfig, EngineConfig()) == EngineConfig()
    engine = FakeEngine(tokenizer=None)
    facts = EngineInfo(report=engine.report, limits=engine.limits, eos_token_ids=(7,), bos_token_id=None)
    assert there_and_back(EngineInfo, facts) == facts


def test_an_engine_behind_a_front_takes_what_the_front_lets_in() -> None:
    assert EngineJob.of("m", EngineConfig(max_queued_requests=1)).config.max_queued_requests > 10**9


@dataclasses.dataclass(frozen=True)
class Odd:
    name: Literal["a", "b"] = "a"
    path: Path = Path()
    secret: bytes | None = None
    number: float = 0.0


@pytest.mark.parametrize("odd", [Odd(), Odd("b", Path("/x"), b"\xff\x00", math.inf), Odd(number=5)])
def test_other_types(odd: Odd) -> None:
    assert there_and_back(Odd, odd) == odd


def test_what_is_no_number_crosses_too() -> None:
    assert math.isnan(there_and_back(Odd, Odd(number=math.nan)).number)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Request, []),
        (Request, {}),
        (Request, {"request_id": "a", "prompt": [1], "sampling": {}, "__class__": "os.system"}),
        (Request, {"request_id": 1, "prompt": [1], "sampling": {}}),
        (Request, {"request_id": "a", "prompt": [1, True], "sampling": {}}),
        (Request, {"request_id": "a", "prompt": [1.0], "sampling": {}}),
        (Request, {"request_id": "a", "prompt": [1], "sampling": {"max_tokens": "5"}}),
        (Request, {"request_id": "a", "prompt": [1], "sampling": {"max_tokens": 0}}),
        (TokenEvent, ["a"]),
        (TokenEvent, ["a", [], [], [], [], "no reason", 0, None, None]),
        (Odd, {"name": "c"}),
        (Odd, {"secret": "?"}),
        (int, True),
        (tuple[str, int, int], ["a", 1]),
    ],
)
def test_what_is_not_of_the_type_is_refused(kind: Any, data: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        plain.decode(kind, data)


def test_a_type_that_cannot_cross_is_told_of() -> None:
    with pytest.raises(TypeError, match="cannot be made plain data"):
        plain.codec(object)
    with pytest.raises(TypeError, match="cannot be told apart"):
        plain.codec(int | str | None)
