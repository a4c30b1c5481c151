"""Implements `Engine.generate`, `beam_search` and `stream` on top of `Engine.submit`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.generation import beam_search as beams
from jaxserve.generation import defaults
from jaxserve.generation.completion import Assembler, Completion, Delta
from jaxserve.generation.parsing import parse_request
from jaxserve.generation.samples import MAX_SAMPLES, PromptScores, best, expand_samples, without_fork_scores
from jaxserve.models.schema import ModelConfig
from jaxserve.request import Alternatives, FinishReason, Pooling, Request, Sink, TokenEvent
from jaxserve.sampling_params import SAMPLING_PARAMS
from jaxserve.scheduler.limits import Limits
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or the fields of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of a call that apply to all its prompts.

    Attributes:
      n / best_of: number of samples that are returned for each prompt, and that are generated (n by default). Those
        with the highest mean logprob are returned.
      priority / cache_salt: of the call's requests.
      timeout: seconds after which the call fails; None for no limit.
      pooling: makes embeddings of the prompts (see `Request`).
      fill_defaults: whether the checkpoint's defaults fill in each missing sampling parameter. Otherwise they apply
        only to requests without any sampling parameter.
    """

    n: int = 1
    best_of: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    pooling: Pooling | None = None
    fill_defaults: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("n", self.n, 1), ("best_of", self.drawn, self.n)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SAMPLES:
                raise InvalidRequest(name, f"is {value!r}; it must be a whole number from {least} to {MAX_SAMPLES}")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (number and self.timeout > 0):
            raise InvalidRequest("timeout", f"is {self.timeout!r}; it must be a number above 0, in seconds")

    @property
    def drawn(self) -> int:
        return self.n if self.best_of is None else self.best_of


class EngineProtocol(Protocol):
    """The part of the engine that these calls use."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    request_defaults: Mapping[str, Any]
    limits: Limits

    def start(self) -> None: ...
    def check(self, request: Request) -> None: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def abort(self, request_id: str) -> None: ...


def generate(
    engine: EngineProtocol,
    prompts: Mapping[str, Any] | Sequence[Prompt],
    sampling: Mapping[str, Any],
    options: CallOptions,
) -> list[Completion]:
    """Completions of all prompts, in order (see `Engine.generate`)."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    if options.drawn > options.n:
        sampling = {"logprobs": 0} | {name: value for name, value in sampling.items() if value is not None}
    requests = []
    for prompt in prompts:
        request = _request(engine, prompt, sampling, options)
        engine.check(request)
        requests += expand_samples(request, options.drawn, _new_name)
    scores = PromptScores(requests)
    assemblers = {r.request_id: _assembler(engine, r) for r in requests}
    engine.start()
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    deadline = _deadline(options)
    unsent, alive = list(reversed(requests)), set()
    # Twice the engine's rows keep it busy; submitting all at once could exceed the limits of its queue.
    most_alive = min(2 * engine.config.max_rows * engine.config.replicas, engine.config.max_queued_requests)
    try:
        while unsent or alive:
            while unsent and len(alive) < most_alive:
                if not _try_submit(engine, without_fork_scores(unsent[-1]), events.put, ours=len(alive)):
                    break
                alive.add(unsent.pop().request_id)
            for event in (each for own in _next_events(events, deadline) for each in scores.copy_to_forks(own)):
                assembler = assemblers[event.request_id]
                assembler.push(event)
                if assembler.finished and event.request_id in alive:
                    alive.remove(event.request_id)
                    if event.finish_reason is None:  # a stop string, which the engine cannot detect
                        engine.abort(event.request_id)
    finally:
        for request_id in alive:
            engine.abort(request_id)
    made = [assemblers[request.request_id].completion() for request in requests]
    by_prompt = (made[first : first + options.drawn] for first in range(0, len(made), options.drawn))
    return [each for samples in by_prompt for each in best(samples, options.n)]


def search(
    engine: EngineProtocol, prompt: Prompt, params: beams.BeamParams, sampling: Mapping[str, Any], options: CallOptions
) -> list[Completion]:
    """The best answers to one prompt (see `Engine.beam_search`)."""
    request = _request(engine, prompt, sampling, options, defaults.for_beam_search(engine.request_defaults))
    engine.check(request)
    eos = engine.model_config.eos_token_ids
    made = beams.BeamSearch(request, params, eos)
    engine.start()
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    deadline = _deadline(options)
    answers: dict[str, Alternatives | None] = {}
    try:
        while not made.is_finished:
            steps = made.requests(_new_name)
            answers = {step.request_id: None for step in steps}
            unsent, alive = list(reversed(steps)), 0
            while unsent or alive:
                while unsent and _try_submit(engine, unsent[-1], events.put, ours=alive):
                    unsent.pop()
                    alive += 1
                for event in _next_events(events, deadline):
                    if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
                        raise RuntimeError(event.error or "the request was ended")
                    answers[event.request_id] = event.top_logprobs[0]
                    alive -= 1
            made.take([answer for answer in answers.values() if answer is not None])
    finally:
        for name, answer in answers.items():
            if answer is None:
                engine.abort(name)
    return beams.completions(made, engine.tokenizer, eos)


async def stream(
    engine: EngineProtocol, prompt: Prompt, sampling: Mapping[str, Any], options: CallOptions
) -> AsyncIterator[Delta]:
    """Deltas of one completion (see `Engine.stream`)."""
    if isinstance(prompt, Mapping):  # it may be a chat, and rendering its template may take a second
        request = await asyncio.to_thread(_request, engine, prompt, sampling, options)
    else:
        request = _request(engine, prompt, sampling, options)
    assembler = _assembler(engine, request)
    if request.sampling.grammar is not None:
        await asyncio.to_thread(engine.check, request)  # compiles the grammar
    engine.start()
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()

    def sink(batch: list[TokenEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop was closed, so no caller is waiting
            loop.call_soon_threadsafe(events.put_nowait, batch)

    deadline = _deadline(options)
    engine.submit(request, sink)
    try:
        while not assembler.finished:
            left = None if deadline is None else deadline - time.monotonic()
            for event in await asyncio.wait_for(events.get(), left):
                yield assembler.push(event)
    finally:
        engine.abort(request.request_id)


def _try_submit(engine: EngineProtocol, request: Request, sink: Sink, *, ours: int) -> bool:
    """Submits a request; returns False if the queue is full of this call's own requests.

    Args:
      ours: live requests of the call. QueueFull is raised if there are none.
    """
    try:
        engine.submit(request, sink)
    except QueueFull:
        if not ours:
            raise
        return False
    return True


def _new_name() -> str:
    return uuid.uuid4().hex


def _deadline(options: CallOptions) -> float | None:
    """The time at which a call fails; None for no limit or one that is too long for a thread."""
    if options.timeout is None or options.timeout > threading.TIMEOUT_MAX:
        return None
    return time.monotonic() + options.timeout


def _next_events(events: queue.SimpleQueue[list[TokenEvent]], deadline: float | None) -> list[TokenEvent]:
    """Waits for the next events. Raises TimeoutError after the deadline."""
    try:
        return events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the timeout of the call has passed") from None


def _request(
    engine: EngineProtocol,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    options: CallOptions,
    checkpoint_defaults: Mapping[str, Any] | None = None,
) -> Request:
    if isinstance(prompt, Mapping):
        fields = {name: value for name, value in prompt.items() if value is not None}
    else:
        fields = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    given = {name: value for name, value in {**sampling, **fields}.items() if value is not None}
    checkpoint_defaults = engine.request_defaults if checkpoint_defaults is None else checkpoint_defaults
    request = parse_request(
        given,
        request_id=_new_name(),
        tokenizer=engine.tokenizer,
        priority=options.priority,
        arrival=time.monotonic(),
        cache_salt=options.cache_salt,
        defaults=checkpoint_defaults if options.fill_defaults or given.keys().isdisjoint(SAMPLING_PARAMS) else {},
        longest=engine.limits.longest,
    )
    return request if options.pooling is None else dataclasses.replace(request, pooling=options.pooling)


def _assembler(engine: EngineProtocol, request: Request) -> Assembler:
    return Assembler(request, engine.tokenizer, engine.model_config.eos_token_ids)
