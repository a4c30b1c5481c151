"""Speculative decoding: decides how many tokens to draft for which rows.

A drafted row's chunk holds its newest token and k drafted ones. The sampler chooses a token after each of them, by the
same rule and with the same random number as without drafts. The request keeps the tokens chosen after accepted drafts,
so its tokens are those of a run without drafts, greedy or sampled. (For a draft with probability 1 this is the
rejection sampling of Leviathan et al., arXiv:2211.17192.)

Drafts cost the step to a larger bucket and the time to make them. They also need the row's newest token, so the host
waits for the iteration in flight and launches nothing ahead of it. Their gain is an expectation: the row's acceptance
rate of late. N-gram lookup costs nothing, so the rate is updated whether or not the device checked the drafts, and a
row that becomes worth drafting for is noticed at once. A draft model is tried again after a while.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.iteration import Admission, SamplerVariant
from jaxserve.scheduler.buckets import BucketLadder
from jaxserve.scheduler.ngrams import NgramIndex

_FIRST_ACCEPTANCE = 0.5  # assumed for a row before its first draft
_MEMORY = 8  # drafted tokens over which a row's acceptance is a running mean
_FORGETTING = 64  # tokens without drafts after which a row's acceptance is mostly the assumed one again
_HANDOVER_MS = 1.0  # how much longer an iteration takes if none is launched ahead of it


class Proposer(Protocol):
    """Drafts tokens for one request, at no cost."""

    def propose(self, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow the known ones."""
        ...


class DraftRequest(NamedTuple):
    """Drafts that a model must make for a row.

    Attributes:
      admission: the row, all of its known tokens, its blocks and its sampling parameters.
      variant: the sampler variant of the row.
      computed: leading tokens whose keys the draft model has.
      length: tokens to draft.
    """

    admission: Admission
    variant: SamplerVariant
    computed: int
    length: int


class Drafter(Protocol):
    """A model that drafts for several rows at once."""

    def cost_ms(self, rows: int) -> float:
        """Milliseconds to draft one token for each of `rows` rows."""
        ...

    def draft(self, wanted: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafted tokens of each row."""
        ...


class RequestDrafts:
    """The drafts of one request, and how many of them were accepted lately.

    Attributes:
      acceptance: probability that a drafted token is accepted, given that those before it were.
      latest: the last draft.
      computed: leading tokens whose keys a draft model has.
    """

    __slots__ = ("_at", "_most", "_proposer", "_tokens", "acceptance", "computed", "latest")

    def __init__(self, tokens: list[int], proposer: Proposer | None, most: int) -> None:
        """
        Args:
          tokens: the request's known tokens; its owner keeps appending to them.
          proposer: None if a model makes the drafts.
          most: most tokens to draft.
        """
        self._tokens = tokens
        self._proposer = proposer
        self._most = most
        self._at = len(tokens) if proposer is None else 0
        self.latest: Sequence[int] = ()
        self.acceptance = _FIRST_ACCEPTANCE
        self.computed = 0

    def refresh(self) -> int:
        """Update the acceptance by the tokens known now; how many can be drafted next."""
        tokens = self._tokens
        if self._at < len(tokens):
            right = 0
            for drafted, token in zip(self.latest, tokens[self._at :], strict=False):
                hit = drafted == token
                self.acceptance += (hit - self.acceptance) / _MEMORY
                if not hit:
                    break
                right += 1
            if self._proposer is not None:
                self.latest = self._proposer.propose(self._most)
            elif self.latest:
                self.computed = min(self.computed, self._at + right)
                self.latest = ()
            else:
                self.acceptance += (_FIRST_ACCEPTANCE - self.acceptance) / _FORGETTING
            self._at = len(tokens)
        return self._most if self._proposer is None else len(self.latest)

    def set_draft(self, drafts: Sequence[int]) -> None:
        """Store a model's draft. The model now has the keys of all its tokens but the last."""
        self.latest = drafts
        self.computed = len(self._tokens) + len(drafts) - 1


class DraftCandidate(NamedTuple):
    """A row that drafts could be made for.

    Attributes:
      most: most tokens to draft for it.
      acceptance: probability that each is accepted, given that those before it are.
      reach: probability that the first is reached; 1 unless it depends on a token that is not known yet.
    """

    most: int
    acceptance: float
    reach: float = 1.0


class Speculation:
    """Shares the free tokens of an iteration among rows that could have drafts, if that pays.

    Attributes:
      drafter: the draft model; None with n-gram lookup.
    """

    def __init__(
        self,
        ladder: BucketLadder,
        *,
        most: int,
        max_points: int,
        waits: bool,
        propose: Callable[[list[int]], Proposer] = NgramIndex,
        drafter: Drafter | None = None,
    ) -> None:
        """
        Args:
          most: most tokens drafted for a row.
          max_points: tokens that one iteration can sample (`iteration.max_points`).
          waits: whether nothing is launched ahead of a plan with drafts. If not, other rows are launched, and drafts
            cost no such wait.
          propose: makes the proposer for a request with these tokens, if there is no draft model.
        """
        self.drafter = drafter
        self._most = most
        self._ladder = ladder
        self._max_points = max_points
        self._handover = _HANDOVER_MS if waits else 0.0
        self._propose = propose

    def new_drafts(self, tokens: list[int]) -> RequestDrafts:
        """An empty draft history for a request with these tokens."""
        return RequestDrafts(tokens, self._propose(tokens) if self.drafter is None else None, self._most)

    def fits(self, rows: int, budget: int) -> bool:
        """Whether an iteration that decodes `rows` rows could carry a draft."""
        return rows < min(self._max_points, budget, self._ladder.largest)

    def lengths(self, candidates: Sequence[DraftCandidate], rows: int, budget: int) -> list[int]:
        """The number of tokens to draft for each candidate.

        It maximises the expected tokens per millisecond.
        The drafts most likely to be accepted come first. All lengths are 0 if no draft pays.

        Args:
          rows: rows that decode, candidates or not.
          budget: most tokens of the iteration.
        """
        sizes, costs = self._ladder.sizes, self._ladder.costs_ms
        likeliest = [(-each.reach * each.acceptance, where) for where, each in enumerate(candidates) if each.most > 0]
        if not likeliest:
            return [0] * len(candidates)
        heapq.heapify(likeliest)
        step = 0.0 if self.drafter is None else self.drafter.cost_ms(len(likeliest))
        index = min(bisect_left(sizes, rows), len(sizes) - 1)
        expected, rate = float(rows), rows / costs[index]
        lengths, order = [0] * len(candidates), []
        longest = best = 0
        while likeliest and rows + len(order) < min(self._max_points, budget, sizes[-1]):
            gain, where = likeliest[0]
            expected -= gain
            order.append(where)
            lengths[where] += 1
            longest = max(longest, lengths[where])
            if lengths[where] < candidates[where].most:
                heapq.heapreplace(likeliest, (gain * candidates[where].acceptance, where))
            else:
                heapq.heappop(likeliest)
            if rows + len(order) > sizes[index]:
                index += 1
            now = expected / (costs[index] + self._handover + longest * step)
            if now > rate:
                rate, best = now, len(order)
        counts = Counter(order[:best])
        return [counts[where] for where in range(len(candidates))]
