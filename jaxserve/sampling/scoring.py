"""Logprobs of given tokens, one tile of the vocabulary at a time.

The logits of 1,024 positions and a vocabulary of 250,880 take 1 GB. With a running maximum, a running sum and the
likeliest tokens so far, only one tile is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from jaxserve.sampling.selection import largest
from jaxserve.sampling_params import MAX_LOGPROBS

LogitsTile = Callable[[jax.Array | int, int], jax.Array]


class _Running(NamedTuple):
    """Statistics of each position's logits over the tiles so far; [T], the last two [T, top]."""

    peak: jax.Array
    total: jax.Array  # sum of exp(logit - peak)
    target: jax.Array  # logit of the given token
    top: jax.Array
    top_ids: jax.Array


def score(
    logits_tile: LogitsTile,
    vocab: int,
    tile: int,
    next_tokens: Int32[jax.Array, " T"],
    axis: str | tuple[str, ...] | None = None,
) -> tuple[Float32[jax.Array, " T"], Int32[jax.Array, "T top"], Float32[jax.Array, "T top"]]:
    """Logprobs of the token after each position and of the likeliest alternatives (traced).

    Args:
      logits_tile: (start, size) -> float32[T, size] logits of ids start:start+size; start may be traced.
      vocab: size of the vocabulary.
      tile: maximum number of ids per tile.
      next_tokens: the given token at each position.
      axis: mesh axis of the enclosing shard_map, if any; vocab and logits_tile are then this device's shard of the
        vocabulary, which is split evenly in order of ids.

    Returns:
      (logprobs, top ids, top logprobs), likeliest first, the lower id first among equals; top = min(MAX_LOGPROBS, size
      of the whole vocabulary). The logprob of an id outside the vocabulary is -inf.
    """
    (count,) = next_tokens.shape
    keep = min(MAX_LOGPROBS, vocab)
    first = 0 if axis is None else jax.lax.axis_index(axis) * vocab
    next_tokens = next_tokens - first

    def add(state: _Running, start: jax.Array | int, size: int) -> _Running:
        logits = logits_tile(start, size)
        peak = jnp.maximum(state.peak, logits.max(-1))
        # A row of -inf so far keeps the sum 0; inf - inf would be NaN.
        shift = jnp.where(jnp.isneginf(peak), 0.0, peak)
        total = state.total * jnp.exp(state.peak - shift) + jnp.exp(logits - shift[:, None]).sum(-1)
        local = next_tokens - start
        here = (local >= 0) & (local < size)
        asked = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, None], -1)[:, 0]
        found, found_ids = largest(logits, min(keep, size))
        # Lower ids come first, and top_k keeps the order of equals.
        top, places = jax.lax.top_k(jnp.concatenate([state.top, found], -1), keep)
        ids = jnp.concatenate([state.top_ids, found_ids + start], -1)
        return _Running(peak, total, jnp.where(here, asked, state.target), top, jnp.take_along_axis(ids, places, -1))

    state = _Running(
        peak=jnp.full(count, -jnp.inf, jnp.float32),
        total=jnp.zeros(count, jnp.float32),
        target=jnp.full(count, -jnp.inf, jnp.float32),
        top=jnp.full((count, keep), -jnp.inf, jnp.float32),
        top_ids=jnp.zeros((count, keep), jnp.int32),
    )
    whole = vocab // tile
    if whole:  # an empty loop is traced too, and a tile can be larger than the vocabulary
        state = jax.lax.fori_loop(0, whole, lambda i, s: add(s, i * tile, tile), state)
    if rest := vocab - whole * tile:
        state = add(state, whole * tile, rest)
    if axis is not None:
        state = _merged(jax.lax.all_gather(state._replace(top_ids=state.top_ids + first), axis))
    log_sum = state.peak + jnp.log(state.total)
    return state.target - log_sum, state.top_ids, state.top - log_sum[:, None]


def _merged(parts: _Running) -> _Running:
    """Combines the statistics of parts of the vocabulary, on a leading axis in order of ids."""
    peak = parts.peak.max(0)
    total = (parts.total * jnp.exp(parts.peak - jnp.where(jnp.isneginf(peak), 0.0, peak))).sum(0)
    count, keep = parts.top.shape[1], min(MAX_LOGPROBS, parts.top.shape[0] * parts.top.shape[2])
    tops, ids = (leaf.swapaxes(0, 1).reshape(count, -1) for leaf in (parts.top, parts.top_ids))
    top, places = jax.lax.top_k(tops, keep)
    return _Running(peak, total, parts.target.max(0), top, jnp.take_along_axis(ids, places, -1))
