"""The sampler against a float64 reference that sorts, and the promises that a batch makes to each of its rows."""

from __future__ import annotations

import functools
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.iteration import SamplerVariant
from jaxserve.sampling import sampler
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams

PLAIN, TRUNCATED, FULL, CONSTRAINED = SamplerVariant
VOCAB = 6001  # odd, and large enough for every way in which limits are found
ROUNDING = 1e-5  # of cumulative probabilities in float32


@functools.cache
def compiled(variant):
    return jax.jit(partial(sampler.sample, variant=variant))


ENDINGS = (2, 5)


def stack(params, prompt_lengths=None):
    """RowSampling of several requests, which ENDINGS end."""
    lengths = prompt_lengths or [0] * len(params)
    rows = [
        sampler.encode(p, length, ENDINGS if p.min_tokens else ()) for p, length in zip(params, lengths, strict=True)
    ]
    return jax.tree.map(lambda *values: np.stack(values), *rows)


def packed(allowed):
    """uint32[S, words] of bool[S, V]."""
    bits = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), bool)
    bits[:, : allowed.shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def choose(logits, params, *, positions=None, history=None, prompt_lengths=None, allowed=None, variant=FULL, batch=8):
    """Runs the sampler on so many rows at a time, and brings its answer to the host."""
    count = len(params)
    positions = np.zeros(count, np.int32) if positions is None else np.asarray(positions, np.int32)
    history = np.zeros((count, 16), np.int32) if history is None else np.asarray(history, np.int32)
    arrays = np.asarray(logits, np.float32), stack(params, prompt_lengths), positions, history
    if variant is CONSTRAINED:
        arrays = *arrays, packed(np.ones((count, np.shape(logits)[1]), bool) if allowed is None else allowed)
    answers = []
    for start in range(0, count, batch):
        taken = np.arange(start, start + batch) % count  # the last batch is filled up
        answers.append(compiled(variant)(*jax.tree.map(lambda array, taken=taken: array[taken], arrays)))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *answers)


class Distribution(NamedTuple):
    adjusted: np.ndarray  # float64[V] logits after penalties and bias
    probabilities: np.ndarray  # float64[V] after every rule
    margin: float  # by how much a limit of top_p could move without another set of tokens


def reference(logits, params, prompt=(), generated=()):
    """What a row's token is drawn from, in float64."""
    x = np.asarray(logits, np.float64).copy()
    for token in set(prompt) | set(generated):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in generated:
        x[token] -= params.frequency_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    if len(generated) < params.min_tokens:
        x[list(ENDINGS)] = -np.inf
    known = [*prompt, *generated]
    for *before, last in params.bad_word_tokens:
        if not before or known[-len(before) :] == before:
            x[last] = -np.inf
    if params.temperature == 0:
        return Distribution(x, (np.arange(x.size) == x.argmax()).astype(float), 1.0)
    weights = np.exp((x - x.max()) / params.temperature)
    margin = 1.0
    if 0 < params.top_k < x.size:
        weights[x < np.sort(x)[-params.top_k]] = 0
    if params.top_p < 1:
        values, inverse = np.unique(weights, return_inverse=True)  # equals stay together
        shares = np.bincount(inverse, weights)[::-1].cumsum() / weights.sum()
        limit = np.argmax(shares >= params.top_p - 1e-12)
        margin = np.abs(shares - params.top_p).min()
        weights[weights < values[::-1][limit]] = 0
    weights[weights < params.min_p] = 0
    if params.typical_p < 1:
        weights, gap = typical(weights, params.typical_p)
        margin = min(margin, gap)
    return Distribution(x, weights / weights.sum(), margin)


def typical(weights, typical_p):
    """Locally typical weights (Meister et al. 2022), and by how much the limit could move without another set."""
    p = weights[weights > 0] / weights.sum()
    distance = np.full(weights.size, np.inf)
    distance[weights > 0] = np.abs(-np.log(p) + (p * np.log(p)).sum())
    values, inverse = np.unique(distance.round(9), return_inverse=True)  # equals stay together
    shares = np.bincount(inverse, weights).cumsum() / weights.sum()
    limit = np.argmax(shares >= typical_p - 1e-12)
    others = np.delete(values, limit)
    gap = min(np.abs(shares - typical_p).min(), np.abs(others - values[limit]).min(initial=1.0) / 10)
    return np.where(inverse <= limit, weights, 0.0), gap


def assert_chosen(token, distribution, u):
    """The token's interval of the cumulative distribution holds u, up to rounding, and is not empty."""
    assert distribution.probabilities[token] > 0
    ends = distribution.probabilities.cumsum()
    assert ends[token] - distribution.probabilities[token] - ROUNDING <= u < ends[token] + ROUNDING


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    peak = x.max(-1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(-1, keepdims=True))


def draw_logits(rng, rows, vocab=VOCAB, scale=3.0):
    """Multiples of 1/8, so that there are ties, and values that differ do so by more than rounding."""
    return (np.round(rng.normal(size=(rows, vocab)) * scale * 8) / 8).astype(np.float32)


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


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds, after Salmon et al."""
    mask = 0xFFFFFFFF
    ks = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + ks[0]) & mask, (counter[1] + ks[1]) & mask
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            a = (a + b) & mask
            b = ((b << rotation | b >> (32 - rotation)) & mask) ^ a
        a, b = (a + ks[(block + 1) % 3]) & mask, (b + ks[(block + 2) % 3] + block + 1) & mask
    return a, b


def test_uniforms_are_threefry():
    assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)  # Random123
    cases = list(itertools.product([0, 1, 2**32, 2**63, 2**64 - 1, -1, -(2**63)], [0, 1, 9], [0, 1, 70_000]))
    rows = stack([SamplingParams(seed=seed, sample_index=index) for seed, index, _ in cases])
    positions = np.array([position for *_, position in cases], np.int32)
    got = np.asarray(sampler.uniform(jnp.asarray(rows.seed), jnp.asarray(rows.sample_index), jnp.asarray(positions)))
    for (seed, index, position), u in zip(cases, got, strict=True):
        key = threefry((seed % 2**32, seed % 2**64 >> 32), (index, sampler.PURPOSE))
        assert u == (threefry(key, (position, 0))[0] >> 8) / 2**24
    assert ((got >= 0) & (got < 1)).all()
    distinct = {(seed % 2**64, *rest) for seed, *rest in cases}
    assert len(set(got.tolist())) == len(distinct)


@pytest.mark.parametrize("variant", [PLAIN, TRUNCATED])
def test_draws_follow_the_distribution(variant):
    vocab, draws = 40, 2048
    logits = np.linspace(-2, 2, vocab, dtype=np.float32)
    params = SamplingParams(temperature=0.8, seed=11, top_k=30 if variant is TRUNCATED else 0)
    tokens = choose(np.tile(logits, (draws, 1)), [params] * draws, positions=np.arange(draws), variant=variant).tokens
    expected = reference(logits, params).probabilities * draws
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < kept.sum() + 4 * np.sqrt(2 * kept.sum())  # mean n, deviation sqrt(2 n); the seed is fixed


EXTREMES = (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, 1 - 2.0**-24)


@pytest.mark.parametrize("variant", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("vocab", [1, 129, 1000])
def test_extreme_uniforms_choose_possible_tokens(monkeypatch, vocab, variant):
    def from_seed(seed, index, positions):
        return jax.lax.bitcast_convert_type(seed[:, 0], jnp.float32)

    monkeypatch.setattr(sampler, "uniform", from_seed)
    rng = np.random.default_rng(vocab)
    uniforms = np.repeat(np.float32(EXTREMES), 4)
    logits = (rng.normal(size=(20, vocab)) * 20).astype(np.float32)
    possible = rng.random((20, vocab)) < 0.3
    possible[np.arange(20), rng.integers(0, vocab, 20)] = True
    logits[~possible] = -np.inf
    logits[::4][possible[::4]] = 0.0
    top_p = 0.9 if variant is TRUNCATED else 1.0
    rows = stack(
        [SamplingParams(temperature=t, top_p=p) for t, p in [(1, 1), (30, top_p), (0.1, top_p), (1, top_p)] * 5]
    )
    rows = rows._replace(seed=np.stack([uniforms.view(np.uint32)] * 2, -1))
    run = jax.jit(partial(sampler.sample, variant=variant))
    tokens = np.asarray(run(logits, rows, np.zeros(20, np.int32), np.zeros((20, 4), np.int32)).tokens)
    assert possible[np.arange(20), tokens].all()
    assert tokens[0] == possible[0].argmax()  # u = 0 among equals
    assert tokens[8] == np.flatnonzero(possible[8])[possible[8].sum() // 2]  # u = 1/2: an interval holds its start
    assert tokens[16] == np.flatnonzero(possible[16])[-1]  # u just under 1


@pytest.mark.parametrize("typical_p", [0.01, 0.3, 0.9, 0.9999999])
@pytest.mark.parametrize("vocab", [3, pytest.param(40, marks=pytest.mark.exhaustive), 4001])
def test_typical_p_keeps_the_reference_set(typical_p, vocab):
    rng = np.random.default_rng(vocab)
    logits = draw_logits(rng, 1, vocab, scale=1.0)  # with ties
    params = SamplingParams(typical_p=typical_p)
    kept = reference(logits[0], params).probabilities > 0
    rows = jax.tree.map(jnp.asarray, stack([params]))
    peak = jnp.full((1, 1), logits.max())
    floor = jnp.full((1, 1), -jnp.inf)
    bounds = sampler._typical_bounds(jnp.asarray(logits), peak, jnp.ones((1, 1)), floor, rows.typical_p[:, None])
    low, high = (float(bound[0, 0]) for bound in bounds)
    np.testing.assert_array_equal((logits[0] >= low) & (logits[0] <= high), kept)


def test_typical_p_can_drop_the_likeliest_token():
    probabilities = np.array([0.4] + [0.012] * 50, np.float32)  # entropy 3.0 nats: the surprisal 4.4 is nearer than 0.9
    params = [SamplingParams(typical_p=0.5, seed=seed) for seed in range(64)]
    tokens = choose(np.tile(np.log(probabilities), (64, 1)), params, variant=TRUNCATED).tokens
    assert (tokens > 0).all()


MIXED = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=0.7, seed=2),
    SamplingParams(temperature=1.5, seed=3, top_p=0.99),
    SamplingParams(temperature=1.0, seed=4, top_k=300, top_p=0.95),
    SamplingParams(temperature=1.0, seed=5, min_p=0.01),
    SamplingParams(temperature=0.9, seed=6, repetition_penalty=1.3, logit_bias=((3, 2.0),)),
    SamplingParams(temperature=3.0, seed=7, top_k=5000, typical_p=0.7),
    SamplingParams(temperature=1.0, seed=8, frequency_penalty=0.4, top_k=9),
]


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
        if not params.is_penalised:
            assert (full.tokens[row], full.logprobs[row]) == (truncated.tokens[row], truncated.logprobs[row])
        if not params.is_penalised and not params.is_truncated:
            assert (full.tokens[row], full.logprobs[row]) == (plain.tokens[row], plain.logprobs[row])


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
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))  # the model's own, mask or not
    np.testing.assert_allclose(output.logprobs, exact[np.arange(8), output.tokens], atol=1e-4)
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


def test_ties_with_the_last_token_kept_are_kept():
    logits = np.full((64, VOCAB), -30.0, np.float32)
    logits[:, [10, 200, 3000, 5999]] = [1.0, 2.0, 1.0, 1.0]
    draw = partial(choose, logits, positions=np.arange(64), variant=TRUNCATED)
    for params in (
        SamplingParams(top_k=2, seed=1),
        SamplingParams(top_p=0.5, seed=1),
        SamplingParams(min_p=0.3, seed=1),
    ):
        assert set(draw([params] * 64).tokens.tolist()) == {10, 200, 3000, 5999}
    for params in (SamplingParams(top_k=1, seed=1), SamplingParams(top_p=1e-9, seed=1), SamplingParams(min_p=1.0)):
        assert set(draw([params] * 64).tokens.tolist()) == {200}


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


def test_temperatures_out_of_float_range_are_greedy_and_uniform():
    logits = draw_logits(np.random.default_rng(6), 2)
    cold, hot = SamplingParams(temperature=5e-324), SamplingParams(temperature=1.7e308, seed=3)
    output = choose(logits, [cold, hot], variant=PLAIN)
    uniforms = sampler.uniform(
        *(jnp.asarray(v[1:]) for v in (stack([cold, hot]).seed, np.zeros(2, np.int32), np.zeros(2, np.int32)))
    )
    assert output.tokens[0] == logits[0].argmax()
    assert abs(output.tokens[1] / VOCAB - float(uniforms[0])) < 1e-3


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
