"""Speculative decoding: how many tokens of which rows are drafted, so that one iteration may yield several.

A drafted row's chunk holds its newest token and k drafted ones, and a token is chosen after each of them by the very
rule, and with the very random number, that would choose it anyway (`sampler`). Those chosen after drafts that were
chosen themselves are the request's: its tokens are those of a run without drafts, greedy or sampled. (For a draft that
is certain of itself this is the rejection sampling of Leviathan et al., arXiv:2211.17192.)

What drafts cost is the step to a larger bucket and what makes them, and a row whose tokens are not known cannot be
drafted for: the host waits for the iteration in flight and launches nothing ahead of it. What they bring is an
expectation, from how often the row's drafts came true lately. Look-up costs nothing, so there it makes no difference
whether the device checked them or they were only written down, and a row that was not worth drafting for is noticed as
soon as it is. A model's drafts are tried again after a while.
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

_FIRST_CHANCE = 0.5  # of a row's first drafted token
_MEMORY = 8  # drafted tokens over which a row's chance is a running mean
_FORGETTING = 64  # tokens without drafts after which a row's chance is mostly the first one again
_HANDOVER_MS = 1.0  # what an iteration takes longer when none is launched ahead of it


class Proposer(Protocol):
    """What drafts for one request, at no cost."""

    def propose(self, most: int) -> Sequence[int]:
        """Tokens, at most so many, that may follow those known."""
        ...


class Wanted(NamedTuple):
    """Drafts that a model is to make for a row.

    Attributes:
      admission: the row, all of its known tokens, its blocks and how its tokens are chosen.
      variant: of the sampler that chooses so.
      computed: leading tokens whose keys the model has.
      length: tokens to draft.
    """

    admission: Admission
    variant: SamplerVariant
    computed: int
    length: int


class Drafter(Protocol):
    """A model that drafts for several rows at once."""

    def cost_ms(self, rows: int) -> float:
        """Milliseconds to draft one token for each of so many rows."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The drafted tokens of each row."""
        ...


class Guesses:
    """What one request's next tokens may be, and how often that came true.

    Attributes:
      chance: that a drafted token is chosen, given that those before it were.
      latest: the last guess.
      computed: leading tokens whose keys a drafting model has.
    """

    __slots__ = ("_at", "_most", "_proposer", "_tokens", "chance", "computed", "latest")

    def __init__(self, tokens: list[int], proposer: Proposer | None, most: int) -> None:
        """Args:
        tokens: the request's known tokens; its owner goes on appending to them.
        proposer: None where guesses are made by a model, when asked for.
        most: tokens to guess.
        """
        self._tokens = tokens
        self._proposer = proposer
        self._most = most
        self._at = len(tokens) if proposer is None else 0
        self.latest: Sequence[int] = ()
        self.chance = _FIRST_CHANCE
        self.computed = 0

    def look(self) -> int:
        """Judges the last guess by the tokens known by now; how many can be guessed of what follows them."""
        tokens = self._tokens
        if self._at < len(tokens):
            right = 0
            for guessed, token in zip(self.latest, tokens[self._at :], strict=False):
                hit = guessed == token
                self.chance += (hit - self.chance) / _MEMORY
                if not hit:
                    break
                right += 1
            if self._proposer is not None:
                self.latest = self._proposer.propose(self._most)
            elif self.latest:
                self.computed = min(self.computed, self._at + right)
                self.latest = ()
            else:
                self.chance += (_FIRST_CHANCE - self.chance) / _FORGETTING
            self._at = len(tokens)
        return self._most if self._proposer is None else len(self.latest)

    def take(self, drafts: Sequence[int]) -> None:
        """A model's guess at what follows the known tokens; it has the keys of all but the last of them now."""
        self.latest = drafts
        self.computed = len(self._tokens) + len(drafts) - 1


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
      drafter: the model that drafts; None where tokens are looked up.
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
        """Args:
        most: tokens drafted for a row at most.
        max_points: tokens that one iteration can choose (`iteration.max_points`).
        waits: whether nothing is launched ahead of a drafted iteration; otherwise other rows are, and drafts cost
          no such wait.
        propose: makes what drafts for the request of these tokens, where no model does.
        """
        self.drafter = drafter
        self._most = most
        self._ladder = ladder
        self._max_points = max_points
        self._handover = _HANDOVER_MS if waits else 0.0
        self._propose = propose

    def guesses(self, tokens: list[int]) -> Guesses:
        """What is guessed for a request of these tokens."""
        return Guesses(tokens, self._propose(tokens) if self.drafter is None else None, self._most)

    def has_room(self, rows: int, budget: int) -> bool:
        """Whether an iteration in which so many rows decode could carry a draft."""
        return rows < min(self._max_points, budget, self._ladder.largest)

    def lengths(self, candidates: Sequence[Candidate], rows: int, budget: int) -> list[int]:
        """Tokens to draft for each candidate: what yields the most tokens a millisecond; all 0 where nothing does.

        The drafts likeliest to be chosen come first.

        Args:
          rows: that decode, candidates or not.
          budget: most tokens of the iteration.
        """
        sizes, costs = self._ladder.sizes, self._ladder.costs_ms
        likeliest = [(-each.begin * each.chance, where) for where, each in enumerate(candidates) if each.most > 0]
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
                heapq.heapreplace(likeliest, (gain * candidates[where].chance, where))
            else:
                heapq.heappop(likeliest)
            if rows + len(order) > sizes[index]:
                index += 1
            now = expected / (costs[index] + self._handover + longest * step)
            if now > rate:
                rate, best = now, len(order)
        counts = Counter(order[:best])
        return [counts[where] for where in range(len(candidates))]
