"""Choosing each row's next token: one pure function over f32[S, V] logits.

The order is penalties and logit_bias on the raw logits, barred tokens, what a grammar allows, temperature, top_k, top_p
over what top_k left, min_p; temperature 0 takes the largest adjusted logit (the first of equals). Logprobs are those of
the model's own distribution, the log-softmax of the raw logits.

A token is drawn by inverting the cumulative distribution at one uniform number u of the row: token i, in order of ids,
owns the interval [F(i-1), F(i)) of [0, 1), where F is the cumulative probability after every rule above, and the token
whose interval holds u is chosen. The *margin* of a choice is the distance from u to the nearer end of that interval:
the choice stands under any change of arithmetic that moves F by less. F is summed in float32 in two levels (blocks of
`BLOCK` ids, then the ids of one block), whose rounding moves it by some 1e-6. A token of probability zero is never
chosen, however u falls.

u depends on (seed, sample_index, position) alone and every rule works within its row, so neither the other rows nor
the variant that they ask for change what a row gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxserve.iteration import SamplerVariant
from jaxserve.sampling import selection
from jaxserve.sampling.selection import block_reduce, largest, once_if
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_ENDINGS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

BLOCK = 128  # ids summed together before the cumulative sum over blocks
PURPOSE = 0x746F6B65  # sets the keys of token choice apart from any other use of a request's seed


class RowSampling(NamedTuple):
    """How tokens are chosen, one entry a row: on the device by rows, or gathered to the rows that sample.

    Attributes:
      temperature / top_p / min_p: float32[rows].
      top_k: int32[rows], 0 is off.
      repetition / presence / frequency: float32[rows] penalties.
      seed: uint32[rows, 2], the low and the high half.
      sample_index: int32[rows].
      prompt_length: int32[rows]; tokens from there on are the generated ones.
      bias_ids: int32[rows, MAX_LOGIT_BIAS], -1 where unused. An id given twice gets the sum of its biases.
      bias: float32[rows, MAX_LOGIT_BIAS].
      min_length: int32[rows]; at positions below, the tokens that end the request are barred.
      bar_ids: int32[rows, MAX_ENDINGS + MAX_BAD_WORD_TOKENS], -1 where unused: tokens that end the request, and runs of
        tokens that are never to stand complete, one run after another.
      bar_back: int32, likewise: of a run's tokens how many come after it, 0 for the last; -1 for what ends the request.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array
    sample_index: jax.Array
    prompt_length: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    min_length: jax.Array
    bar_ids: jax.Array
    bar_back: jax.Array


class SampleOutput(NamedTuple):
    """What was chosen.

    Attributes:
      tokens: int32[S], in 0..V-1 whatever the logits.
      logprobs: float32[S] under the raw logits; not finite where the row's logits hold NaN or +inf.
      top_ids / top_logprobs: int32 / float32 [S, min(MAX_LOGPROBS, V)], likeliest first, the lower id first among
        equals; with SamplerVariant.FULL and above only.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def encode(params: SamplingParams, prompt_length: int, endings: Sequence[int] = ()) -> RowSampling:
    """One row's values, as NumPy arrays without the leading axis.

    Args:
      endings: tokens that end the request, with min_tokens; at most MAX_ENDINGS.
    """
    seed = params.seed % 2**64
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        bias_ids[: len(ids)] = ids
        bias[: len(ids)] = biases
    bars = [(token, -1) for token in endings]
    for run in params.bad_word_tokens:
        bars += zip(run, range(len(run) - 1, -1, -1), strict=True)
    bar_ids = np.full(MAX_ENDINGS + MAX_BAD_WORD_TOKENS, -1, np.int32)
    bar_back = np.zeros_like(bar_ids)
    if bars:
        bar_ids[: len(bars)], bar_back[: len(bars)] = np.array(bars, np.int32).T
    # Below 1e-20 a temperature is greedy in float32 but for exact ties, and above 1e20 it is uniform.
    temperature = 0.0 if params.temperature < 1e-20 else min(params.temperature, 1e20)
    values: dict[str, Any] = {
        "temperature": np.float32(temperature),
        "top_p": np.float32(params.top_p),
        "top_k": np.int32(min(params.top_k, 2**31 - 1)),
        "min_p": np.float32(params.min_p),
        "repetition": np.float32(min(max(params.repetition_penalty, 1e-20), 1e20)),  # so that 0 times it is 0
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "seed": np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32),
        "sample_index": np.int32(params.sample_index),
        "prompt_length": np.int32(prompt_length),
        "bias_ids": bias_ids,
        "bias": bias,
        "min_length": np.int32(prompt_length + params.min_tokens),
        "bar_ids": bar_ids,
        "bar_back": bar_back,
    }
    return RowSampling(**values)


def empty_rows(rows: int) -> RowSampling:
    """Greedy rows as NumPy arrays: what the device holds before any request."""
    row = encode(SamplingParams(temperature=0.0), 0)
    return jax.tree.map(lambda value: np.broadcast_to(value, (rows, *value.shape)).copy(), row)


def sample(
    logits: Float32[jax.Array, "S V"],
    rows: RowSampling,
    positions: Int32[jax.Array, " S"],
    history: Int32[jax.Array, "S max_context"],
    allowed: UInt32[jax.Array, "S words"] | None = None,
    *,
    variant: SamplerVariant,
) -> SampleOutput:
    """Chooses the next token of each row.

    Args:
      logits: of the model.
      rows: parameters of these S rows.
      positions: where the new token will stand.
      history: tokens at positions below the row's own are valid. Read by FULL and above only.
      allowed: the tokens that may be chosen, 32 a word, the lowest bit first; with CONSTRAINED only. A row that may
        have none gets any.
      variant: which rules any of these rows needs; a lesser row gets the same token from a greater variant.
    """
    with jax.named_scope("sampler"):
        adjusted = logits
        if variant >= SamplerVariant.FULL:
            adjusted = _penalise(logits, rows, positions, history)
        if variant == SamplerVariant.CONSTRAINED:
            assert allowed is not None
            adjusted = jnp.where(_bits(allowed, logits.shape[1]), adjusted, -jnp.inf)
        block_max = block_reduce(adjusted, BLOCK, jax.lax.max)  # [S, blocks]
        peak = block_max.max(-1, keepdims=True)  # [S, 1]
        greedy = _first_of_peak(adjusted, block_max, peak)
        temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        floor = None
        if variant != SamplerVariant.PLAIN:
            floor = _floor(adjusted, peak, temperature, rows)
        uniforms = uniform(rows.seed, rows.sample_index, positions)
        drawn = _draw(adjusted, partial(_weigh, peak, temperature), floor, uniforms)
        # A row with NaN or +inf among its logits, or nothing but -inf, has no distribution to draw from.
        tokens = jnp.where((rows.temperature > 0) & jnp.isfinite(peak[:, 0]), drawn, greedy)

        raw_peak = logits.max(-1, keepdims=True) if variant >= SamplerVariant.FULL else _apart(peak)
        sums = block_reduce(jnp.exp(logits - raw_peak), BLOCK, jax.lax.add)
        log_sum = raw_peak + jnp.log(sums.sum(-1, keepdims=True))
        logprobs = (jnp.take_along_axis(logits, tokens[:, None], -1) - log_sum)[:, 0]
        if variant < SamplerVariant.FULL:
            return SampleOutput(tokens, logprobs)
        top, top_ids = largest(logits, min(MAX_LOGPROBS, logits.shape[1]))
        return SampleOutput(tokens, logprobs, top_ids, top - log_sum)


def uniform(
    seed: UInt32[jax.Array, "S 2"], sample_index: Int32[jax.Array, " S"], positions: Int32[jax.Array, " S"]
) -> Float32[jax.Array, " S"]:
    """The one random number of each row: in [0, 1), multiples of 2**-24.

    Threefry-2x32 (Salmon et al., SC'11) of (position, 0), under the key that it makes of (sample_index, PURPOSE) under
    the seed.
    """

    def bits(seed, index, position):
        key = threefry_2x32((seed[0], seed[1]), jnp.stack([index, jnp.uint32(PURPOSE)]))
        return threefry_2x32((key[0], key[1]), jnp.stack([position, jnp.uint32(0)]))[0]

    drawn = jax.vmap(bits)(seed, sample_index.astype(jnp.uint32), positions.astype(jnp.uint32))
    return (drawn >> 8).astype(jnp.float32) * 2.0**-24


def _apart(x: jax.Array) -> jax.Array:
    # Keeps XLA from sharing what two passes over [S, V] make of x: it would write that array out to read it twice.
    return jax.lax.optimization_barrier(x)


def _bits(words: UInt32[jax.Array, "S words"], count: int) -> Bool[jax.Array, "S {count}"]:
    """The first `count` bits of each row."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [S, words, 32]
    return bits.reshape(words.shape[0], -1)[:, :count] != 0


def _of_block(logits: Float32[jax.Array, "S V"], block: Int32[jax.Array, " S"]) -> Float32[jax.Array, "S block"]:
    """Logits of one block a row, filled up with -inf."""
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    inside = jnp.take_along_axis(logits, jnp.minimum(ids, logits.shape[1] - 1), -1)
    return jnp.where(ids < logits.shape[1], inside, -jnp.inf)


def _first_of_peak(
    logits: Float32[jax.Array, "S V"], block_max: Float32[jax.Array, "S blocks"], peak: Float32[jax.Array, "S 1"]
) -> Int32[jax.Array, " S"]:
    """Lowest id of the largest logit, by the block that holds it: an argmax over V is slow on a CPU."""
    block = jnp.argmax(block_max >= peak, -1).astype(jnp.int32)
    return block * BLOCK + jnp.argmax(_of_block(logits, block) >= peak, -1).astype(jnp.int32)


def _weigh(
    peak: Float32[jax.Array, "S 1"], temperature: Float32[jax.Array, "S 1"], logits: Float32[jax.Array, "S n"]
) -> Float32[jax.Array, "S n"]:
    """Unnormalised probabilities; the likeliest token of a row has exactly 1."""
    return jnp.exp((logits - peak) / temperature)


def _floor(
    logits: Float32[jax.Array, "S V"],
    peak: Float32[jax.Array, "S 1"],
    temperature: Float32[jax.Array, "S 1"],
    rows: RowSampling,
) -> Float32[jax.Array, "S 1"]:
    """The logit that a token needs to stay. Greedy rows have none, so that they cost nobody a search."""
    drawn = rows.temperature > 0
    top_k, top_p = jnp.where(drawn, rows.top_k, 0), jnp.where(drawn, rows.top_p, 1.0)
    weigh = partial(_weigh, _apart(peak), temperature)
    floor = once_if(
        ((top_k > 0) | (top_p < 1)).any(),
        lambda: selection.floor(logits, weigh, top_k, top_p),
        jnp.full_like(peak, -jnp.inf),
    )
    return jnp.maximum(floor, peak + temperature * jnp.log(rows.min_p[:, None]))


def _draw(
    logits: Float32[jax.Array, "S V"],
    weigh: Callable[[jax.Array], jax.Array],
    floor: Float32[jax.Array, "S 1"] | None,
    uniforms: Float32[jax.Array, " S"],
) -> Int32[jax.Array, " S"]:
    """Tokens by the inverse of the cumulative distribution."""

    def kept(logits):
        return weigh(logits) if floor is None else jnp.where(logits >= floor, weigh(logits), 0.0)

    sums = block_reduce(kept(logits), BLOCK, jax.lax.add)  # [S, blocks]
    cumulative = jnp.cumsum(sums, -1)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_beyond(cumulative, sums, target)
    before = jnp.take_along_axis(cumulative - sums, block[:, None], -1)
    weights = kept(_of_block(logits, block))  # [S, BLOCK]
    return block * BLOCK + _first_beyond(jnp.cumsum(weights, -1), weights, target - before)


def _first_beyond(
    cumulative: Float32[jax.Array, "S n"], parts: Float32[jax.Array, "S n"], target: Float32[jax.Array, "S 1"]
) -> Int32[jax.Array, " S"]:
    """First index whose cumulative sum passes the target, of parts above zero; the last such if none does."""
    index = jnp.arange(parts.shape[-1], dtype=jnp.int32)
    some = parts > 0
    beyond = some & (cumulative > target)
    last = jnp.where(some, index, 0).max(-1)
    return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1).astype(jnp.int32), last)


def _penalise(
    logits: Float32[jax.Array, "S V"],
    rows: RowSampling,
    positions: Int32[jax.Array, " S"],
    history: Int32[jax.Array, "S max_context"],
) -> Float32[jax.Array, "S V"]:
    """Logits after the penalties and logit_bias, barred tokens at -inf."""
    count, vocab = logits.shape
    lane = jnp.arange(count)[:, None]

    def penalise(logits):
        where = jnp.arange(history.shape[1])[None, :]
        known = jnp.where(where < positions[:, None], history, vocab)
        made = jnp.where(where >= rows.prompt_length[:, None], known, vocab)
        seen = jnp.zeros(logits.shape, bool).at[lane, known].set(True, mode="drop")
        counts = jnp.zeros(logits.shape, jnp.float32).at[lane, made].add(1.0, mode="drop")
        repetition = rows.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen, repeated, logits)
        return logits - (rows.presence[:, None] * (counts > 0) + rows.frequency[:, None] * counts)

    def bias(logits):
        ids = jnp.where(rows.bias_ids < 0, vocab, rows.bias_ids)
        return logits.at[lane, ids].add(rows.bias, mode="drop")

    penalised = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    logits = jax.lax.cond(penalised.any(), penalise, lambda x: x, logits)
    logits = jax.lax.cond((rows.bias_ids >= 0).any(), bias, lambda x: x, logits)
    bar = partial(_bar, rows=rows, positions=positions, history=history)
    return jax.lax.cond((rows.bar_ids >= 0).any(), bar, lambda x: x, logits)


def _bar(
    logits: Float32[jax.Array, "S V"],
    rows: RowSampling,
    positions: Int32[jax.Array, " S"],
    history: Int32[jax.Array, "S max_context"],
) -> Float32[jax.Array, "S V"]:
    """Logits with -inf for what would end a request too early, and for what would complete a barred run."""
    ids, back = rows.bar_ids, rows.bar_back
    where = positions[:, None] - back
    stands = jnp.take_along_axis(history, jnp.maximum(where, 0), 1) == ids
    wrong = ((back > 0) & ~(stands & (where >= 0))).astype(jnp.int32)
    so_far = jnp.cumsum(wrong, -1)
    begins = jnp.roll(back, 1, -1).at[:, 0].set(0) <= 0  # after a run's last token, another begins
    at_begin = jax.lax.cummax(jnp.where(begins, so_far - wrong, 0), axis=1)
    completes = (back == 0) & (so_far == at_begin)
    ends_early = (back < 0) & (positions < rows.min_length)[:, None]
    barred = jnp.where((completes | ends_early) & (ids >= 0), ids, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], barred].set(-jnp.inf, mode="drop")
