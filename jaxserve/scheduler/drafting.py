"""Adds drafted tokens to a plan: chooses the rows and extends their blocks."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.iteration import Chunk, SamplerVariant
from jaxserve.scheduler.plan_builder import PlanBuilder
from jaxserve.scheduler.requests import RequestTable
from jaxserve.scheduler.row_parts import Pool
from jaxserve.scheduler.speculation import DraftCandidate, DraftRequest, Speculation
from jaxserve.scheduler.state import RequestState

_NOTHING = DraftCandidate(0, 0.0)


class Drafting:
    """Adds drafts to the rows of a scheduler's plans.

    Attributes:
      speculation: decides how many tokens to draft for each row.
    """

    def __init__(self, speculation: Speculation, pool: Pool) -> None:
        self.speculation = speculation
        self._pool = pool

    def is_next(self, requests: RequestTable, max_rows: int, budget: int) -> bool:
        """Whether the next plan should carry drafts: no prompt can go into it, and drafts pay."""
        if not requests.running or requests.num_preempted:
            return False
        first = requests.waiting.first() if requests.free_rows else None
        if first is not None and self._pool.can_admit(first.allocation, requests.samples.shared_prefix(first)):
            return False
        return self.pays(requests.running[:max_rows], budget)

    def pays(self, states: Sequence[RequestState], budget: int) -> bool:
        """Whether an iteration that decodes these requests should carry drafts.

        The answer holds for the time when the tokens in flight are known.

        Args:
          budget: most tokens of the iteration.
        """
        if not self.speculation.fits(len(states), budget):
            return False
        if any(state.length - state.computed > 1 for state in states):
            return False
        return any(self.speculation.lengths([self._candidate(state) for state in states], len(states), budget))

    def lengthen(self, builder: PlanBuilder, budget: int) -> None:
        """Add drafted tokens to the decodes. No request is preempted for them."""
        speculation, states, chunks = self.speculation, builder.states, builder.chunks
        if not speculation.fits(len(states), budget):
            return
        candidates = [_NOTHING if state.in_flight else self._candidate(state) for state in states]
        lengths = speculation.lengths(candidates, len(states), budget)
        if not any(lengths):
            return
        builder.states, builder.chunks = [], []
        long_states: list[RequestState] = []
        long_chunks: list[Chunk] = []
        wanted: list[DraftRequest] = []
        for state, chunk, most in zip(states, chunks, lengths, strict=True):
            length = self._cover(builder, state, chunk.start + 1, most) if most else 0
            if not length:
                builder.states.append(state)
                builder.chunks.append(chunk)
                continue
            assert state.drafts is not None
            if speculation.drafter is None:
                builder.drafts += state.drafts.latest[:length]
            else:
                wanted.append(DraftRequest(state.admission(), state.variant, state.drafts.computed, length))
            long_states.append(state)
            long_chunks.append(Chunk(chunk.row, chunk.start, 1 + length, 1 + length))
        builder.states += long_states
        builder.chunks += long_chunks
        if speculation.drafter is not None and wanted:
            for state, drafts in zip(long_states, speculation.drafter.draft(wanted), strict=True):
                assert state.drafts is not None
                state.drafts.set_draft(drafts)
                builder.drafts += drafts

    def _candidate(self, state: RequestState) -> DraftCandidate:
        """The request as a candidate, now or when its token in flight is known."""
        if state.variant == SamplerVariant.CONSTRAINED:  # grammar masks are known for one token only
            return _NOTHING
        if state.drafts is None:
            state.drafts = self.speculation.new_drafts(state.tokens)
        drafts = state.drafts
        most, unknown = drafts.refresh(), 0
        if self.speculation.drafter is None:  # n-gram drafts begin at the token in flight
            unknown = state.length - len(state.tokens)
        return DraftCandidate(
            min(most - unknown, state.limit - state.length - 1), drafts.acceptance, drafts.acceptance**unknown
        )

    def _cover(self, builder: PlanBuilder, state: RequestState, known: int, most: int) -> int:
        """Extend the blocks for up to `most` drafts after `known` positions; how many fit."""
        length = most
        while length and self._pool.shortage(state.allocation, known + length):
            length -= 1
        if length and known + length > state.allocation.capacity:  # earlier drafts may have extended it already
            index = len(state.allocation.blocks)
            self._pool.extend(state.allocation, known + length)
            builder.change_table(state, index)
        return length
