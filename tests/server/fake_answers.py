"""The answers of the fake engine.

It says the prompt again and again: generated token i is `prompt[i % len(prompt)]`, with logprob -(i % 8) / 4. Tokens
are the bytes of UTF-8, 256 ends the sequence. So "ab" answers "ababab...", and a prompt that holds 256 ends there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent

EOS = 256
VOCAB_SIZE = 257

Sink = Callable[[list[TokenEvent]], None]


@dataclass
class Running:
    """A request, and how much of its answer has been said."""

    request: Request
    sink: Sink
    generated: int = 0
    cached: int = 0

    def advance(self) -> TokenEvent:
        """The event of the next token."""
        prompt, sampling = self.request.prompt, self.request.sampling
        index, token = self.generated, prompt[self.generated % len(prompt)]
        self.generated += 1
        reason = None
        if token == EOS and not sampling.ignore_eos:
            reason = FinishReason.EOS
        elif token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif self.generated == sampling.max_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(
            self.request.request_id,
            token_ids=(token,),
            logprobs=(-(index % 8) / 4,),
            top_logprobs=(alternatives(index, sampling.logprobs),) if sampling.logprobs else (),
            prompt_logprobs=_scores(self.request) if index == 0 else (),
            finish_reason=reason,
            cached_tokens=self.cached,
            started=time.monotonic() if index == 0 else None,
            embedding=_embedding(self.request) if index == 0 else (),
        )

    def ending(self, reason: FinishReason, error: str | None) -> TokenEvent:
        """The last event, without a token."""
        return TokenEvent(self.request.request_id, finish_reason=reason, error=error)


def _scores(request: Request) -> tuple[tuple[float, Alternatives | None], ...]:
    count = request.sampling.prompt_logprobs
    if count is None:
        return ()
    return tuple((-i / 4, alternatives(i, count) if count else None) for i in range(1, len(request.prompt)))


def alternatives(position: int, count: int) -> Alternatives:
    """The likeliest tokens that the fake engine reports: position, position + 1, ..., each 1/8 less likely."""
    return Alternatives(tuple((position + i) % VOCAB_SIZE for i in range(count)), tuple(-i / 8 for i in range(count)))


def _embedding(request: Request) -> tuple[float, ...]:
    """Tells of the prompt's length and its pooling."""
    if request.pooling is None:
        return ()
    return (4.0 * len(request.prompt), {"last": 3.0, "mean": -3.0}[request.pooling] * len(request.prompt))
