"""Samples each row's next token from f32[S, V] logits, as a pure function.

Rules apply in this order: penalties and logit_bias on the raw logits, banned tokens, the grammar's mask, temperature,
top_k, top_p over the tokens that top_k keeps, min_p, typical_p over the tokens that the other rules keep. Temperature 0
takes the largest adjusted logit (the first of equals). Logprobs are the log-softmax of the raw logits.

`draw` inverts the cumulative distribution at one uniform number u per row. u depends on (seed, sample_index, position)
only, and every rule works within its row, so neither the other rows nor the variant change a row's token.
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
from jaxserve.sampling.draw import BLOCK, argmax_by_blocks, draw
from jaxserve.sampling.selection import FEW, block_reduce, compute_if, first_reaching, in_passes, largest, total
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_ENDINGS, MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)
PURPOSE = 0x746F6B65  # separates the keys of sampling from any other use of a request's seed


class RowSampling(NamedTuple):
    """Sampling parameters on the device, of all rows or of the rows that sample.

    Attributes:
      temperature / top_p / min_p / typical_p: float32[rows].
      top_k: int32[rows], 0 is off.
      repetition / presence / frequency: float32[rows] penalties.
      seed: uint32[rows, 2], the low and the high 32 bits.
      sample_index: int32[rows].
      prompt_length: int32[rows]; tokens at and after this position are generated.
      bias_ids: int32[rows, MAX_LOGIT_BIAS], -1 where unused. An id given twice gets the sum of its biases.
      bias: float32[rows, MAX_LOGIT_BIAS].
      min_length: int32[rows]; at positions below it, tokens that end the request are banned.
      banned_ids: int32[rows, MAX_ENDINGS + MAX_BAD_WORD_TOKENS], -1 where unused: the tokens that end the request, then
        the tokens of each bad word.
      banned_back: int32, same shape: number of later tokens in the bad word; -1 for a token that ends the request.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    typical_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array
    sample_index: jax.Array
    prompt_length: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    min_length: jax.Array
    banned_ids: jax.Array
    banned_back: jax.Array


class SampleOutput(NamedTuple):
    """Sampled tokens and their logprobs.

    Attributes:
      tokens: int32[S], in 0..V-1 even where logits are not finite.
      logprobs: float32[S] under the raw logits; not finite where the row's logits hold NaN or +inf.
      top_ids / top_logprobs: int32 / float32 [S, min(MAX_LOGPROBS, V)], likeliest first, the lower id first among
        equals; with SamplerVariant.FULL and above only.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def encode(params: SamplingParams, prompt_length: int, endings: Sequence[int] = ()) -> RowSampling:
    """Encodes the parameters of one row as NumPy arrays, without the leading axis.

    Args:
      endings: tokens that end the request, for min_tokens; at most MAX_ENDINGS.
    """
    seed = params.seed % 2**64
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        bias_ids[: len(ids)] = ids
        bias[: len(ids)] = biases
    banned = [(token, -1) for token in endings]
    for run in params.bad_word_tokens:
        banned += zip(run, range(len(run) - 1, -1, -1), strict=True)
    banned_ids = np.full(MAX_ENDINGS + MAX_BAD_WORD_TOKENS, -1, np.int32)
    banned_back = np.zeros_like(banned_ids)
    if banned:
        banned_ids[: len(banned)], banned_back[: len(banned)] = np.array(banned, np.int32).T
    # In float32, sampling is greedy below 1e-20 except for exact ties, and uniform above 1e20.
    temperature = 0.0 if params.temperature < 1e-20 else min(params.temperature, 1e20)
    values: dict[str, Any] = {
        "temperature": np.float32(temperature),
        "top_p": np.float32(params.top_p),
        "top_k": np.int32(min(params.top_k, 2**31 - 1)),
        "min_p": np.float32(params.min_p),
        "typical_p": np.float32(params.typical_p),
        "repetition": np.float32(min(max(params.repetition_penalty, 1e-20), 1e20)),  # finite, so that 0 times it is 0
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "seed": np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32),
        "sample_index": np.int32(params.sample_index),
        "prompt_length": np.int32(prompt_length),
        "bias_ids": bias_ids,
        "bias": bias,
        "min_length": np.int32(prompt_length + params.min_tokens),
        "banned_ids": banned_ids,
        "banned_back": banned_back,
    }
    return RowSampling(**values)


def empty_rows(rows: int) -> RowSampling:
    """Parameters of greedy rows as NumPy arrays, the state of the device before any request."""
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
    """Samples the next token of each row.

    Args:
      logits: of the model.
      rows: sampling parameters of these S rows.
      positions: positions of the new tokens.
      history: tokens by position, valid below the row's position. Read by FULL and above only.
      allowed: bit mask of the allowed tokens, 32 per word, lowest bit first; with CONSTRAINED only. The token of a row
        that allows none is arbitrary.
      variant: includes the rules of every row; each variant that includes a row's rules gives it the same token.
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
        greedy = argmax_by_blocks(adjusted, block_max, peak)
        temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        weigh = partial(_weigh, peak, temperature)
        if variant != SamplerVariant.PLAIN:
            floor, ceiling = _smallest_kept(adjusted, peak, temperature, rows), jnp.full_like(peak, jnp.inf)
            if variant >= SamplerVariant.FULL:
                typical_p = jnp.where(rows.temperature > 0, rows.typical_p, 1.0)[:, None]
                floor, ceiling = compute_if(
                    (typical_p < 1).any(),
                    partial(_typical_bounds, adjusted, peak, temperature, floor, typical_p),
                    (floor, ceiling),
                )
            weigh = partial(_weigh_kept, weigh, floor, ceiling)
        drawn = draw(adjusted, weigh, uniform(rows.seed, rows.sample_index, positions))
        # A row with NaN or +inf among its logits, or nothing but -inf, has no distribution to draw from.
        tokens = jnp.where((rows.temperature > 0) & jnp.isfinite(peak[:, 0]), drawn, greedy)

        raw_peak = logits.max(-1, keepdims=True) if variant >= SamplerVariant.FULL else _recompute(peak)
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
    """A uniform random number per row: a multiple of 2**-24 in [0, 1).

    Threefry-2x32 (Salmon et al., SC'11) of (position, 0); its key is Threefry of (sample_index, PURPOSE) with the seed
    as key.
    """

    def bits(seed, index, position):
        key = threefry_2x32((seed[0], seed[1]), jnp.stack([index, jnp.uint32(PURPOSE)]))
        return threefry_2x32((key[0], key[1]), jnp.stack([position, jnp.uint32(0)]))[0]

    drawn = jax.vmap(bits)(seed, sample_index.astype(jnp.uint32), positions.astype(jnp.uint32))
    return (drawn >> 8).astype(jnp.float32) * 2.0**-24


def _recompute(x: jax.Array) -> jax.Array:
    # Keeps XLA from sharing an [S, V] array between two passes: writing and reading it costs more than computing it.
    return jax.lax.optimization_barrier(x)


def _bits(words: UInt32[jax.Array, "S words"], count: int) -> Bool[jax.Array, "S {count}"]:
    """The first `count` bits of each row."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [S, words, 32]
    return bits.reshape(words.shape[0], -1)[:, :count] != 0


def _weigh(
    peak: Float32[jax.Array, "S 1"], temperature: Float32[jax.Array, "S 1"], logits: Float32[jax.Array, "S n"]
) -> Float32[jax.Array, "S n"]:
    """Unnormalised probabilities, exactly 1 for the likeliest token of a row."""
    return jnp.exp((logits - peak) / temperature)


def _weigh_kept(
    weigh: Callable[[jax.Array], jax.Array],
    floor: Float32[jax.Array, "S 1"],
    ceiling: Float32[jax.Array, "S 1"],
    logits: Float32[jax.Array, "S n"],
) -> Float32[jax.Array, "S n"]:
    return jnp.where((logits >= floor) & (logits <= ceiling), weigh(logits), 0.0)


def _smallest_kept(
    logits: Float32[jax.Array, "S V"],
    peak: Float32[jax.Array, "S 1"],
    temperature: Float32[jax.Array, "S 1"],
    rows: RowSampling,
) -> Float32[jax.Array, "S 1"]:
    """The smallest logit that top_k, top_p and min_p keep; greedy rows need no search."""
    drawn = rows.temperature > 0
    top_k, top_p = jnp.where(drawn, rows.top_k, 0), jnp.where(drawn, rows.top_p, 1.0)
    weigh = partial(_weigh, _recompute(peak), temperature)
    floor = compute_if(
        ((top_k > 0) | (top_p < 1)).any(),
        lambda: selection.threshold(logits, weigh, top_k, top_p),
        jnp.full_like(peak, -jnp.inf),
    )
    return jnp.maximum(floor, peak + temperature * jnp.log(rows.min_p[:, None]))


def _typical_bounds(
    logits: Float32[jax.Array, "S V"],
    peak: Float32[jax.Array, "S 1"],
    temperature: Float32[jax.Array, "S 1"],
    floor: Float32[jax.Array, "S 1"],
    typical_p: Float32[jax.Array, "S 1"],
) -> tuple[Float32[jax.Array, "S 1"], Float32[jax.Array, "S 1"]]:
    """The smallest and the largest logit that typical_p keeps among logits >= `floor`; exact.

    Tokens are kept in order of |surprisal - entropy|, which is |logit - mean logit| at this temperature, until they
    hold `typical_p` of the probability. Tokens as far away as the last one are kept too, as in Hugging Face's
    TypicalLogitsWarper. Where typical_p is 1, the bounds are `floor` and infinity.
    """

    def scaled(logits):
        return (logits - peak) / temperature

    def weigh(logits):
        return jnp.where(logits >= floor, jnp.exp(scaled(logits)), 0.0)

    weights = in_passes(weigh, logits)
    mass = total(weights())
    each = weights()
    mean = total(jnp.where(each > 0, each * scaled(logits), 0.0)) / mass
    distance = jnp.where(weights() > 0, jnp.abs(scaled(logits) - mean), jnp.inf)
    # One array for every pass: computed anew it could round differently. Comparisons take subnormal numbers for zero.
    distance = jax.lax.optimization_barrier(jnp.where(distance < _SMALLEST_NORMAL, 0.0, distance))
    target = typical_p * mass
    nearest, ids = largest(distance, min(FEW, logits.shape[1]), jnp.negative)
    few_limit, is_few = first_reaching(-nearest, weigh(jnp.take_along_axis(logits, ids, -1)), target, 0.0)

    def bisect():
        keys = jax.lax.bitcast_convert_type(distance, jnp.int32)  # in the order of floats of at least 0

        def step(_, bounds):
            low, high = bounds
            middle = low + (high - low) // 2
            is_enough = total(jnp.where(keys <= middle, weights(), 0.0)) >= target
            return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

        low = jax.lax.bitcast_convert_type(-nearest[:, -1:], jnp.int32)  # the nearest few are not enough
        high = jax.lax.bitcast_convert_type(jnp.full_like(mass, jnp.inf), jnp.int32)
        limit = jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, step, (low, high))[1], jnp.float32)
        return jnp.where(is_few, few_limit, limit)

    is_off = typical_p >= 1
    kept = (distance <= compute_if(~(is_few | is_off).all(), bisect, few_limit)) & (weights() > 0)
    lowest = jnp.where(kept, logits, jnp.inf).min(-1, keepdims=True)
    highest = jnp.where(kept, logits, -jnp.inf).max(-1, keepdims=True)
    return jnp.where(is_off, floor, lowest), jnp.where(is_off, jnp.inf, highest)


def _penalise(
    logits: Float32[jax.Array, "S V"],
    rows: RowSampling,
    positions: Int32[jax.Array, " S"],
    history: Int32[jax.Array, "S max_context"],
) -> Float32[jax.Array, "S V"]:
    """Logits after the penalties and logit_bias, with banned tokens at -inf."""
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
    ban = partial(_ban, rows=rows, positions=positions, history=history)
    return jax.lax.cond((rows.banned_ids >= 0).any(), ban, lambda x: x, logits)


def _ban(
    logits: Float32[jax.Array, "S V"],
    rows: RowSampling,
    positions: Int32[jax.Array, " S"],
    history: Int32[jax.Array, "S max_context"],
) -> Float32[jax.Array, "S V"]:
    """Logits with -inf for tokens that would end a request too early or complete a bad word."""
    ids, back = rows.banned_ids, rows.banned_back
    where = positions[:, None] - back
    matches = jnp.take_along_axis(history, jnp.maximum(where, 0), 1) == ids
    mismatch = ((back > 0) & ~(matches & (where >= 0))).astype(jnp.int32)
    mismatches = jnp.cumsum(mismatch, -1)
    is_first = jnp.roll(back, 1, -1).at[:, 0].set(0) <= 0  # a bad word starts after the last token of another
    before_word = jax.lax.cummax(jnp.where(is_first, mismatches - mismatch, 0), axis=1)
    completes = (back == 0) & (mismatches == before_word)
    ends_early = (back < 0) & (positions < rows.min_length)[:, None]
    banned = jnp.where((completes | ends_early) & (ids >= 0), ids, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], banned].set(-jnp.inf, mode="drop")
