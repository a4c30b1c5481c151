"""Runs the sampler on rows of requests, and says in float64, by sorting, what their tokens are drawn from."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.iteration import SamplerVariant
from jaxserve.sampling import sampler
from jaxserve.sampling_params import SamplingParams

PLAIN, TRUNCATED, FULL, CONSTRAINED = SamplerVariant
ENDINGS = (2, 5)
VOCAB = 6001  # odd, and large enough for every way in which limits are found
ROUNDING = 1e-5  # of cumulative probabilities in float32


@functools.cache
def compiled(variant):
    return jax.jit(partial(sampler.sample, variant=variant))


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
