"""The sampler against a float64 reference that sorts, and the promises that a batch makes to each of its rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.iteration import SamplerVariant
from jaxserve.sampling import sampler
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from tests.jaxserve.sampling.reference import (
    CONSTRAINED,
    FULL,
    MIXED,
    PLAIN,
    ROUNDING,
    TRUNCATED,
    VOCAB,
    assert_chosen,
    choose,
    compiled,
    draw_logits,
    log_softmax,
    reference,
    stack,
)

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.93, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 64, 65, 700, 5999, VOCAB, 10**6]),
    min_p=st.sampled_from([0.0, 0.0, 0.003, 0.2, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.4, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.75, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.25]),
    logit_bias=st.sampled_from([(), (), ((0, 100.0), (7, -100.0)), ((VOCAB - 1, 9.5), (VOCAB - 1, 3.5), (3, 1.0))]),
    min_tokens=st.sampled_from([0, 0, 1, 6, 128]),
    bad_word_tokens=st.one_of(
        st.just(()), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=12).map(tuple)
    ),
    seed=st.integers(-(2**63), 2**64 - 1),
    sample_index=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(sampling_params, min_size=4, max_size=4),
    numbers=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.5, 3.0]),
)
def test_rows_match_reference(params, numbers, scale):
    rng = np.random.default_rng(numbers)
    logits = draw_logits(rng, 4, scale=scale)
    positions = rng.integers(2, 16, 4)
    prompt_lengths = [int(rng.integers(1, position + 1)) for position in positions]
    history = rng.integers(0, rng.choice([5, VOCAB]), (4, 16))
    output = choose(logits, params, positions=positions, history=history, prompt_lengths=prompt_lengths)
    uniforms = np.asarray(
        sampler.uniform(
            *(jnp.asarray(v) for v in (stack(params).seed, stack(params).sample_index, positions.astype(np.int32)))
        )
    )
    for row, p in enumerate(params):
        known = history[row, : positions[row]].tolist()
        expected = reference(logits[row], p, known[: prompt_lengths[row]], known[prompt_lengths[row] :])
        token = output.tokens[row]
        if p.temperature == 0:
            # The reference divides in float64, so only what is nearly equal may change places.
            assert expected.adjusted[token] >= expected.adjusted.max() - 1e-5
        elif expected.margin > ROUNDING:
            assert_chosen(token, expected, uniforms[row])
        np.testing.assert_allclose(output.logprobs[row], log_softmax(logits[row])[token], atol=2e-5)


def test_reported_alternatives_are_the_models_own_and_in_order():
    rng = np.random.default_rng(1)
    logits = draw_logits(rng, 3)
    params = [SamplingParams(temperature=0.0, logit_bias=((5, 100.0),), top_k=1)] * 3
    output = choose(logits, params)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    assert (output.tokens == 5).all()
    np.testing.assert_array_equal(output.top_ids, expected)
    np.testing.assert_allclose(output.top_logprobs, np.take_along_axis(log_softmax(logits), expected, -1), atol=2e-5)
    np.testing.assert_allclose(output.logprobs, log_softmax(logits)[:, 5], atol=2e-5)


def test_lesser_variants_report_no_alternatives():
    output = choose(np.zeros((1, 7)), [SamplingParams()], variant=PLAIN)
    assert output.top_ids is None
    assert output.top_logprobs is None


def test_rows_do_not_depend_on_the_other_rows():
    rng = np.random.default_rng(3)
    logits, history = draw_logits(rng, 8), rng.integers(0, VOCAB, (8, 16))
    positions = rng.integers(8, 16, 8)
    whole = choose(logits, MIXED, positions=positions, history=history, prompt_lengths=[4] * 8)
    order = rng.permutation(8)
    shuffled = choose(
        logits[order],
        [MIXED[i] for i in order],
        positions=positions[order],
        history=history[order],
        prompt_lengths=[4] * 8,
    )
    for a, b in zip(whole, shuffled, strict=True):
        np.testing.assert_array_equal(a[order], b)
    for row in range(8):
        alone = choose(
            logits[[row]], [MIXED[row]], positions=positions[[row]], history=history[[row]], prompt_lengths=[4], batch=1
        )
        for a, b in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(a[[row]], b)


def test_rows_do_not_depend_on_the_variant():
    rng = np.random.default_rng(4)
    logits, positions = draw_logits(rng, 8, scale=1.0), np.arange(8)
    history = rng.integers(0, VOCAB, (8, 16))
    full = choose(logits, MIXED, positions=positions, history=history)
    truncated = choose(logits, MIXED, positions=positions, history=history, variant=TRUNCATED)
    plain = choose(logits, MIXED, positions=positions, history=history, variant=PLAIN)
    for row, params in enumerate(MIXED):
        if not params.is_penalised and not params.is_typical:
            assert (full.tokens[row], full.logprobs[row]) == (truncated.tokens[row], truncated.logprobs[row])
        if not params.is_penalised and not params.is_truncated:
            assert (full.tokens[row], full.logprobs[row]) == (plain.tokens[row], plain.logprobs[row])


@pytest.mark.parametrize("variant", SamplerVariant)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, "one nan", "one inf", "some nan"])
def test_broken_rows_stay_alone_and_in_range(variant, broken):
    rng = np.random.default_rng(5)
    logits = draw_logits(rng, 8)
    healthy = choose(logits, MIXED, variant=variant)
    bad = logits.copy()
    match broken:
        case "one nan":
            bad[::2, 17] = np.nan
        case "one inf":
            bad[::2, VOCAB - 1] = np.inf
        case "some nan":
            bad[::2, ::3] = np.nan
        case value:
            bad[::2] = value
    output = choose(bad, MIXED, variant=variant)
    for a, b in zip(healthy, output, strict=True):
        if a is not None:
            np.testing.assert_array_equal(a[1::2], b[1::2])
    assert ((output.tokens >= 0) & (output.tokens < VOCAB)).all()
    assert not np.isfinite(output.logprobs[::2]).any()
    if variant >= FULL:
        assert ((output.top_ids >= 0) & (output.top_ids < VOCAB)).all()


@pytest.mark.parametrize("variant", SamplerVariant)
def test_greedy_takes_the_first_of_equals(variant):
    logits = np.zeros((4, VOCAB), np.float32)
    for row, first in enumerate([0, 127, 128, 6000]):
        logits[row, [first, VOCAB - 1]] = 2.0
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5)
    assert choose(logits, [greedy] * 4, variant=variant).tokens.tolist() == [0, 127, 128, 6000]


def test_empty_rows_are_greedy_and_shaped_like_encoded_ones():
    rows, one = sampler.empty_rows(5), sampler.encode(SamplingParams(), 3)
    assert (rows.temperature == 0).all()
    assert (rows.bias_ids == -1).all()
    for many, single in zip(rows, one, strict=True):
        assert many.shape == (5, *single.shape)
        assert many.dtype == single.dtype
        assert many.dtype.itemsize == 4


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("variant", SamplerVariant)
def test_nothing_sorts_the_vocabulary(variant):
    rows = jax.tree.map(jnp.asarray, stack(MIXED))
    arrays = np.zeros((8, VOCAB), np.float32), rows, np.zeros(8, np.int32), np.zeros((8, 16), np.int32)
    masks = (np.zeros((8, -(-VOCAB // 32)), np.uint32),) if variant == CONSTRAINED else ()
    program = compiled(variant).lower(*arrays, *masks).compile()
    sorts = [line for line in program.as_text().splitlines() if " sort(" in line]
    assert not any(str(VOCAB) in line for line in sorts)
    if variant is PLAIN and jax.default_backend() == "cpu":
        assert program.memory_analysis().temp_size_in_bytes < arrays[0].nbytes / 4  # nothing of [S, V] is written out
