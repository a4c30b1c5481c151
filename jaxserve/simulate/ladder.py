"""The bucket ladder that suits a given mix of iterations best, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np


def best_ladder(sizes: Mapping[int, int], cost: Callable[[int], float], count: int) -> tuple[int, ...]:
    """At most `count` buckets that serve all iterations at the least cost, each in the smallest bucket that holds it.

    best[k, j], the cost of all iterations of up to size j in k buckets of which j is the largest, is the minimum over
    i < j of best[k - 1, i] plus what those between i and j cost in bucket j.

    Args:
      sizes: tokens of an iteration -> how many iterations have as many.
      cost: of one iteration in a bucket of so many tokens; never falling.
      count: at least 1.
    """
    if not sizes or count < 1:
        raise ValueError(f"{len(sizes)} sizes and {count} buckets make no ladder; there must be one of each at least")
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
