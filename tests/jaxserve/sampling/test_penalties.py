"""What the tokens so far change: penalties, barred runs of tokens, and the least number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.sampling.reference import ENDINGS, VOCAB, choose, log_softmax


def test_penalties_see_tokens_before_the_position_only():
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [1, 2, 3, 4]] = [8.0, 7.9, 6.5, 4.1]
    history = [[1, 2, 2, 3, 3, 3]]  # a prompt of two tokens, three generated, one from before
    output = choose(logits, [params], positions=[5], history=history, prompt_lengths=[2])
    # 1: 8/2; 2: 7.9/2 - 1 - 0.5; 3: 6.5/2 - 1 - 2 * 0.5; 4: untouched
    assert output.tokens.tolist() == [4]
    np.testing.assert_allclose(output.logprobs, log_softmax(logits)[0, [4]], atol=1e-5)


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_repetition_penalties_out_of_float_range_are_only_large(penalty):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [1, 2, 3]] = [3.0, -3.0, 2.0]
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    output = choose(logits, [params], positions=[3], history=[[0, 1, 2]], prompt_lengths=[3])
    assert output.tokens[0] == (3 if penalty > 1 else 1)


def test_a_barred_run_is_never_completed_and_its_parts_are():
    runs = ((7,), (1, 2), (1, 2, 3), (9, 9))
    params = [SamplingParams(temperature=0.0, bad_word_tokens=runs)] * 6
    histories = [[5, 5], [5, 1], [1, 2], [2, 1], [9, 0], [0, 9]]
    for token, barred in ((7, [True] * 6), (2, [0, 1, 0, 1, 0, 0]), (3, [0, 0, 1, 0, 0, 0]), (9, [0, 0, 0, 0, 0, 1])):
        logits = np.zeros((6, 40), np.float32)
        logits[:, token] = 5.0
        logits[:, 30] = 1.0
        # What lies ahead counts for nothing.
        history = np.pad(np.array(histories), ((0, 0), (0, 14)), constant_values=1)
        output = choose(logits, params, positions=[2] * 6, history=history, prompt_lengths=[1] * 6)
        assert output.tokens.tolist() == [30 if bar else token for bar in barred]
        np.testing.assert_allclose(output.logprobs, log_softmax(logits)[range(6), output.tokens], atol=1e-5)


def test_a_run_longer_than_what_is_known_bars_nothing():
    params = [SamplingParams(temperature=0.0, bad_word_tokens=((0, 0, 0, 4),))]
    logits = np.zeros((1, 40), np.float32)
    logits[:, 4] = 1.0
    for position, token in ((2, 4), (3, 0)):
        output = choose(logits, params, positions=[position], history=np.zeros((1, 16)))
        assert output.tokens.tolist() == [token]


def test_min_tokens_bars_every_end():
    params = [SamplingParams(temperature=0.0, min_tokens=3)] * 4
    logits = np.zeros((4, 40), np.float32)
    logits[:, ENDINGS] = 2.0
    output = choose(logits, params, positions=[8, 9, 10, 11], prompt_lengths=[8] * 4, history=np.zeros((4, 16)))
    assert output.tokens.tolist() == [0, 0, 0, ENDINGS[0]]
