"""Speculative decoding: how many tokens of which rows are drafted, so that one iteration may yield several.

A drafted row's chunk holds its newest token and k drafted ones, and a token is chosen after each of them by the very
rule, and with the very random number, that would choose it anyway (`sampler`). Those chosen after drafts that were
chosen themselves are the request's: its tokens are those of a run without drafts, greedy or sampled. (For a draft that
is certain of itself this is the rejection sampling of Leviathan et al., arXiv:2211.17192.)

What drafts cost is the step to a larger bucket, and a row whose tokens are not known cannot be drafted for: the host
waits for the iteration in flight and launches nothing ahead of it. What they bring is an expectation, from how often
the row's drafts came true lately; whether they were checked by the device or only written down makes no difference to
that, so a row that is not worth drafting for is noticed, at no cost, when it becomes so.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.buckets import BucketLadder
from jaxserve.ngrams import NgramIndex

_FIRST_CHANCE = 0.5  # of a row's first drafted token
_MEMORY = 8  # drafted tokens over which a row's chance is a running mean
_HANDOVER_MS = 1.0  # what an iteration takes longer when none is launched ahead of it


class Proposer(Protocol):
    """What drafts for one request."""

    def propose(self, most: int) -> Sequence[int]:
        """Tokens, at most so many, that may follow those known."""
        ...


class Guesses:
    """What one request's next tokens may be, and how often that came true.

    Attributes:
      chance: that a drafted token is chosen, given that those before it were.
    """

    __slots__ = ("_at", "_most", "_proposer", "_tokens", "chance", "latest")

    def __init__(self, tokens: list[int], proposer: Proposer, most: int) -> None:
        """Args:
        tokens: the request's known tokens; its owner goes on appending to them.
        most: tokens to guess.
        """
        self._tokens = tokens
        self._proposer = proposer
        self._most = most
        self._at = 0
        self.latest: Sequence[int] = ()
        self.chance = _FIRST_CHANCE

    def look(self) -> Sequence[int]:
        """Judges the last guess by the tokens known by now, and guesses what follows them."""
        tokens = self._tokens
        if self._at == len(tokens):
            return self.latest
        for guessed, token in zip(self.latest, tokens[self._at :], strict=False):
            hit = guessed == token
            self.chance += (hit - self.chance) / _MEMORY
            if not hit:
                break
        self._at = len(tokens)
        self.latest = self._proposer.propose(self._most)
        return self.latest


class Candidate(NamedTuple):
    """A row that could be drafted for.

    Attributes:
      most: tokens it has drafts for.
      chance: of each, given that those before it are chosen.
      begin: that the first can be chosen at all: 1 unless it depends on a token that is not known yet.
    """

    most: int
    chance: float
    begin: float = 1.0


class Speculation:
    """Shares what an iteration has room for among rows that could be drafted for, if that pays.

    Attributes:
      most: tokens drafted for a row at most.
    """

    def __init__(
        self,
        ladder: BucketLadder,
        *,
        most: int,
        max_points: int,
        waits: bool,
        propose: Callable[[Sequence[int]], Proposer] = NgramIndex,
    ) -> None:
        """Args:
        max_points: tokens that one iteration can choose (`iteration.max_points`).
        waits: whether nothing is launched ahead of a drafted iteration; otherwise other rows are, and drafts cost
          no such wait.
        propose: makes what drafts for the request of these tokens.
        """
        self.most = most
        self._ladder = ladder
        self._max_points = max_points
        self._handover = _HANDOVER_MS if waits else 0.0
        self._propose = propose

    def guesses(self, tokens: list[int]) -> Guesses:
        """What is guessed for a request of these tokens."""
        return Guesses(tokens, self._propose(tokens), self.most)

    def lengths(self, candidates: Sequence[Candidate], rows: int, budget: int) -> list[int]:
        """Tokens to draft for each candidate: what yields the most tokens a millisecond; all 0 where nothing does.

        Every bucket is filled up with the drafts likeliest to be chosen.

        Args:
          rows: that decode, candidates or not.
          budget: most tokens of the iteration.
        """
        sizes, prices = self._ladder.sizes, self._ladder.prices
        lengths = best = [0] * len(candidates)
        index = min(bisect_left(sizes, rows), len(sizes) - 1)
        most = min(self._max_points, budget)
        expected, tokens, rate = float(rows), rows, rows / prices[index]
        likeliest = [(-each.begin * each.chance, where) for where, each in enumerate(candidates) if each.most > 0]
        heapq.heapify(likeliest)
        for size, price in zip(sizes[index:], prices[index:], strict=True):
            lengths = lengths.copy()
            while likeliest and tokens < min(size, most):
                gain, where = likeliest[0]
                expected -= gain
                tokens += 1
                lengths[where] += 1
                if lengths[where] < candidates[where].most:
                    heapq.heapreplace(likeliest, (gain * candidates[where].chance, where))
                else:
                    heapq.heappop(likeliest)
            if expected / (price + self._handover) > rate:
                rate, best = expected / (price + self._handover), lengths
            if not likeliest or tokens >= most:
                break
        return best
