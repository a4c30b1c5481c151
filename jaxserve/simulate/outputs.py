"""Applies a simulated iteration's results: the plain case of `scheduler.outputs`, cheaper."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.iteration import Chunk, IterationResult
from jaxserve.request import TokenEvent
from jaxserve.scheduler.outputs import OutputProcessor, ScoredRange
from jaxserve.scheduler.state import RequestState

_TOKEN = (0,)


class SimulatedOutputs(OutputProcessor):
    """Does `OutputProcessor`'s work for requests without drafts, scores, grammars, logprobs.

    An event that does not end its request says no more than that a token has come.
    """

    def __init__(
        self,
        events: dict[str, TokenEvent],
        result: IterationResult,
        drafts: Sequence[int],
        eos_token_ids: frozenset[int],
    ) -> None:
        """Takes `OutputProcessor`'s arguments, and live requests' events, which are made once."""
        assert not drafts
        self._events, self._tokens, self._eos, self._entry = events, result.tokens, eos_token_ids, 0

    def skip(self, chunk: Chunk) -> None:
        """Skip a chunk whose request has ended."""
        self._entry += 1

    def take(
        self, state: RequestState, chunk: Chunk, scores: ScoredRange | None, *, withdrawn: bool
    ) -> tuple[TokenEvent | None, int, int]:
        """Apply the result of one chunk (see `OutputProcessor.take`)."""
        _, start, length, samples = chunk
        entry = self._entry
        self._entry = entry + 1
        if not samples:
            return None, start + length, 0
        token, tokens = int(self._tokens[entry]), state.tokens
        tokens.append(token)
        if token or len(tokens) == state.limit:
            reason = state.finish_reason(token, self._eos)
            return TokenEvent(state.name, _TOKEN, finish_reason=reason), start + length, 0
        event = self._events.get(state.name)
        if event is None:
            event = self._events[state.name] = TokenEvent(state.name, _TOKEN)
        return event, start + length, 0
