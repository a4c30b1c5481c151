"""Sums over the calls that wait, by their place in the engine's order."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import NamedTuple

_RUN = 256  # most places in a run


class Work(NamedTuple):
    """What waiting calls bring.

    Attributes:
      tokens: of the prompts.
      answers: most tokens that the requests generate.
    """

    requests: int = 0
    tokens: int = 0
    answers: int = 0

    def plus(self, other: Work, times: float = 1) -> Work:
        """The sum with a multiple of another."""
        return Work(*(int(mine + times * theirs) for mine, theirs in zip(self, other, strict=True)))


Place = tuple[float, int]  # a key, and a number that no other call has
_LAST: Place = (inf, 0)  # after all calls


class WaitingCalls:
    """The calls of one tenant that wait, ordered by place, with their sums.

    Places are kept in short runs with a sum each, so an operation takes time with the square root of their number at
    the lengths that queues have.

    Attributes:
      total: of all calls.
    """

    def __init__(self) -> None:
        self.total = Work()
        self._works: dict[Place, Work] = {}
        self._runs: list[list[Place]] = [[]]
        self._sums = [Work()]

    def add(self, place: Place, work: Work) -> None:
        """Add a call."""
        at = self._run(place)
        insort(run := self._runs[at], place)
        self._works[place] = work
        self._change(at, work, 1)
        if len(run) > _RUN:
            self._runs[at : at + 1] = halves = [run[: _RUN // 2], run[_RUN // 2 :]]
            self._sums[at : at + 1] = [self._sum(half) for half in halves]

    def remove(self, place: Place) -> None:
        """Remove a call."""
        at = self._run(place)
        run = self._runs[at]
        del run[bisect_left(run, place)]
        self._change(at, self._works.pop(place), -1)
        if not run and len(self._runs) > 1:
            del self._runs[at], self._sums[at]

    def before(self, key: float) -> Work:
        """The sum of the calls with this key or a smaller one."""
        place = (key, 1 << 62)  # after all calls with the key
        at = self._run(place)
        run = self._runs[at]
        return self._sum(run[: bisect_left(run, place)], *self._sums[:at])

    def _run(self, place: Place) -> int:
        """The run for a place: the last that begins before it."""
        return max(bisect_left(self._runs, [place, _LAST]) - 1, 0)

    def _change(self, at: int, work: Work, sign: int) -> None:
        self._sums[at] = self._sums[at].plus(work, sign)
        self.total = self.total.plus(work, sign)

    def _sum(self, run: list[Place], *sums: Work) -> Work:
        return Work(*map(sum, zip(Work(), *sums, *(self._works[place] for place in run), strict=True)))
