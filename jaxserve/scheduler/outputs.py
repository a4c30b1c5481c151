"""Applies an iteration's results to its requests: new tokens, events and finish reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.iteration import Chunk, IterationResult
from jaxserve.request import Alternatives, FinishReason, TokenEvent
from jaxserve.scheduler.state import RequestState


class ScoredRange(NamedTuple):
    """Prompt positions first..last that one chunk scores.

    The logits of flat token `flat` of the plan score position `first`.
    """

    first: int
    last: int
    flat: int


class OutputProcessor:
    """Reads the result of one iteration, chunk by chunk in the order of the plan."""

    def __init__(self, result: IterationResult, drafts: Sequence[int], eos_token_ids: frozenset[int]) -> None:
        """
        Args:
          drafts: the plan's drafted tokens.
        """
        self._result, self._drafts, self._eos = result, drafts, eos_token_ids
        self._tokens, self._logprobs = result.tokens.tolist(), result.logprobs.tolist()
        self._entry = self._drafted = 0  # where the next chunk's entries begin in the result and in the drafts

    def skip(self, chunk: Chunk) -> None:
        """Skip a chunk whose request has ended."""
        self._entry += chunk.samples or 1
        if chunk.samples > 1:
            self._drafted += chunk.samples - 1

    def take(
        self, state: RequestState, chunk: Chunk, scores: ScoredRange | None, *, withdrawn: bool
    ) -> tuple[TokenEvent | None, int, int]:
        """Apply the result of one chunk.

        Args:
          scores: the prompt positions that the chunk scored, if any.
          withdrawn: whether the plan's sample after this chunk was withdrawn.

        Returns:
          The event, or None if there is nothing to report; the number of positions that are now computed; the number
          of accepted drafts.
        """
        _, start, length, samples = chunk
        entry, drafted = self._entry, self._drafted
        self.skip(chunk)
        computed = start + (length if samples < 2 else 1)
        if withdrawn:  # the last token is computed again later, so its block is not complete yet
            samples, computed = 0, computed - 1
        scored = () if scores is None else _prompt_logprobs(state, scores, self._result)
        if not samples:
            event = TokenEvent(state.name, (), (), (), scored, None, state.cached) if scored else None
            return event, computed, 0
        if math.isnan(self._logprobs[entry]):
            return _failure(state, f"the model's logits for position {computed} are not finite"), computed, 0
        end = self._result.grammar_ends.get(entry) if self._result.grammar_ends else None
        if end is not None and end.problem is not None:
            told = len(state.tokens) - len(state.request.prompt)
            return _failure(state, f"{end.field}: after {told} tokens {end.problem}", end.field), computed, 0
        token = self._tokens[entry]
        state.tokens.append(token)
        reason = state.finish_reason(token, self._eos)
        if end is not None and reason in (None, FinishReason.LENGTH):
            reason = FinishReason.EOS  # the grammar allows no other token
        accepted = 0
        if samples > 1:
            accepted, reason = self._accept(state, reason, entry, self._drafts[drafted : drafted + samples - 1])
        last = entry + 1 + accepted
        tokens, logprobs = tuple(self._tokens[entry:last]), tuple(self._logprobs[entry:last])
        top = _top_logprobs(state, entry, last, self._result) if state.request.sampling.logprobs else ()
        event = TokenEvent(state.name, tokens, logprobs, top, scored, reason, state.cached)
        return event, computed + accepted, accepted

    def _accept(
        self, state: RequestState, reason: FinishReason | None, entry: int, drafts: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """Append the tokens sampled after drafts, up to the first draft that was not sampled itself.

        Args:
          reason: why the token before the drafts is the last one, if it is.
          entry: the result entry of that token; those of the drafts follow it.

        Returns:
          The number of accepted drafts, and why the last token is the last one, if it is.
        """
        accepted = 0
        for draft in drafts:
            following = entry + accepted + 1
            if reason is not None or draft != self._tokens[following - 1] or math.isnan(self._logprobs[following]):
                break
            accepted += 1
            state.tokens.append(self._tokens[following])
            reason = state.finish_reason(self._tokens[following], self._eos)
        state.length += accepted
        state.computed += accepted
        return accepted, reason


def _failure(state: RequestState, error: str, field: str | None = None) -> TokenEvent:
    return TokenEvent(state.name, finish_reason=FinishReason.ERROR, error=error, field=field)


def _top_logprobs(state: RequestState, first: int, end: int, result: IterationResult) -> tuple[Alternatives, ...]:
    """The top alternatives of the tokens in these entries of the result."""
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    most = state.request.sampling.logprobs
    return tuple(
        Alternatives(tuple(result.top_ids[entry, :most].tolist()), tuple(result.top_logprobs[entry, :most].tolist()))
        for entry in range(first, end)
    )


def _prompt_logprobs(
    state: RequestState, scores: ScoredRange, result: IterationResult
) -> tuple[tuple[float, Alternatives | None], ...]:
    """(logprob, alternatives) of each prompt token that a chunk scored."""
    assert result.score_logprobs is not None
    count = scores.last - scores.first + 1
    entries = slice(scores.flat, scores.flat + count)
    logprobs = result.score_logprobs[entries].tolist()
    most = state.request.sampling.prompt_logprobs
    if not most:
        return tuple((logprob, None) for logprob in logprobs)
    assert result.score_top_ids is not None
    assert result.score_top_logprobs is not None
    ids = result.score_top_ids[entries, :most].tolist()
    tops = result.score_top_logprobs[entries, :most].tolist()
    return tuple((logprob, Alternatives(tuple(i), tuple(t))) for logprob, i, t in zip(logprobs, ids, tops, strict=True))
