"""Choosing each row's next token: one pure function over f32[S, V] logits.

The order is penalties and logit_bias on the raw logits, temperature, top_k, top_p over what top_k left, min_p;
temperature 0 takes the largest adjusted logit (the first of equals). Logprobs are those of the model's own
distribution, the log-softmax of the raw logits.

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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.iteration import SamplerVariant
from jaxserve.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

BLOCK = 128  # ids summed together before the cumulative sum over blocks
CANDIDATES = 64  # likeliest tokens that top_k and top_p look at before they go over the whole vocabulary
_TOP_BLOCK = 32  # ids whose maximum is taken first when looking for the largest few
PURPOSE = 0x746F6B65  # sets the keys of token choice apart from any other use of a request's seed

_LARGEST = float(np.finfo(np.float32).max)


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


class SampleOutput(NamedTuple):
    """What was chosen.

    Attributes:
      tokens: int32[S], in 0..V-1 whatever the logits.
      logprobs: float32[S] under the raw logits; not finite where the row's logits hold NaN or +inf.
      top_ids / top_logprobs: int32 / float32 [S, min(MAX_LOGPROBS, V)], likeliest first, the lower id first among
        equals; with SamplerVariant.FULL only.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def encode(params: SamplingParams, prompt_length: int) -> RowSampling:
    """One row's values, as NumPy arrays without the leading axis."""
    seed = params.seed % 2**64
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        bias_ids[: len(ids)] = ids
        bias[: len(ids)] = biases
    # Below 1e-20 a temperature is greedy in float32 but for exact ties, and above 1e20 it is uniform.
    temperature = 0.0 if params.temperature < 1e-20 else min(params.temperature, 1e20)
    values: dict[str, Any] = {
        "temperature": np.float32(temperature),
        "top_p": np.float32(params.top_p),
        "top_k": np.int32(min(params.top_k, 2**31 - 1)),
        "min_p": np.float32(params.min_p),
        "repetition": np.float32(params.repetition_penalty),
        "presence": np.float32(params.presence_penalty),
        "frequency": np.float32(params.frequency_penalty),
        "seed": np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32),
        "sample_index": np.int32(params.sample_index),
        "prompt_length": np.int32(prompt_length),
        "bias_ids": bias_ids,
        "bias": bias,
    }
    return RowSampling(**values)


def empty_rows(rows: int) -> RowSampling:
    """Greedy rows as NumPy arrays: what the device holds before any request."""
    row = encode(SamplingParams(temperature=0.0), 0)
    return jax.tree.map(lambda value: np.broadcast_to(value, (rows, *value.shape)).copy(), row)


def sample(
    logits: jax.Array, rows: RowSampling, positions: jax.Array, history: jax.Array, *, variant: SamplerVariant
) -> SampleOutput:
    """Chooses the next token of each row.

    Args:
      logits: float32[S, V] of the model.
      rows: parameters of these S rows.
      positions: int32[S] where the new token will stand.
      history: int32[S, max_context]; tokens at positions below the row's own are valid. Read by FULL only.
      variant: which rules any of these rows needs; a lesser row gets the same token from a greater variant.
    """
    with jax.named_scope("sampler"):
        adjusted = logits
        if variant == SamplerVariant.FULL:
            adjusted = _penalise(logits, rows, positions, history)
        view = _blocks(_clean(adjusted))  # [S, blocks, BLOCK]
        block_max = view.max(-1)  # [S, blocks]
        peak = block_max.max(-1, keepdims=True)  # [S, 1]
        greedy = _first_of_peak(view, block_max, peak)
        temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        floor = _no_floor(logits.shape[0])
        if variant != SamplerVariant.PLAIN:
            floor = _truncate(view, peak, temperature, rows)
        uniforms = uniform(rows.seed, rows.sample_index, positions)
        drawn = _draw(view, peak, temperature, floor, uniforms, greedy)
        tokens = jnp.where(rows.temperature > 0, drawn, greedy)
        tokens = jnp.clip(tokens, 0, logits.shape[1] - 1)

        raw = _blocks(logits)
        raw_peak = _clean(raw).max((1, 2)) if variant == SamplerVariant.FULL else peak[:, 0]
        raw_peak = jnp.maximum(raw_peak, -_LARGEST)
        log_sum = raw_peak + jnp.log(jnp.exp(raw - raw_peak[:, None, None]).sum(-1).sum(-1))
        logprobs = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0] - log_sum
        if variant != SamplerVariant.FULL:
            return SampleOutput(tokens, logprobs)
        top, top_ids = largest(_clean(logits), min(MAX_LOGPROBS, logits.shape[1]))
        return SampleOutput(tokens, logprobs, top_ids, top - log_sum[:, None])


def uniform(seed: jax.Array, sample_index: jax.Array, positions: jax.Array) -> jax.Array:
    """The one random number of each row: float32[S] in [0, 1), multiples of 2**-24.

    Args:
      seed: uint32[S, 2]; sample_index: int32[S]; positions: int32[S].
    """

    def one(seed, index, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for part in (index, position, PURPOSE):
            key = jax.random.fold_in(key, part)
        return jax.random.bits(key, (), jnp.uint32)

    bits = jax.vmap(one)(seed, sample_index, positions)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row of float32[S, V]: (values, ids) [S, count], the lower id first among equals.

    They lie in the `count` blocks with the largest maxima, so only those blocks are looked through.
    """
    rows, size = values.shape
    blocks = -(-size // _TOP_BLOCK)
    if blocks <= 2 * count:
        return _top_k(values, count)
    values = jnp.pad(values, ((0, 0), (0, -size % _TOP_BLOCK)), constant_values=-jnp.inf)
    values = values.reshape(rows, blocks, _TOP_BLOCK)
    _, chosen = _top_k(values.max(-1), count)
    chosen = jnp.sort(chosen, -1)  # in order of ids, so that equals stay in it
    found = jnp.take_along_axis(values, chosen[:, :, None], 1).reshape(rows, -1)
    top, places = _top_k(found, count)
    ids = jnp.take_along_axis(chosen, places // _TOP_BLOCK, -1) * _TOP_BLOCK + places % _TOP_BLOCK
    return top, ids


def _top_k(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    # The barrier keeps XLA's CPU compiler from merging a later slice into top_k, which turns it into a full sort.
    return jax.lax.optimization_barrier(tuple(jax.lax.top_k(values, count)))


class _Floor(NamedTuple):
    """Which tokens stay: logit >= `logit` and weight >= `weight`, each [S, 1, 1]."""

    logit: jax.Array
    weight: jax.Array


def _no_floor(rows: int) -> _Floor:
    return _Floor(jnp.full((rows, 1, 1), -jnp.inf, jnp.float32), jnp.zeros((rows, 1, 1), jnp.float32))


def _clean(logits: jax.Array) -> jax.Array:
    """NaN becomes -inf and +inf the largest float, so that every row has a maximum to subtract."""
    return jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), _LARGEST)


def _blocks(logits: jax.Array) -> jax.Array:
    """[S, V] -> [S, blocks, BLOCK], filled up with -inf."""
    rows, vocab = logits.shape
    pad = -vocab % BLOCK
    if pad:
        logits = jnp.pad(logits, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    return logits.reshape(rows, -1, BLOCK)


def _weights(view: jax.Array, peak: jax.Array, temperature: jax.Array, floor: _Floor) -> jax.Array:
    """Unnormalised probabilities of [S, n, BLOCK] logits; the likeliest token of a row has exactly 1."""
    shift = jnp.maximum(peak, -_LARGEST)
    # A division, since a product may be contracted into the exponential in one program and not in another.
    weights = jnp.exp((view - shift[:, :, None]) / temperature[:, :, None])
    return jnp.where((view >= floor.logit) & (weights >= floor.weight), weights, 0.0)


def _first_of_peak(view: jax.Array, block_max: jax.Array, peak: jax.Array) -> jax.Array:
    """int32[S] lowest id of the largest logit, by the block that holds it: an argmax over V is slow on a CPU."""
    block = jnp.argmax(block_max >= peak, -1)
    inside = jnp.take_along_axis(view, block[:, None, None], 1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside >= peak, -1)).astype(jnp.int32)


def _draw(
    view: jax.Array, peak: jax.Array, temperature: jax.Array, floor: _Floor, uniforms: jax.Array, greedy: jax.Array
) -> jax.Array:
    """int32[S] tokens by the inverse of the cumulative distribution."""
    sums = _weights(view, peak, temperature, floor).sum(-1)  # [S, blocks]
    cumulative = jnp.cumsum(sums, -1)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_beyond(cumulative, sums, target)
    before = jnp.take_along_axis(cumulative - sums, block[:, None], -1)
    inside = jnp.take_along_axis(view, block[:, None, None], 1)  # [S, 1, BLOCK]
    weights = _weights(inside, peak, temperature, floor)[:, 0]
    index = _first_beyond(jnp.cumsum(weights, -1), weights, target - before)
    # Only a row without any finite logit has no weight at all.
    return jnp.where(cumulative[:, -1] > 0, (block * BLOCK + index).astype(jnp.int32), greedy)


def _first_beyond(cumulative: jax.Array, parts: jax.Array, target: jax.Array) -> jax.Array:
    """First index whose cumulative sum passes the target, among parts above zero; the last of those if none does."""
    index = jnp.arange(parts.shape[-1], dtype=jnp.int32)
    some = parts > 0
    beyond = some & (cumulative > target)
    last = jnp.where(some, index, 0).max(-1)
    return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1).astype(jnp.int32), last)


def _truncate(view: jax.Array, peak: jax.Array, temperature: jax.Array, rows: RowSampling) -> _Floor:
    """The exact floors of top_k, top_p and min_p: from the likeliest few, or by search where those do not settle it."""
    count = view.shape[0]
    flat = view.reshape(count, -1)
    k = jnp.where(rows.top_k > 0, rows.top_k, flat.shape[1])[:, None]
    p = rows.top_p[:, None]

    def weigh(logits, kth):
        return _weights(logits[:, :, None], peak, temperature, _no_floor(count))[:, :, 0] * (logits >= kth)

    no_k = jnp.full((count, 1), -jnp.inf, jnp.float32)
    top, _ = largest(flat, min(CANDIDATES, flat.shape[1]))
    kth = jnp.take_along_axis(top, jnp.minimum(k, top.shape[1]) - 1, -1)
    kth_known = (k <= top.shape[1]) & ((kth > top[:, -1:]) | (p >= 1))
    kth = jnp.where(rows.top_k[:, None] > 0, kth, no_k)
    kth_known |= rows.top_k[:, None] == 0
    # With a known kth, the mass that top_k leaves is among the candidates; without top_k it is the whole row's.
    weights = weigh(top, kth)
    whole = _weights(view, peak, temperature, _no_floor(count)).sum(-1).sum(-1, keepdims=True)
    mass = jnp.where(rows.top_k[:, None] > 0, weights.sum(-1, keepdims=True), whole)
    reached = (jnp.cumsum(weights, -1) >= p * mass) & (weights > 0)
    pth = jnp.take_along_axis(weights, jnp.argmax(reached, -1)[:, None], -1)
    pth_known = (p >= 1) | reached.any(-1, keepdims=True)
    known = kth_known & pth_known | (rows.temperature <= 0)[:, None]

    def search(_):
        kth_found = _kth_by_search(flat, k)
        kth_found = jnp.where(rows.top_k[:, None] > 0, kth_found, no_k)
        return kth_found, _pth_by_search(weigh(flat, kth_found), p)

    def skip(_):
        return kth, pth

    slow_kth, slow_pth = jax.lax.cond(jnp.all(known), skip, search, None)
    kth, pth = jnp.where(known, kth, slow_kth), jnp.where(known, pth, slow_pth)
    pth = jnp.where(p < 1, pth, 0.0)
    return _Floor(kth[:, :, None], jnp.maximum(pth, rows.min_p[:, None])[:, :, None])


def _kth_by_search(flat: jax.Array, k: jax.Array) -> jax.Array:
    """float32[S, 1] k-th largest of each row, by bisection on the floats' order-preserving integers."""
    keys = _ordered(flat)

    def step(_, bounds):
        low, high = bounds  # at least k keys are >= low; fewer than k are >= high
        middle = (low & high) + ((low ^ high) >> 1)
        enough = (keys >= middle).sum(-1, keepdims=True) >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.full(k.shape, _ordered(jnp.float32(-jnp.inf)), jnp.int32)
    high = jnp.full(k.shape, _ordered(jnp.float32(jnp.inf)), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 32, step, (low, high))
    return _unordered(low)


def _pth_by_search(weights: jax.Array, p: jax.Array) -> jax.Array:
    """float32[S, 1] largest weight w such that the weights >= w hold the share p of the row's mass."""
    mass = weights.sum(-1, keepdims=True) * p

    def step(_, bounds):
        low, high = bounds  # the weights >= low reach the mass; those >= high do not
        middle = (low + high) >> 1
        value = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.where(weights >= value, weights, 0.0).sum(-1, keepdims=True) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # Weights lie in 0..1, where the integer image of a float keeps its order.
    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, step, (jnp.zeros(p.shape, jnp.int32), jnp.full(p.shape, one + 1)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 with the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(keys: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)


def _penalise(logits: jax.Array, rows: RowSampling, positions: jax.Array, history: jax.Array) -> jax.Array:
    """[S, V] logits after the penalties and logit_bias."""
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
    return jax.lax.cond((rows.bias_ids >= 0).any(), bias, lambda x: x, logits)
