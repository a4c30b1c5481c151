"""Drafted tokens in the scheduler's plans: for which rows, and over which blocks."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.iteration import Chunk, SamplerVariant
from jaxserve.scheduler.kv_blocks import SlotPool
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.speculation import Candidate, Speculation, Wanted
from jaxserve.scheduler.state import RequestState

_NOTHING = Candidate(0, 0.0)


class Drafting:
    """Drafts for the rows of a scheduler.

    Attributes:
      speculation: finds where they pay.
    """

    def __init__(self, speculation: Speculation, pool: SlotPool) -> None:
        self.speculation = speculation
        self._pool = pool

    def pays(self, states: Sequence[RequestState], budget: int) -> bool:
        """Whether drafts are worth an iteration's while in which these decode, once the tokens in flight are known.

        Args:
          budget: most tokens of the iteration.
        """
        if not self.speculation.has_room(len(states), budget):
            return False
        if any(state.length - state.computed > 1 for state in states):
            return False
        return any(self.speculation.lengths([self._candidate(state) for state in states], len(states), budget))

    def lengthen(self, builder: PlanBuilder, budget: int) -> None:
        """Lengthen the decodes by drafted tokens, for which nobody has to give up blocks."""
        speculation, states, chunks = self.speculation, builder.states, builder.chunks
        if not speculation.has_room(len(states), budget):
            return
        candidates = [_NOTHING if state.in_flight else self._candidate(state) for state in states]
        lengths = speculation.lengths(candidates, len(states), budget)
        if not any(lengths):
            return
        builder.states, builder.chunks = [], []
        long_states: list[RequestState] = []
        long_chunks: list[Chunk] = []
        wanted: list[Wanted] = []
        for state, chunk, most in zip(states, chunks, lengths, strict=True):
            length = self._cover(builder, state, chunk.start + 1, most) if most else 0
            if not length:
                builder.states.append(state)
                builder.chunks.append(chunk)
                continue
            assert state.guesses is not None
            if speculation.drafter is None:
                builder.drafts += state.guesses.latest[:length]
            else:
                wanted.append(Wanted(state.admission(), state.variant, state.guesses.computed, length))
            long_states.append(state)
            long_chunks.append(Chunk(chunk.row, chunk.start, 1 + length, 1 + length))
        builder.states += long_states
        builder.chunks += long_chunks
        if speculation.drafter is not None and wanted:
            for state, drafts in zip(long_states, speculation.drafter.draft(wanted), strict=True):
                assert state.guesses is not None
                state.guesses.take(drafts)
                builder.drafts += drafts

    def _candidate(self, state: RequestState) -> Candidate:
        """A row to be drafted for, now or when the token in flight is known: the first guess is at that one then."""
        if state.variant == SamplerVariant.CONSTRAINED:  # whose masks are known for one token only
            return _NOTHING
        if state.guesses is None:
            state.guesses = self.speculation.guesses(state.tokens)
        guesses = state.guesses
        most, unknown = guesses.look(), 0
        if self.speculation.drafter is None:  # what is looked up begins at the token in flight
            unknown = state.length - len(state.tokens)
        return Candidate(min(most - unknown, state.limit - state.length - 1), guesses.chance, guesses.chance**unknown)

    def _cover(self, builder: PlanBuilder, state: RequestState, known: int, most: int) -> int:
        """Cover as many drafts after `known` positions as the pool has room for; how many."""
        length = most
        while length and self._pool.shortage(state.allocation, known + length):
            length -= 1
        if length and known + length > state.allocation.capacity:  # which drafts before may have left large enough
            index = len(state.allocation.blocks)
            self._pool.extend(state.allocation, known + length)
            builder.change_table(state, index)
        return length
