"""What the scheduler tells of a request's tokens: which sampler, logprobs, scores of the prompt."""

from __future__ import annotations

import pytest

from jaxserve.iteration import Chunk, SamplerVariant
from jaxserve.request import Alternatives
from tests.jaxserve.scheduler.stepping import finish, request, scheduler, step


def test_the_sampler_is_the_most_demanding_row_that_samples():
    made = scheduler(rows=3, sizes=(16,))
    plain = request("a", 2)
    truncated = request("b", 2, temperature=1.0, top_p=0.5)
    full = request("c", 20, presence_penalty=1.0)
    variants = []
    for one in (plain, truncated, full):
        made.submit(one)
        variants.append(step(made)[0].sampler)
    # c's prompt takes two iterations; in the first it does not sample.
    variants.append(step(made)[0].sampler)
    assert variants == [SamplerVariant.PLAIN, SamplerVariant.TRUNCATED, SamplerVariant.TRUNCATED, SamplerVariant.FULL]
    made = scheduler(sizes=(2,))
    made.submit(request("a", 3))
    assert step(made)[0].sampler is None
    assert step(made)[0].sampler is SamplerVariant.PLAIN


@pytest.mark.parametrize(("temperature", "variant"), [(1.0, SamplerVariant.FULL), (0.0, SamplerVariant.PLAIN)])
def test_typical_p_takes_the_full_sampler(temperature, variant):
    made = scheduler()
    made.submit(request("a", 2, temperature=temperature, typical_p=0.5))
    assert step(made)[0].sampler is variant


@pytest.mark.parametrize(("asked", "full"), [(None, False), (0, False), (2, True)])
def test_logprobs(asked, full):
    made = scheduler()
    made.submit(request("a", 2, logprobs=asked))
    plan, (event,) = step(made)
    assert (plan.sampler == SamplerVariant.FULL) == full
    assert event.logprobs == (0.0,)
    assert event.top_logprobs == ((Alternatives((0, 1), (0.0, -1.0)),) if full else ())


@pytest.mark.parametrize("asked", [0, 2])
def test_prompt_logprobs_are_cut_out_of_the_flat_tokens(asked):
    made = scheduler(sizes=(1, 4, 8))
    made.submit(request("a", 3))
    step(made)
    made.submit(request("b", 9, prompt_logprobs=asked))
    seen = []
    # a's decode is flat token 0, so b's 7 prompt tokens are flat tokens 1 to 7 and score prompt positions 1 to 7.
    plan, events = step(made)
    assert plan.scoring
    assert plan.chunks == (Chunk(0, 3, 1, True), Chunk(1, 0, 7, False))
    assert [e.request_id for e in events] == ["a", "b"]
    assert events[1].token_ids == ()
    seen += events[1].prompt_logprobs
    # Positions 7 and 8 of b: 7 is followed by the last prompt token; what follows 8 is generated.
    plan, events = step(made)
    assert plan.scoring
    assert len(events[1].token_ids) == 1
    seen += events[1].prompt_logprobs
    assert [logprob for logprob, _ in seen] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -1.0]
    if asked:
        assert seen[2][1] == Alternatives((300, 301), (-300.0, -301.0))
    else:
        assert all(alternatives is None for _, alternatives in seen)
    plan, events = step(made)
    assert not plan.scoring
    assert events[1].prompt_logprobs == ()


def test_a_prompt_of_one_token_has_nothing_to_score():
    made = scheduler()
    made.submit(request("a", 1, prompt_logprobs=1))
    plan, (event,) = step(made)
    assert not plan.scoring
    assert event.prompt_logprobs == ()


def test_a_prompt_to_be_scored_takes_no_hits_and_is_scored_once():
    made = scheduler(blocks=6, block_size=2, sizes=(1, 2, 4, 8), context=12)
    made.submit(request("z", (50, 51, 52), max_tokens=1))
    finish(made)
    made.submit(request("a", 3, max_tokens=9))
    made.submit(request("b", (50, 51, 52), max_tokens=9, prompt_logprobs=0))
    plan, events = step(made)
    assert all(not a.blocks for a in plan.admissions)
    assert len(events[1].prompt_logprobs) == 2
    assert events[1].cached_tokens == 0
    admissions = []
    while made.has_work:
        plan, events = step(made)
        admissions += plan.admissions
        assert not plan.scoring
        assert all(not e.prompt_logprobs for e in events)
    assert [a.request_id for a in admissions] == ["b"]  # it was preempted on the way


def test_a_preemption_amid_scoring_repeats_no_score():
    made = scheduler(rows=2, blocks=7, block_size=2, sizes=(1, 2, 4), context=14)
    made.submit(request("a", 4, max_tokens=8))
    made.submit(request("b", 8, max_tokens=1, prompt_logprobs=0))
    step(made)  # a's prompt
    seen, admissions = [], []
    while made.has_work:
        plan, events = step(made)
        seen += [entry for e in events for entry in e.prompt_logprobs]
        admissions += plan.admissions
        if plan.sequence == 2:
            assert len(seen) == 6  # of 7, and then a needs the block that b would have come to
            assert made.num_waiting == 0
        if plan.sequence == 3:
            assert made.num_waiting == 1
    assert len(seen) == 7
    # The whole prompt is computed again, whatever the cache holds of it.
    assert [(a.request_id, a.blocks) for a in admissions] == [("b", ()), ("b", ())]
