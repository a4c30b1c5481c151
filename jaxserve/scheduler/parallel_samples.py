"""Parallel samples: requests with one prompt, which one of them computes for all.

The others share the prompt's full blocks (by reference counts). Every sample writes into the block in which the prompt
ends, so each gets a copy of it (copy on write, as in PagedAttention, Kwon et al., SOSP'23, section 4.4). The device
makes the copy before the sample's first iteration. Each sample then computes only the prompt's last token, whose logits
give its first token.

The first sample to be admitted computes the prompt. The others are deferred until those iterations are launched, so
that they do not block the requests behind them. Then they return to their places in the queue. If the first one is
preempted or ends too early, the next one computes the prompt.
"""

from __future__ import annotations

from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.block_allocation import SharedPrefix
from jaxserve.scheduler.state import Phase, RequestState
from jaxserve.scheduler.tenants import FairQueue


class ParallelSamples:
    """Live requests with one prompt.

    Attributes:
      deferred: members that wait for another member's keys and values. They are in no queue.
    """

    __slots__ = ("deferred", "members", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[RequestState] = []
        self.deferred: list[RequestState] = []

    @property
    def is_computing(self) -> bool:
        """Whether an admitted member still computes the prompt."""
        return any(member.allocation.is_held and member.computed < _needed(member) for member in self.members)

    def source(self) -> RequestState | None:
        """The member that has computed the most of the prompt, if that is enough to share."""
        able = (member for member in self.members if member.phase in (Phase.RUNNING, Phase.FINISHING))
        most = max(able, key=_prompt_computed, default=None)
        return most if most is not None and _prompt_computed(most) >= _needed(most) else None


class ParallelSampleGroups:
    """All groups of one scheduler, and which requests are deferred."""

    def __init__(self, waiting: FairQueue, *, boundary: int | None) -> None:
        """Args:
        waiting: the queue that deferred requests leave and return to.
        boundary: share keys and values up to a multiple of this many tokens; None shares all of them.
        """
        self._waiting = waiting
        self._boundary = boundary or 1
        self.named: dict[str, ParallelSamples] = {}
        self.num_deferred = self.deferred_tokens = 0

    def join(self, state: RequestState, first: RequestState | None) -> None:
        """Add a request to the group that is named after `first`, which may have ended.

        Raises:
          InvalidRequest: the prompts differ.
        """
        name = state.request.fork_of
        assert name is not None
        group = None if first is None else first.samples
        group = group or self.named.get(name) or ParallelSamples(name)
        for member in [*group.members[:1], *(() if first is None else (first,))]:
            if member.request.prompt != state.request.prompt:
                raise InvalidRequest("fork_of", f"is {name!r}, a request of another prompt")
        self.named[group.name] = group
        if first is not None and first.samples is None:
            _add(first, group)
        _add(state, group)

    def leave(self, state: RequestState) -> bool:
        """Remove a request that ends from its group. Returns whether it was deferred."""
        group = state.samples
        if group is None:
            return False
        group.members.remove(state)
        if not group.members:
            del self.named[group.name]
        if state not in group.deferred:
            return False
        group.deferred.remove(state)
        self._count(state, -1)
        return True

    def defer_first(self, state: RequestState) -> bool:
        """Defer the first request of the queue if it must wait for another's keys and values.

        Returns whether it did.
        """
        group = state.samples
        if group is None or not state.allocation.takes_hits or group.source() is not None or not group.is_computing:
            return False
        self._waiting.pop()
        group.deferred.append(state)
        self._count(state, 1)
        return True

    def resume_deferred(self) -> None:
        """Return deferred requests to the queue, if the prompt is computed or nothing computes it."""
        if not self.num_deferred:
            return
        for group in self.named.values():
            if group.deferred and (group.source() is not None or not group.is_computing):
                for state in group.deferred:
                    self._count(state, -1)
                    self._waiting.push(state)
                group.deferred.clear()

    def shared_prefix(self, state: RequestState) -> SharedPrefix | None:
        """The keys and values that a request can take over, if any."""
        group = state.samples
        if group is None or not state.allocation.takes_hits:
            return None
        other = group.source()
        if other is None:
            return None
        length = min(_prompt_computed(other), len(state.tokens) - 1) // self._boundary * self._boundary
        return SharedPrefix(other.allocation, length)

    def _count(self, state: RequestState, sign: int) -> None:
        self.num_deferred += sign
        self.deferred_tokens += sign * len(state.tokens)


def _add(state: RequestState, group: ParallelSamples) -> None:
    group.members.append(state)
    state.samples = group


def _needed(state: RequestState) -> int:
    """Prompt tokens that others take over: all but the last, which each computes itself."""
    return len(state.request.prompt) - 1


def _prompt_computed(state: RequestState) -> int:
    """Computed prompt tokens, except the last one, which may be computed again."""
    return min(state.computed, _needed(state))
