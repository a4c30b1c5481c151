"""N-gram baselines of the demo model, on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def unigram_loss(train: np.ndarray, test: np.ndarray, vocab_size: int) -> float:
    """Mean -log p over test[1:] of add-one smoothed token frequencies. Natural logarithm."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts[test[1:]] / counts.sum()).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """One order of the model; n-grams are sorted integers, the first token most significant."""

    grams: np.ndarray
    discounted: np.ndarray  # count less discount, per n-gram
    contexts: np.ndarray
    totals: np.ndarray  # sum of counts, per context
    freed: np.ndarray  # sum of discounts, per context


class KneserNey:
    """Interpolated modified Kneser-Ney of a given order, ended by the uniform distribution.

    Three discounts an order, estimated from the counts of counts; lower orders count distinct predecessors (Chen and
    Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998, section 3).
    """

    def __init__(self, train: np.ndarray, vocab_size: int, order: int) -> None:
        if vocab_size**order >= 2**63:
            raise ValueError(f"order {order} over {vocab_size} tokens does not fit 64-bit n-grams")
        self._vocab_size = vocab_size
        grams, counts = np.unique(self._windows(train, order), return_counts=True)
        self._orders = [self._order(grams, counts)]
        for length in range(order - 1, 0, -1):
            grams, counts = np.unique(grams % vocab_size**length, return_counts=True)
            self._orders.insert(0, self._order(grams, counts))

    def _windows(self, stream: np.ndarray, length: int) -> np.ndarray:
        """int64[len(stream) - length + 1]: every run of `length` tokens as one number."""
        last = len(stream) - length + 1
        windows = np.zeros(last, np.int64)
        for i in range(length):
            windows = windows * self._vocab_size + stream[i : i + last]
        return windows

    def _order(self, grams: np.ndarray, counts: np.ndarray) -> _Order:
        n1, n2, n3, n4 = (max(int((counts == n).sum()), 1) for n in (1, 2, 3, 4))
        rate = n1 / (n1 + 2 * n2)
        steps = [0.0, 1 - 2 * rate * n2 / n1, 2 - 3 * rate * n3 / n2, 3 - 4 * rate * n4 / n3]
        # The estimates of a tiny text may leave the range; what is freed must not vanish, or unseen tokens have p = 0.
        discounts = np.clip(steps, [0.0, 0.1, 0.1, 0.1], [0.0, 1.0, 2.0, 3.0])[np.minimum(counts, 3)]
        contexts, member = np.unique(grams // self._vocab_size, return_inverse=True)
        return _Order(
            grams=grams,
            discounted=counts - discounts,
            contexts=contexts,
            totals=np.bincount(member, counts),
            freed=np.bincount(member, discounts),
        )

    def probabilities(self, stream: np.ndarray) -> np.ndarray:
        """float64[len(stream) - 1]: p of each token but the first, given order - 1 before it."""
        found = np.full(len(stream) - 1, 1 / self._vocab_size)
        for length, order in enumerate(self._orders, start=1):
            windows = self._windows(stream, length)[1 if length == 1 else 0 :]
            context, has_context = _find(order.contexts, windows // self._vocab_size)
            gram, has_gram = _find(order.grams, windows)
            lower = found[max(length - 2, 0) :]
            counted = np.where(has_gram, order.discounted[gram], 0)
            seen = (counted + order.freed[context] * lower) / order.totals[context]
            found[max(length - 2, 0) :] = np.where(has_context, seen, lower)
        return found

    def loss(self, stream: np.ndarray) -> float:
        """Mean -log p over stream[1:]. Natural logarithm."""
        return float(-np.log(self.probabilities(stream)).mean())


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place of each key in the sorted table, whether it is there)."""
    place = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return place, table[place] == keys
