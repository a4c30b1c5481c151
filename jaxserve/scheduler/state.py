"""The scheduler's state of one live request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import Admission, IterationResult, SamplerVariant
from jaxserve.request import FinishReason, Request, Sink, TokenEvent
from jaxserve.scheduler.block_allocation import BlockAllocation
from jaxserve.scheduler.routing import OutstandingTokens
from jaxserve.scheduler.speculation import RequestDrafts

if TYPE_CHECKING:
    from jaxserve.scheduler.parallel_samples import ParallelSamples
    from jaxserve.scheduler.tenants import TenantQueue


class Phase(enum.IntEnum):
    """The phase of a request between submission and its end."""

    WAITING = 0  # it has no row yet
    RUNNING = 1
    PREEMPTED = 2  # its blocks are released; it returns to the queue when its last chunk in flight has landed
    FINISHING = 3  # its last token is in flight
    ENDED = 4


@dataclass(slots=True, eq=False)
class Caller:
    """Who submitted a request to an engine loop, and what the loop counts for it.

    Attributes:
      started: monotonic seconds at which the request first got a row, until an event has told the caller.
    """

    sink: Sink
    outstanding: OutstandingTokens
    started: float | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One request between submit and its end.

    Attributes:
      key: position in every queue; the smallest is first.
      tokens: known tokens, prompt first; the allocation holds the same list.
      limit: most tokens it may hold.
      stop_ids: tokens that end it.
      row: -1 if it has none.
      computed: positions whose iteration is launched.
      length: known tokens plus tokens being sampled; a chunk that ends here samples.
      in_flight: launched chunks that have not landed.
      scored: last prompt position whose logprob a launched iteration computes; 0 before any.
      score_end: last prompt position to be scored; 0 if none is.
      to_pool / pool_end: the next prompt position to be pooled into the embedding, and their end; 0 if none is.
      embedding: the sum of the hidden states pooled so far, float64[hidden_size]; None before any.
      has_fetched: whether blocks of its prefix were brought from the host since it was last without blocks.
      cached: prompt tokens found in the prefix cache when it first began.
      drafts: its draft history, once drafts were considered for it.
      tenant: whose turn it takes; set when the request is added.
      samples: the group of requests with the same prompt that it shares keys and values with, if any.
      caller: who submitted it to the engine loop, if one runs the scheduler. Only the loop reads it.
    """

    name: str
    request: Request
    tokens: list[int]
    allocation: BlockAllocation
    limit: int
    stop_ids: frozenset[int]
    variant: SamplerVariant
    length: int
    score_end: int
    key: tuple[float, int] = (0.0, 0)
    phase: Phase = Phase.WAITING
    row: int = -1
    computed: int = 0
    in_flight: int = 0
    scored: int = 0
    to_pool: int = 0
    pool_end: int = 0
    embedding: np.ndarray | None = None
    has_begun: bool = False
    has_fetched: bool = False
    cached: int = 0
    drafts: RequestDrafts | None = None
    samples: ParallelSamples | None = None
    caller: Caller | None = None
    tenant: TenantQueue = field(init=False)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar limits its tokens."""
        return self.variant == SamplerVariant.CONSTRAINED

    @classmethod
    def of(
        cls,
        request: Request,
        eos_token_ids: frozenset[int],
        allocation: BlockAllocation | None = None,
        caller: Caller | None = None,
    ) -> RequestState:
        """The state of a new request; its key is to be set.

        Args:
          allocation: a result of `allocation_of`, if the request's prompt was looked up before.
        """
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else eos_token_ids
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        if sampling.grammar is not None:
            variant = SamplerVariant.CONSTRAINED
        elif sampling.is_penalised or sampling.is_typical or sampling.logprobs:
            variant = SamplerVariant.FULL
        else:
            variant = SamplerVariant.TRUNCATED if sampling.is_truncated else SamplerVariant.PLAIN
        allocation = allocation or allocation_of(request)
        tokens = allocation.tokens
        return cls(
            name=request.request_id,
            request=request,
            tokens=tokens,
            allocation=allocation,
            limit=request.max_length,
            stop_ids=stop_ids,
            variant=variant,
            length=len(tokens),
            score_end=len(tokens) - 1 if sampling.prompt_logprobs is not None else 0,
            to_pool=len(tokens) - 1 if request.pooling == "last" else 0,
            pool_end=0 if request.pooling is None else len(tokens),
            caller=caller,
        )

    def admission(self) -> Admission:
        """What the device needs to know when the request takes its row."""
        return Admission(
            row=self.row,
            request_id=self.name,
            tokens=tuple(self.tokens),
            prompt_length=len(self.request.prompt),
            blocks=tuple(max(block, 0) for block in self.allocation.entries()),  # those not held are never read
            sampling=self.request.sampling,
            endings=tuple(self.stop_ids) if self.request.sampling.min_tokens else (),
        )

    def add_pooled(self, result: IterationResult, index: int, event: TokenEvent | None) -> TokenEvent | None:
        """Add a range of the prompt to the embedding, which the event with the first token then has."""
        assert result.pooled is not None
        states = result.pooled[index].astype(np.float64)
        self.embedding = states = states if self.embedding is None else self.embedding + states
        if event is None or not event.token_ids:
            return event
        count = 1 if self.request.pooling == "last" else self.pool_end
        return event._replace(embedding=tuple((states / count).tolist()))

    def finish_reason(self, token: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why `token`, just appended, is the last one; None if it is not."""
        if token in self.stop_ids:
            is_eos = token in eos_token_ids and not self.request.sampling.ignore_eos
            return FinishReason.EOS if is_eos else FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) == self.limit else None


StateEvent = tuple[RequestState, TokenEvent]  # what an iteration did for a request, and whose state it is


def allocation_of(request: Request) -> BlockAllocation:
    """The empty block allocation of a new request.

    A prompt with scores or a mean of all tokens takes no prefix hits: it is computed whole.
    """
    return BlockAllocation(
        tokens=list(request.prompt),
        max_length=request.max_length,
        prompt_length=len(request.prompt),
        salt=request.cache_salt,
        takes_hits=(request.sampling.prompt_logprobs is None and request.pooling != "mean") or len(request.prompt) == 1,
    )


def check_fits(request: Request, max_context: int, n_slots: int) -> None:
    """Raise InvalidRequest, naming the field and what would fit, if `request` could never run."""
    prompt = len(request.prompt)
    if not prompt:
        raise InvalidRequest("prompt", "is empty; give at least one token")
    limit, what = min((max_context, "a request may hold"), (n_slots, "the pool holds"))
    if prompt >= limit:
        raise InvalidRequest("prompt", f"has {prompt} tokens; {what} {limit}, so at most {limit - 1} fit")
    if request.max_length > limit:
        raise InvalidRequest(
            "max_tokens",
            f"is {request.sampling.max_tokens} after a prompt of {prompt} tokens; {what} {limit}, "
            f"so at most {limit - prompt} fit",
        )
