"""Our models against the transformers library: its answers are kept in tests/fixtures."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, weights
from tests.fixtures import dense, parity, parity_cases

SAVED = sorted((Path(__file__).parents[2] / "fixtures" / "saved").iterdir())
TOLERANCE = 1e-3


def test_every_case_has_its_answers():
    assert {case.name: case.config for case in parity.cases()} == parity_cases.CASES


@pytest.mark.parametrize("case", parity.cases(), ids=lambda case: case.name)
def test_random_models_answer_like_the_library(case, tmp_path):
    check(case.write(tmp_path / "model"), case.answers)


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_checkpoints_that_the_library_saved_answer_like_it(folder):
    check(folder, [parity.Answer(**json.loads((folder / "answer.json").read_text()))])


def check(folder: Path, answers) -> None:
    model = models.build(weights.read_config(folder))
    params = weights.load(folder, model, jnp.float32)
    score = jax.jit(lambda params, tokens: dense.logprobs(model, params, tokens))
    longest = max(len(answer.prompt_tokens + answer.tokens) for answer in answers)
    for answer in answers:
        tokens = answer.prompt_tokens + answer.tokens
        padded = np.zeros(longest, np.int32)  # what follows a token does not change its scores
        padded[: len(tokens)] = tokens
        scores = np.asarray(score(params, padded))[: len(tokens)]
        ours = scores[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(ours, answer.prompt_logprobs + answer.logprobs, rtol=0, atol=TOLERANCE)
        greedy = scores[len(answer.prompt_tokens) - 1 : -1].argmax(-1)
        clear = np.array(answer.gaps) > TOLERANCE
        assert clear.any()
        np.testing.assert_array_equal(greedy[clear], np.array(answer.tokens)[clear])
