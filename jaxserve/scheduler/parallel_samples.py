"""Samples of one prompt: one of them computes it, and the others take its keys and values over.

The prompt's full blocks become theirs too (counted by references). The block in which the prompt ends is written by
everybody who goes on from there, so they get a copy of it (copy on write, as in PagedAttention, Kwon et al., SOSP'23,
section 4.4), made on the device before the first of their iterations. What is left to compute for each is the prompt's
last token, whose logits choose the first of its own.

Nobody is a leader for good. Whoever is let in first computes the prompt; the others stand aside until that is launched,
so that those who wait behind them are not held up, and then stand where they stood before. If the first one is
preempted or ends too early, the next one is let in to compute it.
"""

from __future__ import annotations

from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.kv_blocks import Source
from jaxserve.scheduler.state import FINISHING, RUNNING, RequestState
from jaxserve.scheduler.waiting import WaitingQueue


class ParallelSamples:
    """Live requests of one prompt.

    Attributes:
      aside: those that wait for another's keys and values, and in no queue.
    """

    __slots__ = ("aside", "members", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[RequestState] = []
        self.aside: list[RequestState] = []

    @property
    def is_computing(self) -> bool:
        """Whether somebody has been let in who computes the prompt."""
        return any(member.allocation.is_held and member.computed < _needed(member) for member in self.members)

    def source(self) -> RequestState | None:
        """Who has computed the most of the prompt, enough for the others, by iterations launched before this one."""
        able = (member for member in self.members if member.phase in (RUNNING, FINISHING))
        most = max(able, key=_prompt_computed, default=None)
        return most if most is not None and _prompt_computed(most) >= _needed(most) else None


class ParallelSampleGroups:
    """The families of a scheduler, and who of them stands aside."""

    def __init__(self, waiting: WaitingQueue[RequestState], *, boundary: int | None) -> None:
        """Args:
        waiting: where those who stand aside come from and go back to.
        boundary: keys and values are taken over up to a multiple of so many tokens only, and the rest computed; None
          takes all there is.
        """
        self._waiting = waiting
        self._boundary = boundary or 1
        self._named: dict[str, ParallelSamples] = {}
        self.num_aside = self.aside_tokens = 0

    def join(self, state: RequestState, first: RequestState | None) -> None:
        """Makes a request one of the family that is named after `first`, which may have ended.

        Raises:
          InvalidRequest: the prompts differ.
        """
        name = state.request.fork_of
        assert name is not None
        family = None if first is None else first.family
        family = family or self._named.get(name) or ParallelSamples(name)
        for member in [*family.members[:1], *(() if first is None else (first,))]:
            if member.request.prompt != state.request.prompt:
                raise InvalidRequest("fork_of", f"is {name!r}, a request of another prompt")
        self._named[family.name] = family
        if first is not None and first.family is None:
            _add(first, family)
        _add(state, family)

    def leave(self, state: RequestState) -> bool:
        """Has a request that ends leave its family; whether it stood aside."""
        family = state.family
        if family is None:
            return False
        family.members.remove(state)
        if not family.members:
            del self._named[family.name]
        if state not in family.aside:
            return False
        family.aside.remove(state)
        self._count(state, -1)
        return True

    def steps_aside(self, state: RequestState) -> bool:
        """Whether a request, first in the queue, has to wait for another's keys and values; it is taken out then."""
        family = state.family
        if family is None or not state.allocation.takes_hits or family.source() is not None or not family.is_computing:
            return False
        self._waiting.pop()
        family.aside.append(state)
        self._count(state, 1)
        return True

    def come_back(self) -> None:
        """Has those who stand aside wait in the queue again, where what they waited for is there or will not come."""
        if not self.num_aside:
            return
        for family in self._named.values():
            if family.aside and (family.source() is not None or not family.is_computing):
                for state in family.aside:
                    self._count(state, -1)
                    self._waiting.push(state)
                family.aside.clear()

    def source(self, state: RequestState) -> Source | None:
        """Where a request can take its first keys and values from, if anywhere."""
        family = state.family
        if family is None or not state.allocation.takes_hits:
            return None
        other = family.source()
        if other is None:
            return None
        length = min(_prompt_computed(other), len(state.tokens) - 1) // self._boundary * self._boundary
        return Source(other.allocation, length)

    def _count(self, state: RequestState, sign: int) -> None:
        self.num_aside += sign
        self.aside_tokens += sign * len(state.tokens)


def _add(state: RequestState, family: ParallelSamples) -> None:
    family.members.append(state)
    state.family = family


def _needed(state: RequestState) -> int:
    """Tokens of the prompt that others take over: its last one they compute themselves."""
    return len(state.request.prompt) - 1


def _prompt_computed(state: RequestState) -> int:
    """Without the last one, which may be computed once more."""
    return min(state.computed, _needed(state))
