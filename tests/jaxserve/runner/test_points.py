"""The head and the sampler work on as many tokens as a plan chooses, not on as many as its bucket could."""

import numpy as np
import pytest

from jaxserve.iteration import Chunk, IterationPlan, SamplerVariant
from jaxserve.request import Request
from jaxserve.runner import layout
from jaxserve.runner.programs import StageShape
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, run, traffic

BUCKETS = (1, 2, 6, 24)


def chunks(*samples: int) -> tuple[Chunk, ...]:
    return tuple(Chunk(row, 5, max(each, 1), each) for row, each in enumerate(samples))


@pytest.mark.parametrize(
    ("samples", "points"),
    [((), 0), ((0,), 0), ((0, 0), 0), ((1,), 1), ((1, 1, 0, 0), 2), ((0, 0, 1, 0), 3), ((1, 4, 3), 8), ((4, 0, 1), 6)],
)
def test_result_entries_end_at_last_sampled_chunk(samples, points) -> None:
    plan = IterationPlan(
        sequence=0,
        bucket=24,
        admissions=(),
        chunks=chunks(*samples),
        table_changes=(),
        sampler=SamplerVariant.PLAIN,
        scoring=False,
    )
    assert plan.num_points == points


def test_head_runs_only_for_sampled_tokens(params, monkeypatch):
    engine = make_engine(params, buckets=BUCKETS)
    (stage,) = engine._loops[0].pipeline.stages
    assert sorted(stage._head) == [1, 2, 6]
    rows: list[int] = []

    def noted(head):
        def run_head(ends, last):
            logits = head(ends, last)
            rows.append(logits.shape[0])
            return logits

        return run_head

    monkeypatch.setattr(stage, "_head", {points: noted(head) for points, head in stage._head.items()})
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt=tuple(range(5, 65)), sampling=sampling), Answers())
    iterations = 0
    while engine.step():
        iterations += 1
    assert rows == [1, 1, 1]
    assert iterations >= 5  # 60 tokens of prompt take three, of which only the last chooses a token
    rows.clear()
    answers = Answers()
    for name in "abc":
        engine.submit(Request(request_id=name, prompt=(5, 6), sampling=sampling), answers)
    while engine.step():
        pass
    assert set(rows) == {6}  # of three rows, the next that there is
    assert engine.load().compiled_after_ready == 0


DRAFTING = {"speculate": "ngram", "speculate_tokens": 3}


@pytest.mark.parametrize(
    "settings", [DRAFTING, *(pytest.param(each, marks=pytest.mark.long) for each in ({}, {"stages": 2}))]
)
def test_answers_do_not_depend_on_sample_counts(params, settings) -> None:
    arrivals = traffic(40)
    many = run(make_engine(params, buckets=BUCKETS, **settings), arrivals)
    one = run(make_engine(params, buckets=(24,)), arrivals)
    different = [name for name, tokens in one.tokens.items() if many.tokens[name] != tokens]
    assert len(different) <= 1
    for name in one.tokens.keys() - set(different):
        np.testing.assert_allclose(many.logprobs[name], one.logprobs[name], atol=1e-4)
        assert many.reasons[name] == one.reasons[name]


@pytest.mark.parametrize(
    "settings",
    [{"scoring": True}, *(pytest.param(each, marks=pytest.mark.long) for each in ({"stages": 2}, {"tensor": 3}))],
)
def test_buckets_of_one_token_are_filled_up(params, settings, monkeypatch) -> None:
    """Where a device computes with two at least, as TPUs do: the answers are the same."""
    arrivals = traffic(12)
    expected = run(make_engine(params, buckets=(24,), **settings), arrivals)
    monkeypatch.setattr(layout, "StageShape", lambda **sizes: StageShape(**{**sizes, "fewest_tokens": 2}))
    engine = make_engine(params, buckets=(1, 24), **settings)
    stages = engine._loops[0].pipeline.stages
    assert all(stage.programs.shape.layout(1).tokens == 2 for stage in stages)
    taken, forward = [], stages[0].forward
    monkeypatch.setattr(stages[0], "forward", lambda plan, *args: taken.append(plan.bucket) or forward(plan, *args))
    answers = run(engine, arrivals)
    assert set(taken) == {1, 24}
    assert answers.tokens == expected.tokens
    assert answers.reasons == expected.reasons
    for name, scores in expected.prompt_logprobs.items():
        np.testing.assert_allclose(answers.prompt_logprobs[name], scores, atol=1e-4)
