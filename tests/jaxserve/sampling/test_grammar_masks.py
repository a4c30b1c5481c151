"""Rows whose grammar allows some tokens only."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jaxserve.sampling.reference import CONSTRAINED, MIXED, VOCAB, choose, draw_logits, log_softmax


def test_a_mask_of_everything_changes_nothing():
    rng = np.random.default_rng(8)
    logits, history = draw_logits(rng, len(MIXED)), rng.integers(0, VOCAB, (len(MIXED), 16))
    positions = rng.integers(0, 16, len(MIXED))
    full = choose(logits, MIXED, positions=positions, history=history)
    masked = choose(logits, MIXED, positions=positions, history=history, variant=CONSTRAINED)
    for a, b in zip(full, masked, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 0.999]))
def test_masked_tokens_change_no_choice(seed, share):
    rng = np.random.default_rng(seed)
    logits = draw_logits(rng, 8)
    allowed = rng.random(logits.shape) < share
    allowed[np.arange(8), rng.integers(0, VOCAB, 8)] = True  # one at least
    params = [MIXED[index] for index in rng.integers(0, len(MIXED), 8)]
    draw = partial(choose, params=params, positions=rng.integers(0, 16, 8), history=rng.integers(0, VOCAB, (8, 16)))
    output = draw(logits, allowed=allowed, variant=CONSTRAINED)
    assert allowed[np.arange(8), output.tokens].all()
    np.testing.assert_array_equal(output.tokens, draw(np.where(allowed, logits, -np.inf)).tokens)
    own = log_softmax(logits)[np.arange(8), output.tokens]  # the model's, mask or not
    np.testing.assert_allclose(output.logprobs, own, atol=1e-4)
    np.testing.assert_array_equal(output.top_ids, draw(logits).top_ids)


def test_a_mask_leaves_the_other_rows_alone():
    rng = np.random.default_rng(9)
    logits = draw_logits(rng, 8)
    allowed = np.ones(logits.shape, bool)
    allowed[::2] = rng.random((4, VOCAB)) < 0.01
    with_masks = choose(logits, MIXED[:8], allowed=allowed, variant=CONSTRAINED)
    without = choose(logits, MIXED[:8])
    for a, b in zip(with_masks, without, strict=True):
        np.testing.assert_array_equal(a[1::2], b[1::2])
