"""A bucket has a second program, for iterations of decodes only, where the attention backend runs less in it."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.iteration import Chunk, IterationPlan
from jaxserve.request import Request
from jaxserve.runner.programs import StageShape
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.cache_groups import CacheGroups
from pallas_kernels.gpu import GpuBackend
from pallas_kernels.tpu import TpuBackend
from pallas_kernels.xla import XlaBackend
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, run, traffic


def shape(backend, **settings) -> StageShape:
    """Of 16 rows."""
    groups = CacheGroups(block_size=16, max_context=128, n_rows=16, most_tokens=256)
    given = {"max_rows": 16, "n_rows": 16, "attention": None, "product": None, "scoring": False} | settings
    return StageShape(backend=backend, groups=groups, **given)


@pytest.mark.parametrize(
    ("backend", "buckets", "expected"),
    [
        (TpuBackend(), (1, 4, 16, 64, 256), (4, 16)),  # one token is a decode, or a prompt that costs no more
        (TpuBackend(), (1, 4, 24, 64), (4, 24)),  # 5 to 16 decodes are padded to 24
        (TpuBackend(), (64, 256), (64,)),
        (GpuBackend(), (1, 4, 16, 64), ()),  # as many rows as tokens: every token is computed alone
        (GpuBackend(), (4, 24, 64), (24,)),
        (XlaBackend(), (1, 4, 16, 64), ()),
    ],
)
def test_buckets_that_gain(backend, buckets, expected) -> None:
    assert shape(backend).decode_buckets(buckets) == expected


def test_deterministic_programs_serve_all_iterations() -> None:
    """A token goes through one program whatever else is in its batch."""
    assert shape(TpuBackend(), deterministic=True).decode_buckets((64,)) == ()


@pytest.mark.parametrize(("lengths", "expected"), [((1, 1), True), ((1, 2), False), ((1, 3, 1), False), ((), True)])
def test_plans_of_decodes(lengths, expected) -> None:
    plan = IterationPlan(
        sequence=0,
        bucket=24,
        admissions=(),
        chunks=tuple(Chunk(row, 5, length, 1) for row, length in enumerate(lengths)),
        table_changes=(),
        sampler=None,
        scoring=False,
    )
    assert plan.is_decodes is expected


@pytest.fixture
def gains(monkeypatch):
    """The plain-JAX backend counts as one that gains."""
    monkeypatch.setattr(XlaBackend, "saves_on_decodes", lambda *_: True)


@pytest.mark.usefixtures("gains")
def test_iterations_take_the_program_for_their_chunks(params) -> None:
    engine = make_engine(params, attention="xla")
    (stage,) = engine._loops[0].pipeline.stages
    assert engine.report.decode_buckets == (6,)
    assert set(stage._forward) == {(6, False), (6, True), (12, False), (24, False)}
    taken, forward = [], stage.forward
    for key, program in stage._forward.items():
        stage._forward[key] = lambda *args, key=key, program=program: taken.append(key) or program(*args)
    stage.forward = lambda plan, *args: taken.append(plan) or forward(plan, *args)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt=(5, 6, 7), sampling=sampling), Answers())
    while engine.step():
        pass
    pairs = list(zip(taken[::2], taken[1::2], strict=True))
    assert {key for _, key in pairs} == {(6, False), (6, True)}
    for plan, key in pairs:
        assert key == (plan.bucket, max(chunk.length for chunk in plan.chunks) == 1)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"stages": 2}, {"speculate": "ngram", "speculate_tokens": 3}])
def test_answers_are_those_of_one_program(params, monkeypatch, settings) -> None:
    arrivals = traffic(12)
    one = run(make_engine(params, attention="xla", **settings), arrivals)
    monkeypatch.setattr(XlaBackend, "saves_on_decodes", lambda *_: True)
    two = run(make_engine(params, attention="xla", **settings), arrivals)
    assert (two.tokens, two.logprobs) == (one.tokens, one.logprobs)


@pytest.mark.long
def test_more_programs_are_reported(params, monkeypatch) -> None:
    before = make_engine(params, attention="xla", buckets=(3, 6, 24)).report
    monkeypatch.setattr(XlaBackend, "saves_on_decodes", lambda *_: True)
    after = make_engine(params, attention="xla", buckets=(3, 6, 24)).report
    assert before.decode_buckets == ()
    assert dataclasses.asdict(after)["decode_buckets"] == (3, 6)
    assert after.programs == before.programs + 2
