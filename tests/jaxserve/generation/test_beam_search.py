"""Beam search against one that looks at the whole vocabulary, to the end, on a model without cache or batch."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import models
from jaxserve.errors import InvalidRequest
from jaxserve.generation.beam_search import BeamParams, BeamSearch, completions, parse_beam_params
from jaxserve.request import Alternatives, FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from tests.fixtures import dense
from tests.fixtures.tiny import BLOOM, make_engine

PROMPT = (5, 6, 7, 9, 8, 11)


def brute_force(logprobs, prompt, width, max_tokens, endings, penalty, early=False):
    """[(token ids, score)] of all that a search of this width completes, best first.

    Args:
      logprobs: of a sequence of tokens, float64[V] for the token after it.
    """
    live, complete = [((), 0.0)], []
    for step in range(1, max_tokens + 1):
        found = []
        for tokens, total in live:
            after = np.asarray(logprobs([*prompt, *tokens]), np.float64)
            for token in np.argsort(-after, kind="stable")[: 2 * width]:
                longer = ((*tokens, int(token)), total + after[token])
                if token in endings:
                    complete.append((longer[0], longer[1] / (len(prompt) + step - 1) ** penalty))
                else:
                    found.append(longer)
        found.sort(key=lambda each: -each[1])
        live = found[:width]
        if early and len(complete) >= width and step < max_tokens:
            live = []
            break
    complete += [(tokens, total / (len(prompt) + len(tokens)) ** penalty) for tokens, total in live]
    return sorted(complete, key=lambda each: -each[1])[:width]


def search(logprobs, prompt, params: BeamParams, **sampling):
    """The same by `BeamSearch`, and the steps that it took."""
    request = Request(request_id="r", prompt=tuple(prompt), sampling=SamplingParams(**sampling))
    made, names, steps = BeamSearch(request, params, (2,)), itertools.count(), 0
    while not made.is_finished:
        answers = []
        for step in made.requests(lambda: str(next(names))):
            assert (step.sampling.max_tokens, step.fork_of) == (1, None)
            after = np.asarray(logprobs(list(step.prompt)), np.float64)
            ids = np.argsort(-after, kind="stable")[: step.sampling.logprobs]
            answers.append(Alternatives(tuple(ids.tolist()), tuple(after[ids].tolist())))
        made.take(answers)
        steps += 1
    return made, steps


def random_model(seed: int, vocab: int):
    """Logprobs that depend on all tokens, in no way that a search could guess."""

    def logprobs(tokens):
        x = np.random.default_rng([seed, *tokens]).normal(size=vocab) * 2
        return x - np.log(np.exp(x).sum())

    return logprobs


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 7),
    penalty=st.sampled_from([1.0, 0.0, 0.6, 2.0, -1.0]),
    early=st.booleans(),
    stops=st.sampled_from([(), (0,), (0, 1, 3, 4)]),
    ignore_eos=st.booleans(),
)
def test_what_is_found_is_what_looking_at_everything_finds(seed, width, max_tokens, penalty, early, stops, ignore_eos):
    logprobs = random_model(seed, 9)
    params = BeamParams(width=width, n=width, length_penalty=penalty, early_stopping=early)
    made, steps = search(logprobs, PROMPT, params, max_tokens=max_tokens, stop_token_ids=stops, ignore_eos=ignore_eos)
    endings = {*stops, *(() if ignore_eos else (2,))}
    expected = brute_force(logprobs, PROMPT, width, max_tokens, endings, penalty, early)
    assert [beam.token_ids for beam in made.best()] == [tokens for tokens, _ in expected]
    assert [beam.score for beam in made.best()] == pytest.approx([score for _, score in expected])
    assert steps <= max_tokens
    for beam in made.best():
        known = [logprobs([*PROMPT, *beam.token_ids[:at]])[token] for at, token in enumerate(beam.token_ids)]
        assert beam.logprobs == pytest.approx(known)
        last = beam.token_ids[-1]
        reason = FinishReason.EOS if last == 2 and not ignore_eos else FinishReason.STOP
        assert beam.finish_reason is (reason if last in endings else FinishReason.LENGTH)


def test_a_search_ends_when_nothing_better_can_come():
    def logprobs(tokens):
        x = np.full(9, -20.0)
        x[2] = math.log(0.9)  # the end
        x[5] = math.log(0.1)
        return x

    made, steps = search(logprobs, PROMPT, BeamParams(width=1, n=1), max_tokens=1000)
    assert made.best()[0].token_ids == (2,)
    assert steps < 100


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"prefix_cache": False},
        pytest.param({"stages": 2}, marks=pytest.mark.long),
        {"slot_policy": "reserve"},
    ],
    ids=str,
)
def test_an_engine_finds_what_the_dense_model_finds(params, kept):
    model = models.build(BLOOM)
    compiled = jax.jit(lambda tokens: dense.logprobs(model, params, tokens))

    def logprobs(tokens):
        padded = jnp.array([*tokens, *[0] * (24 - len(tokens))])  # what comes after changes nothing before
        return compiled(padded)[len(tokens) - 1]

    with make_engine(params, **kept) as engine:
        for width, penalty in ((1, 1.0), (4, 1.0), (10, 0.0)):
            found = engine.beam_search(PROMPT, n=width, max_tokens=8, length_penalty=penalty, stop_token_ids=[40, 41])
            expected = brute_force(logprobs, PROMPT, width, 8, {2, 40, 41}, penalty)
            assert [one.token_ids for one in found] == [tokens for tokens, _ in expected]
            np.testing.assert_allclose([one.score for one in found], [score for _, score in expected], atol=1e-3)
        load = engine.load()
        assert (load.running, load.waiting, load.slots_used, load.compiled_after_ready) == (0, 0, 0, 0)


def test_answers_are_the_best_and_tell_what_was_asked_for(params):
    with make_engine(params) as engine:
        wide = engine.beam_search(PROMPT, n=5, max_tokens=6, ignore_eos=True, logprobs=2)
        narrow = engine.beam_search(PROMPT, n=2, best_of=5, max_tokens=6, ignore_eos=True, logprobs=2)
        assert told(narrow) == told(wide[:2])
        for one in wide:
            assert one.seed is None
            assert (len(one.token_ids), one.finish_reason) == (6, FinishReason.LENGTH)
            assert one.score == pytest.approx(sum(one.logprobs or ()) / (len(PROMPT) + 6))
            assert [len(top.token_ids) for top in one.top_logprobs or ()] == [2] * 6
        (greedy,) = engine.beam_search(PROMPT, max_tokens=6, ignore_eos=True)
        assert (
            greedy.token_ids == engine.generate([PROMPT], temperature=0.0, max_tokens=6, ignore_eos=True)[0].token_ids
        )
        with pytest.raises(TimeoutError):
            engine.beam_search(PROMPT, n=5, max_tokens=60, ignore_eos=True, timeout=1e-9)
        assert all(len(one.token_ids) == 80 for one in engine.beam_search(PROMPT, n=3, max_tokens=80, ignore_eos=True))


def told(found):
    """All but the names that each search gives its answers."""
    return [(one.token_ids, one.logprobs, one.top_logprobs, one.score) for one in found]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"n": 11}, "n", "from 1 to 10 beams wide"),
        ({"n": 2, "best_of": 11}, "best_of", "from 1 to 10 beams wide"),
        ({"n": 3, "best_of": 2}, "n", "from 1 to the 2 beams"),
        ({"n": 0}, "best_of", "from 1 to 10"),
        ({"n": "2"}, "n", "is '2'; a beam search is from 1 to 10 beams wide"),
        ({"n": 1.0, "best_of": 2}, "n", "is 1.0; it must be from 1 to the 2 beams"),
        ({"best_of": 2.5}, "best_of", "is 2.5; a beam search is from 1 to 10 beams wide"),
        ({"best_of": True}, "best_of", "is True; a beam search is from 1 to 10 beams wide"),
        ({"length_penalty": 11.0}, "length_penalty", "from -10 to 10"),
        ({"length_penalty": math.nan}, "length_penalty", "from -10 to 10"),
        ({"early_stopping": "never"}, "early_stopping", "true or false"),
    ],
)
def test_a_search_that_cannot_be_is_refused(fields, field, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        parse_beam_params({"use_beam_search": True} | fields)
    assert error.value.field == field


def test_fields_of_a_search_need_one():
    assert parse_beam_params({"n": 3, "best_of": 100, "use_beam_search": None}) is None
    assert parse_beam_params({"length_penalty": 1.0, "early_stopping": False}) is None
    for name, value in (("length_penalty", 0.5), ("early_stopping", True)):
        with pytest.raises(InvalidRequest, match=f"{name}: is for beam search"):
            parse_beam_params({name: value})
    assert parse_beam_params({"use_beam_search": True, "n": 3}) == BeamParams(width=3, n=3)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"temperature": 0.7},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": ((3, 1.0),)},
        {"stop": ("a",)},
        {"min_tokens": 1},
        {"bad_words": ("a",)},
        {"prompt_logprobs": 0},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_what_means_nothing_to_a_search_is_refused_by_name(sampling):
    request = Request(request_id="r", prompt=(1,), sampling=SamplingParams(**sampling))
    with pytest.raises(InvalidRequest, match="use_beam_search") as error:
        BeamSearch(request, BeamParams(width=2, n=2), ())
    assert error.value.field == next(iter(sampling))


def test_texts_end_before_what_ended_them():
    from tests.jaxserve.generation.test_completion import EOS, ids, spelling

    request = Request(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=2))
    made = BeamSearch(request, BeamParams(width=1, n=1), (EOS,))
    made.take([Alternatives((*ids("ab"), EOS), (-0.1, -9.0))])
    made.take([Alternatives((EOS, *ids("a")), (-0.1, -9.0))])
    (answer,) = completions(made, spelling(), (EOS,))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", (*ids("ab"), EOS), FinishReason.EOS)
    assert answer.logprobs is None
    assert answer.to_json()["text"] == "ab"
