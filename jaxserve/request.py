"""A request and what comes back of it: plain values, no jax."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxserve.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]  # of the prompt's hidden states


class FinishReason(enum.Enum):
    """Why a request ended. The first three are answers; the others are endings without one."""

    LENGTH = "length"
    EOS = "eos"
    STOP = "stop"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def is_answer(self) -> bool:
        """Whether the request was answered."""
        return self not in (FinishReason.ABORTED, FinishReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client's generation.

    Attributes:
      request_id: unique among the requests alive in an engine.
      prompt: token ids.
      priority: higher goes first among the tenant's requests; one step outweighs `order.PRIORITY_SECONDS` of waiting.
      arrival: monotonic seconds at which it was taken in.
      tenant: whom its tokens count for; tenants take turns at the device.
      share: the tenant's weight relative to others.
      cache_salt: requests share prefix blocks only under the same salt.
      fork_of: id of a request with the very same prompt, submitted before: another sample of it, that takes over the
        prompt's keys and values once somebody has computed them. None computes them itself.
      pooling: makes the prompt's embedding: of its last token's hidden state, or the mean of all; None makes none.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    tenant: str = ""
    share: float = 1.0
    cache_salt: str = ""
    fork_of: str | None = None
    pooling: Pooling | None = None

    @property
    def max_length(self) -> int:
        """Most tokens, prompt and generated, that this request may come to hold."""
        return len(self.prompt) + self.sampling.max_tokens


class Alternatives(NamedTuple):
    """The likeliest tokens of one position, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class TokenEvent(NamedTuple):
    """What one iteration did for one request.

    Attributes:
      token_ids: tokens generated in this iteration (none while a prompt is being scored, or at an abort).
      logprobs: the model's logprob of each of them.
      top_logprobs: alternatives of each of them; empty unless asked for.
      prompt_logprobs: for scored prompt tokens in order, (logprob, alternatives); the first prompt token has none and
        is left out. Empty unless asked for.
      finish_reason: None while the request goes on.
      cached_tokens: prompt tokens served from the prefix cache, or taken over from another sample of the prompt.
      started: monotonic seconds at which it was first given a row; in its first event only.
      error: what went wrong, with FinishReason.ERROR.
      field: the request's field that is at fault for it, if one is.
      embedding: float32[hidden_size] with the first token, if asked for: the prompt's hidden states after the last
        norm, pooled.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    prompt_logprobs: tuple[tuple[float, Alternatives | None], ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    started: float | None = None
    error: str | None = None
    field: str | None = None
    embedding: tuple[float, ...] = ()

    def by_token(self) -> list[TokenEvent]:
        """The same as events of at most one token each."""
        if len(self.token_ids) < 2:
            return [self]
        first, *rest = [
            TokenEvent(self.request_id, (token,), self.logprobs[at : at + 1], self.top_logprobs[at : at + 1])
            for at, token in enumerate(self.token_ids)
        ]
        alone = {"token_ids": first.token_ids, "logprobs": first.logprobs, "top_logprobs": first.top_logprobs}
        rest[-1] = rest[-1]._replace(finish_reason=self.finish_reason)
        return [self._replace(**alone, finish_reason=None), *rest]


Sink = Callable[[list[TokenEvent]], None]  # takes events of one iteration, those of all its requests together
