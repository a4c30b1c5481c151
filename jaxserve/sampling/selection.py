"""Selects the likeliest tokens (top_k, top_p) exactly and without sorting the vocabulary.

A full sort of 8 x 32,000 floats takes 45 ms on two CPU cores, a pass over them 0.05 ms. So the largest few are searched
in the blocks with the largest maxima only. If a threshold (top_k, top_p) lies below those few, a bisection narrows it,
one pass per step, until only a few tokens remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

FEW = 64  # tokens that are sorted to find a threshold

_BLOCK = 32  # ids per block when searching for the largest few
_LANES = 128  # numbers of a row of a TPU's memory tile
_SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


def block_reduce(
    values: Float32[jax.Array, "S n"], block: int, operator: Callable[[Any, Any], Any]
) -> Float32[jax.Array, "S blocks"]:
    """Reduces each run of `block` values; the last run may be shorter.

    Args:
      operator: jax.lax.add or jax.lax.max.
    """
    start = np.float32(0.0 if operator is jax.lax.add else -np.inf)
    rows, size = values.shape
    if size % block:
        window = (1, block)
        return jax.lax.reduce_window(values, start, operator, window, window, ((0, 0), (0, -size % block)))

    def by_rows(values):
        return jax.lax.reduce(values.reshape(rows, -1, block), start, operator, (2,))

    def by_tiles(values):
        return jax.lax.reduce(_tiles(values), start, operator, (3,)).swapaxes(1, 2).reshape(rows, -1)

    return jax.lax.platform_dependent(values, **{"tpu": by_tiles} if block == _LANES else {}, default=by_rows)


def _tiles(values: Float32[jax.Array, "S n"]) -> Float32[jax.Array, "a tiles b 128"]:
    """The tiles of [S, n] in a TPU's memory, in their order: a TPU copies nothing to have them."""
    rows, size = values.shape
    height = math.gcd(rows, 8)
    return values.reshape(-1, height, size // _LANES, _LANES).swapaxes(1, 2)


def largest(
    values: Float32[jax.Array, "S n"], count: int, key: Callable[[jax.Array], jax.Array] = lambda values: values
) -> tuple[Float32[jax.Array, "S {count}"], Int32[jax.Array, "S {count}"]]:
    """The `count` largest keys of each row: (keys, ids), the lower id first of equals.

    They lie in the `count` blocks with the largest maxima, so only those blocks are searched.

    Args:
      key: maps values [S, m] to keys, each by itself.
    """
    size = values.shape[1]
    if size <= 2 * count * _BLOCK:
        return _top_k(key(values), count)
    has_tiles = size % _LANES == 0 and size > 2 * count * _LANES
    by_tiles = {"tpu": partial(_largest_by_tiles, count=count, key=key)} if has_tiles else {}
    return jax.lax.platform_dependent(values, **by_tiles, default=partial(_largest_by_blocks, count=count, key=key))


def _largest_by_blocks(values: jax.Array, count: int, key: Callable[[Any], Any]) -> tuple[jax.Array, jax.Array]:
    size = values.shape[1]
    _, blocks = _top_k(block_reduce(key(values), _BLOCK, jax.lax.max), count)
    blocks = jnp.sort(blocks, -1)  # in order of ids, which top_k keeps for equals
    ids = (blocks[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)).reshape(values.shape[0], -1)
    found = key(jnp.take_along_axis(values, jnp.minimum(ids, size - 1), -1))
    # Places past the end repeat the last value, which must be found at its own place only.
    top, places = _top_k(jnp.where(ids < size, found, -jnp.inf), count)
    # A row of -inf or NaN can still find places past the end.
    return top, jnp.minimum(jnp.take_along_axis(ids, places, -1), size - 1)


def _largest_by_tiles(values: jax.Array, count: int, key: Callable[[Any], Any]) -> tuple[jax.Array, jax.Array]:
    """Blocks of 128 for TPUs, which read them as they lie."""
    row, tiles = np.arange(len(values))[:, None], _tiles(values)
    _, blocks = _top_k(block_reduce(key(values), _LANES, jax.lax.max), count)
    blocks = jnp.sort(blocks, -1)
    found = tiles[row // tiles.shape[2], blocks, row % tiles.shape[2]].reshape(len(values), -1)
    top, places = _top_k(key(found), count)
    block = jnp.take_along_axis(blocks, places // _LANES, -1)
    return top, block * _LANES + places % _LANES


def _top_k(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    values = jnp.where(values == 0, 0.0, values)  # top_k puts -0 below 0; a maximum does not
    # The barriers keep XLA's CPU compiler from merging a later slice into top_k, which turns it into a full sort. One
    # barrier for both crashes it where the program is for several devices (jax 0.10.2).
    top, places = jax.lax.top_k(values, count)
    return jax.lax.optimization_barrier(top), jax.lax.optimization_barrier(places)


def threshold(
    logits: Float32[jax.Array, "S V"],
    weigh: Callable[[jax.Array], jax.Array],
    top_k: Int32[jax.Array, " S"],
    top_p: Float32[jax.Array, " S"],
) -> Float32[jax.Array, "S 1"]:
    """The smallest logit that top_k, and top_p over the tokens that top_k keeps, keep; exact.

    Tokens as likely as the last kept one are kept. -inf if both are off.

    Args:
      weigh: maps logits [S, n] to unnormalised probabilities; monotone, 0 for -inf.
      top_k: 0 is off; top_p: 1 is off.
    """
    vocab = logits.shape[1]
    has_k, has_p = (top_k > 0)[:, None], (top_p < 1)[:, None]
    k = jnp.where(has_k, jnp.minimum(top_k[:, None], vocab), 1).astype(jnp.float32)

    def left(kth, logits):
        return jnp.where(logits >= kth, weigh(logits), 0.0)

    def share(kth):
        return jnp.where(has_p, top_p[:, None] * total(left(kth, logits)), 0.0)

    top, _ = largest(logits, min(FEW, vocab))
    few_kth, has_kth = first_reaching(top, jnp.ones_like(top), k, 0.0)
    few_kth = jnp.where(has_k, few_kth, -jnp.inf)
    few_pth, has_pth = first_reaching(top, weigh(top), share(few_kth), 0.0)
    has_pth = has_pth & has_kth | ~has_p

    def search_kth():
        lowest = jnp.full_like(few_kth, -jnp.inf)
        found = _search(logits, lambda: 1.0, jnp.ones_like, k, lowest, top[:, -1:], has_kth)
        return jnp.where(has_kth, few_kth, found)

    kth = compute_if(~has_kth.all(), search_kth, few_kth)

    def search_pth():
        # If the k-th logit is among the few, the share lies below the few.
        high = jnp.where(has_kth, top[:, -1:], top[:, :1])
        found = _search(logits, in_passes(partial(left, kth), logits), weigh, share(kth), kth, high, has_pth)
        return jnp.where(has_pth, few_pth, found)

    pth = compute_if(~has_pth.all(), search_pth, few_pth)
    return jnp.where(has_p, jnp.maximum(kth, pth), kth)  # rounding can put a share near 1 below the k-th


def compute_if(condition: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
    """Returns `compute()` if the condition holds, else `otherwise` without computing.

    A loop of at most one iteration: XLA's CPU compiler runs the branches of a conditional on one thread.
    """
    _, result = jax.lax.while_loop(lambda s: s[0], lambda _: (jnp.bool(False), compute()), (condition, otherwise))
    return result


def in_passes(parts: Callable[[jax.Array], jax.Array], logits: jax.Array) -> Callable[[], jax.Array]:
    """parts(logits) for several passes over all logits: computed once on a CPU.

    Accelerators compute them in each pass, which takes no longer than to read them, and have no memory for them.
    """
    held = jax.lax.platform_dependent(logits, cpu=parts, default=lambda logits: logits)

    def anew(logits: jax.Array) -> jax.Array:
        # Without the barrier XLA would compute them before a loop, or once for all passes.
        return parts(jax.lax.optimization_barrier(logits))

    return lambda: jax.lax.platform_dependent(held, cpu=lambda parts: parts, default=anew)


def total(parts: Float32[jax.Array, "S n"]) -> Float32[jax.Array, "S 1"]:
    """Sum of each row, in two levels to reduce rounding errors."""
    return block_reduce(parts, 128, jax.lax.add).sum(-1, keepdims=True)


def first_reaching(
    top: Float32[jax.Array, "S n"],
    parts: Float32[jax.Array, "S n"],
    target: Float32[jax.Array, "S 1"],
    above: Float32[jax.Array, "S 1"] | float,
) -> tuple[Float32[jax.Array, "S 1"], Bool[jax.Array, "S 1"]]:
    """(value, found) of the first descending value at which the sum of parts reaches the target."""
    reached = above + jnp.cumsum(parts, -1) >= target
    first = jnp.take_along_axis(top, jnp.argmax(reached, -1, keepdims=True), -1)
    return first, reached.any(-1, keepdims=True)


class _Bracket(NamedTuple):
    """Bounds of a threshold, each [S, 1].

    The parts of logits >= low reach the target, those of logits >= high do not.
    """

    low: jax.Array  # as ordered integers
    high: jax.Array
    low_sum: jax.Array
    high_sum: jax.Array


def _search(
    logits: Float32[jax.Array, "S V"],
    parts: Callable[[], jax.Array | float],
    weigh: Callable[[jax.Array], jax.Array],
    target: Float32[jax.Array, "S 1"],
    low: Float32[jax.Array, "S 1"],
    high: Float32[jax.Array, "S 1"],
    done: Bool[jax.Array, "S 1"],
) -> Float32[jax.Array, "S 1"]:
    """The largest logit of each row such that the parts of logits >= it reach the target.

    Args:
      parts: gives the part of each logit, or one number for all.
      weigh: from logits to parts; monotone.
      low / high: bounds of the result.
      done: rows that need no search; their result is arbitrary.
    """

    def reached(key):
        return total(jnp.where(logits >= _unordered(key), parts(), 0.0))

    def is_close(state):
        # Each part in the bracket is at least as large as one at `low`, which bounds their number.
        few = FEW * weigh(_unordered(state.low))
        return (state.low_sum - state.high_sum <= few) | (state.low + 1 >= state.high)

    def step(state):
        middle = (state.low & state.high) + ((state.low ^ state.high) >> 1)
        amount = reached(middle)
        enough = amount >= target
        moves = ~(done | is_close(state))  # a finished row stays as it is
        up, down = moves & enough, moves & ~enough
        return _Bracket(
            low=jnp.where(up, middle, state.low),
            high=jnp.where(down, middle, state.high),
            low_sum=jnp.where(up, amount, state.low_sum),
            high_sum=jnp.where(down, amount, state.high_sum),
        )

    key = _ordered(high)
    above = jnp.where(key == 0, _ordered(jnp.full_like(target, _SMALLEST_NORMAL)), key + 1)
    start = _Bracket(_ordered(low), above, jnp.full_like(target, jnp.inf), reached(above))
    end = jax.lax.while_loop(lambda state: ~(done | is_close(state)).all(), step, start)
    high = _unordered(end.high)
    top, _ = largest(logits, min(FEW, logits.shape[1]), lambda logits: jnp.where(logits < high, logits, -jnp.inf))
    found, has_found = first_reaching(top, weigh(top), target, end.high_sum)
    return jnp.where(has_found, found, _unordered(end.low))


# XLA compares subnormal numbers as zero on a CPU, so the search treats them as zero everywhere.


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of the floats; both zeros and all subnormal numbers are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(keys: jax.Array) -> jax.Array:
    x = jax.lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0.0, x)
