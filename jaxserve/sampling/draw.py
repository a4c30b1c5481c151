"""Draws one token per row by inverting the cumulative distribution.

Token i, in order of ids, owns the interval [F(i-1), F(i)) of [0, 1), where F is the cumulative probability, and the
token whose interval holds the row's uniform number u is drawn. The *margin* of a draw is the distance from u to the
nearer end of that interval: arithmetic that moves F by less does not change the token. F is summed in float32 in two
levels (blocks of `BLOCK` ids, then the ids of one block), which rounds by about 1e-6. A token of probability zero is
never drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from jaxserve.sampling.selection import block_reduce

BLOCK = 128  # ids summed together before the cumulative sum over blocks


def draw(
    logits: Float32[jax.Array, "S V"],
    weigh: Callable[[jax.Array], jax.Array],
    uniforms: Float32[jax.Array, " S"],
) -> Int32[jax.Array, " S"]:
    """Draws one token per row, the one whose interval holds the row's uniform number.

    Args:
      weigh: maps logits [S, n] to unnormalised probabilities; 0 for a token that must not be drawn.
    """
    sums = block_reduce(weigh(logits), BLOCK, jax.lax.add)  # [S, blocks]
    cumulative = jnp.cumsum(sums, -1)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_beyond(cumulative, sums, target)
    before = jnp.take_along_axis(cumulative - sums, block[:, None], -1)
    weights = weigh(_block_logits(logits, block))  # [S, BLOCK]
    return block * BLOCK + _first_beyond(jnp.cumsum(weights, -1), weights, target - before)


def _first_beyond(
    cumulative: Float32[jax.Array, "S n"], parts: Float32[jax.Array, "S n"], target: Float32[jax.Array, "S 1"]
) -> Int32[jax.Array, " S"]:
    """First index with a part > 0 and a cumulative sum > target, else the last part > 0."""
    index = jnp.arange(parts.shape[-1], dtype=jnp.int32)
    is_positive = parts > 0
    beyond = is_positive & (cumulative > target)
    last = jnp.where(is_positive, index, 0).max(-1)
    return jnp.where(beyond.any(-1), jnp.argmax(beyond, -1).astype(jnp.int32), last)


def argmax_by_blocks(
    logits: Float32[jax.Array, "S V"], block_max: Float32[jax.Array, "S blocks"], peak: Float32[jax.Array, "S 1"]
) -> Int32[jax.Array, " S"]:
    """Argmax of each row, the lowest id among equals.

    Searches the block of the maximum only, because an argmax over V is slow on a CPU.
    """
    block = jnp.argmax(block_max >= peak, -1).astype(jnp.int32)
    return block * BLOCK + jnp.argmax(_block_logits(logits, block) >= peak, -1).astype(jnp.int32)


def _block_logits(logits: Float32[jax.Array, "S V"], block: Int32[jax.Array, " S"]) -> Float32[jax.Array, "S block"]:
    """Logits of one block per row, padded with -inf."""
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    inside = jnp.take_along_axis(logits, jnp.minimum(ids, logits.shape[1] - 1), -1)
    return jnp.where(ids < logits.shape[1], inside, -jnp.inf)
