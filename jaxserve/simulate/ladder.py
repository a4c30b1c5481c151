"""Finds the best bucket ladder for a given mix of iterations, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np


def best_ladder(sizes: Mapping[int, int], cost: Callable[[int], float], count: int) -> tuple[int, ...]:
    """The ladder of at most `count` buckets that serves all iterations at the least cost.

    Each iteration takes the smallest bucket that holds it. best[k, j] is the cost of all iterations of up to size j
    in k buckets, of which j is the largest. It is the minimum over i < j of best[k - 1, i] plus the cost in bucket j of
    the iterations between i and j.

    Args:
      sizes: tokens of an iteration -> number of such iterations.
      cost: cost of one iteration by bucket size; it never falls.
      count: at least 1.
    """
    if not sizes or count < 1:
        raise ValueError(f"{len(sizes)} sizes and {count} buckets make no ladder; both must be at least 1")
    points = sorted(sizes)
    prices = np.array([cost(size) for size in points])
    upto = np.concatenate([[0], np.cumsum([sizes[size] for size in points])])
    best = prices * upto[1:]  # one bucket for all up to j
    steps: list[np.ndarray] = []
    for _ in range(min(count, len(points)) - 1):
        # way[i, j]: the bucket before j is i
        way = best[:, None] + prices[None, :] * (upto[None, 1:] - upto[1:, None])
        way[np.tril_indices(len(points))] = np.inf
        before = way.argmin(0)
        found = way[before, np.arange(len(points))]
        steps.append(np.where(found < best, before, -1))
        best = np.minimum(best, found)
    chosen, last = [points[-1]], len(points) - 1
    for step in reversed(steps):
        if step[last] >= 0:
            last = int(step[last])
            chosen.append(points[last])
    return tuple(sorted(chosen))
