"""The likeliest tokens of a vocabulary, exactly and without sorting it.

A full sort of 8 x 32,000 floats takes 45 ms on two CPU cores, a pass over them 0.05 ms. So the few largest are looked
for in the blocks with the largest maxima, and where a limit (top_k, top_p) lies beyond those few, a bisection on its
value narrows it down, a pass a step, until it lies among few tokens again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

FEW = 64  # tokens among which a limit is looked up in order

_BLOCK = 32  # ids whose maximum is taken first when looking for the largest few
_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


def block_reduce(
    values: Float32[jax.Array, "S n"], block: int, operator: Callable[[Any, Any], Any]
) -> Float32[jax.Array, "S blocks"]:
    """Reduces each run of `block` values, the last one as far as it goes.

    Args:
      operator: jax.lax.add or jax.lax.max.
    """
    start = 0.0 if operator is jax.lax.add else -np.inf
    rows, size = values.shape
    if size % block == 0:
        return jax.lax.reduce(values.reshape(rows, -1, block), np.float32(start), operator, (2,))
    window = (1, block)
    return jax.lax.reduce_window(values, start, operator, window, window, ((0, 0), (0, -size % block)))


def largest(
    values: Float32[jax.Array, "S n"], count: int
) -> tuple[Float32[jax.Array, "S {count}"], Int32[jax.Array, "S {count}"]]:
    """The `count` largest of each row: (values, ids), the lower id first of equals.

    They lie in the `count` blocks with the largest maxima, so only those blocks are looked through.
    """
    size = values.shape[1]
    if size <= 2 * count * _BLOCK:
        return _top_k(values, count)
    _, blocks = _top_k(block_reduce(values, _BLOCK, jax.lax.max), count)
    blocks = jnp.sort(blocks, -1)  # in order of ids, so that equals stay in it
    ids = (blocks[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)).reshape(values.shape[0], -1)
    found = jnp.take_along_axis(values, jnp.minimum(ids, size - 1), -1)
    # Past the end, the last value comes up again; its own place is before those, so it must not be found there.
    top, places = _top_k(jnp.where(ids < size, found, -jnp.inf), count)
    # A row of -inf or NaN may still have found places past the end.
    return top, jnp.minimum(jnp.take_along_axis(ids, places, -1), size - 1)


def _top_k(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    values = jnp.where(values == 0, 0.0, values)  # top_k puts -0 below 0, where a maximum takes either
    # The barriers keep XLA's CPU compiler from merging a later slice into top_k, which turns it into a full sort. One
    # barrier for both crashes it where the program is for several devices (jax 0.10.2).
    top, places = jax.lax.top_k(values, count)
    return jax.lax.optimization_barrier(top), jax.lax.optimization_barrier(places)


def floor(
    logits: Float32[jax.Array, "S V"],
    weigh: Callable[[jax.Array], jax.Array],
    top_k: Int32[jax.Array, " S"],
    top_p: Float32[jax.Array, " S"],
) -> Float32[jax.Array, "S 1"]:
    """The logit that a token needs to stay under top_k, and under top_p over what top_k leaves; exact.

    Tokens as likely as the last one that stays, stay; where both are off, it is -inf.

    Args:
      weigh: from logits [S, n] to their unnormalised probabilities, of the same order, 0 for -inf.
      top_k: 0 is off; top_p: 1 is off.
    """
    vocab = logits.shape[1]
    has_k, has_p = (top_k > 0)[:, None], (top_p < 1)[:, None]
    k = jnp.where(has_k, jnp.minimum(top_k[:, None], vocab), 1).astype(jnp.float32)

    def left(kth):
        return jnp.where(logits >= kth, weigh(logits), 0.0)

    def share(weights):
        return jnp.where(has_p, top_p[:, None] * _total(weights), 0.0)

    top, _ = largest(logits, min(FEW, vocab))
    few_kth, has_kth = _reach(top, jnp.ones_like(top), k, 0.0)
    few_kth = jnp.where(has_k, few_kth, -jnp.inf)
    few_pth, has_pth = _reach(top, weigh(top), share(left(few_kth)), 0.0)
    has_pth = has_pth & has_kth | ~has_p

    def search_kth():
        lowest = jnp.full_like(few_kth, -jnp.inf)
        found = _search(logits, 1.0, jnp.ones_like, k, lowest, top[:, -1:], has_kth)
        return jnp.where(has_kth, few_kth, found)

    kth = once_if(~has_kth.all(), search_kth, few_kth)

    def search_pth():
        weights = left(kth)
        # Where the k-th was among the few, it is known that the few do not hold the share.
        high = jnp.where(has_kth, top[:, -1:], top[:, :1])
        found = _search(logits, weights, weigh, share(weights), kth, high, has_pth)
        return jnp.where(has_pth, few_pth, found)

    pth = once_if(~has_pth.all(), search_pth, few_pth)
    return jnp.where(has_p, jnp.maximum(kth, pth), kth)  # rounding may have put a share near 1 below the k-th


def once_if(condition: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
    """What `compute` returns if the condition holds, without its cost if it does not.

    A loop of one turn, since XLA's CPU compiler gives a conditional's branches one thread.
    """
    _, result = jax.lax.while_loop(lambda s: s[0], lambda _: (jnp.bool(False), compute()), (condition, otherwise))
    return result


def _total(parts: Float32[jax.Array, "S n"]) -> Float32[jax.Array, "S 1"]:
    """Sum of each row, in two levels for the sake of rounding."""
    return block_reduce(parts, 128, jax.lax.add).sum(-1, keepdims=True)


def _reach(
    top: Float32[jax.Array, "S n"],
    parts: Float32[jax.Array, "S n"],
    target: Float32[jax.Array, "S 1"],
    above: Float32[jax.Array, "S 1"] | float,
) -> tuple[Float32[jax.Array, "S 1"], Bool[jax.Array, "S 1"]]:
    """The first of descending values at which the parts so far reach the target, and whether one does."""
    reached = above + jnp.cumsum(parts, -1) >= target
    first = jnp.take_along_axis(top, jnp.argmax(reached, -1, keepdims=True), -1)
    return first, reached.any(-1, keepdims=True)


class _Bracket(NamedTuple):
    """Bounds of a logit, each [S, 1]: the parts of logits >= low reach the target, those of logits >= high do not."""

    low: jax.Array  # as ordered integers
    high: jax.Array
    low_sum: jax.Array
    high_sum: jax.Array


def _search(
    logits: Float32[jax.Array, "S V"],
    parts: Float32[jax.Array, "S V"] | float,
    weigh: Callable[[jax.Array], jax.Array],
    target: Float32[jax.Array, "S 1"],
    low: Float32[jax.Array, "S 1"],
    high: Float32[jax.Array, "S 1"],
    done: Bool[jax.Array, "S 1"],
) -> Float32[jax.Array, "S 1"]:
    """The largest logit of each row such that the parts of the logits from there on reach the target.

    Args:
      parts: what each counts, or one number for all.
      weigh: from logits to parts: rising.
      low / high: the least and the most that the logit can be.
      done: rows that need no search, and get any value.
    """

    def reached(key):
        return _total(jnp.where(logits >= _unordered(key), parts, 0.0))

    def is_close(state):
        # Each part of the bracket is as large as one at `low`, which bounds how many there are.
        few = FEW * weigh(_unordered(state.low))
        return (state.low_sum - state.high_sum <= few) | (state.low + 1 >= state.high)

    def step(state):
        middle = (state.low & state.high) + ((state.low ^ state.high) >> 1)
        total = reached(middle)
        enough = total >= target
        moves = ~(done | is_close(state))  # a row that is done stays, however long the others take
        up, down = moves & enough, moves & ~enough
        return _Bracket(
            low=jnp.where(up, middle, state.low),
            high=jnp.where(down, middle, state.high),
            low_sum=jnp.where(up, total, state.low_sum),
            high_sum=jnp.where(down, total, state.high_sum),
        )

    key = _ordered(high)
    above = jnp.where(key == 0, _ordered(jnp.full_like(target, _SMALLEST_NORMAL)), key + 1)
    start = _Bracket(_ordered(low), above, jnp.full_like(target, jnp.inf), reached(above))
    end = jax.lax.while_loop(lambda state: ~(done | is_close(state)).all(), step, start)
    top, _ = largest(jnp.where(logits < _unordered(end.high), logits, -jnp.inf), min(FEW, logits.shape[1]))
    found, has_found = _reach(top, weigh(top), target, end.high_sum)
    return jnp.where(has_found, found, _unordered(end.low))


# A CPU under XLA takes subnormal numbers for zero in comparisons, so the search does it everywhere.


def _ordered(x: jax.Array) -> jax.Array:
    """int32 with the order of the floats; the two zeros and the subnormal numbers are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(keys: jax.Array) -> jax.Array:
    x = jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0.0, x)
