"""What is sent arrives as it was, takes few bytes, and nothing of a plan is left behind."""

import dataclasses
import random
from dataclasses import fields

import numpy as np
import pytest

from jaxserve.iteration import (
    Admission,
    BlockCopy,
    Chunk,
    IterationPlan,
    IterationResult,
    PooledRange,
    SamplerVariant,
    TableChange,
)
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.sampling import sampler
from jaxserve.sampling_params import Grammar, SamplingParams

PLAN_FIELDS = {
    *(
        "sequence",
        "bucket",
        "admissions",
        "chunks",
        "table_changes",
        "sampler",
        "scoring",
        "drafts",
        "block_copies",
        "pooled",
    ),
}
ADMISSION_FIELDS = {"row", "request_id", "tokens", "prompt_length", "blocks", "sampling", "endings"}


def plan(rng: random.Random) -> IterationPlan:
    chunks = tuple(
        Chunk(row, rng.randrange(2000), length, rng.choice((0, 1, length)))
        for row, length in enumerate(rng.choices((1, 1, 1, 4, 300), k=rng.randint(1, 20)))
    )
    return IterationPlan(
        sequence=rng.randrange(2**40),
        bucket=rng.choice((16, 64, 1024)),
        admissions=tuple(
            Admission(
                row=row,
                request_id=f"request {row}",
                tokens=tuple(rng.randrange(250_000) for _ in range(30)),
                prompt_length=29,
                blocks=(5, 3),
                endings=(2, 17),
                sampling=SamplingParams(
                    temperature=rng.random(),
                    top_p=rng.random() or 1.0,
                    top_k=rng.randrange(50),
                    min_p=rng.random(),
                    typical_p=1 - rng.random(),
                    repetition_penalty=1.1,
                    presence_penalty=-0.5,
                    frequency_penalty=0.25,
                    seed=rng.getrandbits(64),
                    sample_index=rng.randrange(4),
                    logit_bias=((7, 1.5), (9, -100.0)),
                    min_tokens=5,
                    max_tokens=5,
                    bad_word_tokens=((4, 5), (6,)),
                    grammar=rng.choice((None, Grammar(kind="regex", text="[a-z]\n", field="guided_regex"))),
                ),
            )
            for row in range(rng.randrange(3))
        ),
        chunks=chunks,
        table_changes=tuple(TableChange(row, row + 1, row + 2) for row in range(rng.randrange(5))),
        sampler=rng.choice((None, *SamplerVariant)),
        scoring=rng.random() < 0.5,
        drafts=tuple(rng.randrange(250_000) for _ in range(rng.randrange(6))),
        block_copies=tuple(BlockCopy(row, 7 + row) for row in range(rng.randrange(3))),
        pooled=tuple(PooledRange(row, 7 + row) for row in range(rng.randrange(3))),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_arrives_as_it_was(seed) -> None:
    sent = plan(random.Random(seed))
    data = wire.write_plan(pb.Plan(), sent, feeds=3).SerializeToString()
    message = pb.Plan.FromString(data)
    assert wire.decode_plan(message) == sent
    assert message.feeds == 3


def test_every_field_of_a_plan_is_sent() -> None:
    assert {field.name for field in fields(IterationPlan)} == PLAN_FIELDS, "wire.py does not know a field of a plan"
    assert {field.name for field in fields(Admission)} == ADMISSION_FIELDS, "wire.py does not know one of an admission"


def test_the_sampler_makes_the_same_of_what_arrives() -> None:
    """Nothing that a sampler reads of a request stays behind: where `SamplingParams` grows, this fails."""
    sent = plan(random.Random(2)).admissions[0]
    arrived = wire.decode_admission(wire.encode_admission(sent))
    pairs = zip(
        sampler.encode(sent.sampling, sent.prompt_length, sent.endings),
        sampler.encode(arrived.sampling, arrived.prompt_length, arrived.endings),
        strict=True,
    )
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


def test_a_decode_row_takes_less_than_a_kilobyte() -> None:
    chunks = tuple(Chunk(row, 100_000 + row, 1, 1) for row in range(256))
    changes = tuple(TableChange(row, 6000, 100_000 + row) for row in range(256))
    sent = IterationPlan(
        sequence=2**40,
        bucket=256,
        admissions=(),
        chunks=chunks,
        table_changes=changes,
        sampler=SamplerVariant.FULL,
        scoring=False,
    )
    assert wire.write_plan(pb.Plan(), sent, feeds=1).ByteSize() < 20 * 256


def test_a_result_arrives_without_its_padding() -> None:
    rng = np.random.default_rng(0)
    sent = IterationResult(
        tokens=rng.integers(0, 250_000, 8).astype(np.int32),
        logprobs=np.array([-0.5, np.nan, -np.inf, *rng.normal(size=5)], np.float32),
        top_ids=rng.integers(0, 250_000, (8, 20)).astype(np.int32),
        top_logprobs=rng.normal(size=(8, 20)).astype(np.float32),
        score_logprobs=rng.normal(size=16).astype(np.float32),
        score_top_ids=rng.integers(0, 250_000, (16, 20)).astype(np.int32),
        score_top_logprobs=rng.normal(size=(16, 20)).astype(np.float32),
        pooled=rng.normal(size=(8, 24)).astype(np.float32),
    )
    asked = dataclasses.replace(
        plan(random.Random(0)), chunks=(Chunk(0, 0, 1, 1),) * 5, pooled=(PooledRange(0, 1),) * 5
    )
    arrived = wire.decode_result(pb.Result.FromString(wire.write_result(pb.Result(), sent, asked).SerializeToString()))
    for field in fields(IterationResult):
        if field.name == "grammar_ends":  # of masks, which stay on one host
            continue
        expected, found = getattr(sent, field.name), getattr(arrived, field.name)
        rows = slice(None) if field.name.startswith("score") else slice(5)
        np.testing.assert_array_equal(found, expected[rows])
        assert found.dtype == expected.dtype


def test_a_result_without_alternatives_and_scores_has_none() -> None:
    sent = IterationResult(tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    arrived = wire.decode_result(
        wire.write_result(pb.Result(), sent, dataclasses.replace(plan(random.Random(0)), chunks=()))
    )
    assert len(arrived.tokens) == 0
    assert (arrived.top_ids, arrived.score_logprobs, arrived.score_top_ids, arrived.pooled) == (None,) * 4
