"""Embeddings: hidden states of prompts, pooled, whatever else the engine does meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequest
from jaxserve.runner import programs
from tests.fixtures.tiny import BLOOM, VOCAB, make_engine, opinionated
from tests.fixtures.traffic import run, traffic

PROMPTS = [tuple(int(token) for token in np.random.default_rng(n).integers(3, VOCAB, n)) for n in (1, 5, 24, 60)]


@pytest.fixture(scope="module")
def params():
    return opinionated(0)


@pytest.fixture(scope="module")
def engine(params) -> Engine:
    """The longest prompt takes three iterations of it."""
    return make_engine(params, scoring=True)


def test_the_last_state_gives_the_next_tokens_logprobs(params, engine) -> None:
    states = engine.embed(PROMPTS, normalize=False)
    ends = {name: part for name, part in params.items() if name != "layers"}
    expected = jax.nn.log_softmax(models.build(BLOOM).logits(ends, jnp.asarray(states)), axis=-1)
    for logprobs, found in zip(expected, engine.generate(PROMPTS, max_tokens=1, logprobs=20, seed=0), strict=True):
        top = (found.top_logprobs or ())[0]
        np.testing.assert_allclose(top.logprobs, np.asarray(logprobs)[list(top.token_ids)], atol=1e-4)


def test_a_mean_is_that_of_all_prefixes(engine) -> None:
    for prompt in PROMPTS:
        states = engine.embed([prompt[: end + 1] for end in range(len(prompt))], normalize=False)
        found = engine.embed([prompt], pooling="mean", normalize=False)
        np.testing.assert_allclose(found[0], states.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(
            engine.embed([prompt], pooling="mean")[0], found[0] / np.linalg.norm(found), atol=1e-5
        )


def test_a_prefix_hit_changes_no_embedding(engine) -> None:
    prompt = tuple(range(3, 51))
    for pooling in ("last", "mean"):
        first, again = (engine.embed([prompt], pooling=pooling) for _ in range(2))
        np.testing.assert_allclose(again, first, atol=1e-5)


@pytest.mark.parametrize("settings", [{"slot_policy": "grow", "slots": 112}, {"in_flight": 1}])
def test_under_load_as_alone(params, engine, settings) -> None:
    """Every third request has an embedding beside its answer; with few slots some are computed twice."""
    arrivals = traffic(60, scored=True)
    answers = run(make_engine(params, scoring=True, **settings), arrivals)
    pooled = [request for _, request in arrivals if request.pooling is not None]
    assert {request.pooling for request in pooled} == {"last", "mean"}
    assert answers.embeddings.keys() == {request.request_id for request in pooled}
    for request in pooled:
        alone = engine.embed([request.prompt], pooling=request.pooling, normalize=False)[0]
        np.testing.assert_allclose(answers.embeddings[request.request_id], alone, atol=1e-4)


def test_a_state_that_is_not_finite_stays_with_its_own_request(params) -> None:
    model, hidden = models.build(BLOOM), np.ones((6, BLOOM.hidden_size), np.float32)
    hidden += np.arange(6)[:, None] * np.linspace(0, 1, BLOOM.hidden_size)
    owners = np.array([0, 0, 1, 1, 3, 3])  # 3 is none
    expected = programs.pool(model, 3, params, jnp.asarray(hidden), jnp.asarray(owners))
    hidden[2], hidden[5] = np.nan, np.inf
    found = programs.pool(model, 3, params, jnp.asarray(hidden), jnp.asarray(owners))
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.isfinite(found).all()


def test_an_engine_without_scoring_refuses(params) -> None:
    with pytest.raises(InvalidRequest, match="pooling: is not served: the engine was started without prompt scoring"):
        make_engine(params, scoring=False).embed([(3, 4)])
    with pytest.raises(InvalidRequest, match="pooling: is 'max'; it must be one of last, mean"):
        make_engine(params, scoring=False).embed([(3, 4)], pooling="max")  # pyright: ignore[reportArgumentType]
