"""Calls from Python: prompts in, completions or a stream of deltas out, on top of `Engine.submit`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.generation import beam_search as beams
from jaxserve.generation import defaults
from jaxserve.generation.completion import Assembler, Completion, Delta
from jaxserve.generation.parsing import parse_request
from jaxserve.generation.samples import MAX_SAMPLES, PromptScores, best, for_engine, samples_of
from jaxserve.models.schema import ModelConfig
from jaxserve.request import Alternatives, FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SAMPLING_PARAMS
from jaxserve.scheduler.limits import Limits
from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or fields as an input line has them
Sink = Callable[[list[TokenEvent]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for a whole call.

    Attributes:
      n / best_of: samples of each prompt that are answered with, and that are drawn (n unless given): the best are
        those whose tokens are the likeliest on average.
      priority / cache_salt: of its requests.
      timeout: seconds after which it is given up; None waits for ever.
      fills_in: whether the checkpoint's defaults hold for each sampling parameter that is left out, rather than only
        where all are.
    """

    n: int = 1
    best_of: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    fills_in: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("n", self.n, 1), ("best_of", self.drawn, self.n)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SAMPLES:
                raise InvalidRequest(name, f"is {value!r}; it must be a whole number from {least} to {MAX_SAMPLES}")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (number and self.timeout > 0):
            raise InvalidRequest("timeout", f"is {self.timeout!r}; it must be a number above 0, of seconds")

    @property
    def drawn(self) -> int:
        return self.n if self.best_of is None else self.best_of


class TakesRequests(Protocol):
    """What these calls need of an engine."""

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
    engine: TakesRequests, prompts: Mapping[str, Any] | Sequence[Prompt], sampling: Mapping[str, Any], terms: Terms
) -> list[Completion]:
    """Completions of all prompts, in their order (see `Engine.generate`)."""
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    if terms.drawn > terms.n:
        sampling = {"logprobs": 0} | {name: value for name, value in sampling.items() if value is not None}
    requests = []
    for prompt in prompts:
        request = _request(engine, prompt, sampling, terms)
        engine.check(request)
        requests += samples_of(request, terms.drawn, _new_name)
    scores = PromptScores(requests)
    assemblers = {r.request_id: _assembler(engine, r) for r in requests}
    engine.start()
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    ends = _end_of(terms)
    unsent, alive = list(reversed(requests)), set()
    # A few more than fit the batches are kept waiting, so that the queue's bounds hold for long lists too.
    most_alive = min(2 * engine.config.max_rows * engine.config.replicas, engine.config.max_queued_requests)
    try:
        while unsent or alive:
            while unsent and len(alive) < most_alive:
                if not _submitted(engine, for_engine(unsent[-1]), events.put, ours=len(alive)):
                    break
                alive.add(unsent.pop().request_id)
            for event in (each for told in _wait(events, ends) for each in scores.spread(told)):
                assembler = assemblers[event.request_id]
                assembler.push(event)
                if assembler.finished and event.request_id in alive:
                    alive.remove(event.request_id)
                    if event.finish_reason is None:  # a stop string, which the engine does not know of
                        engine.abort(event.request_id)
    finally:
        for request_id in alive:
            engine.abort(request_id)
    made = [assemblers[request.request_id].completion() for request in requests]
    of_prompts = (made[first : first + terms.drawn] for first in range(0, len(made), terms.drawn))
    return [each for samples in of_prompts for each in best(samples, terms.n)]


def search(
    engine: TakesRequests, prompt: Prompt, params: beams.BeamParams, sampling: Mapping[str, Any], terms: Terms
) -> list[Completion]:
    """The best answers to one prompt (see `Engine.beam_search`)."""
    request = _request(engine, prompt, sampling, terms, defaults.of_beams(engine.request_defaults))
    engine.check(request)
    eos = engine.model_config.eos_token_ids
    made = beams.BeamSearch(request, params, eos)
    engine.start()
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    ends = _end_of(terms)
    answers: dict[str, Alternatives | None] = {}
    try:
        while not made.is_finished:
            steps = made.requests(_new_name)
            answers = {step.request_id: None for step in steps}
            unsent, alive = list(reversed(steps)), 0
            while unsent or alive:
                while unsent and _submitted(engine, unsent[-1], events.put, ours=alive):
                    unsent.pop()
                    alive += 1
                for event in _wait(events, ends):
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
    engine: TakesRequests, prompt: Prompt, sampling: Mapping[str, Any], terms: Terms
) -> AsyncIterator[Delta]:
    """Deltas of one completion (see `Engine.stream`)."""
    if isinstance(prompt, Mapping):  # it may be a chat, whose template takes its time
        request = await asyncio.to_thread(_request, engine, prompt, sampling, terms)
    else:
        request = _request(engine, prompt, sampling, terms)
    assembler = _assembler(engine, request)
    if request.sampling.grammar is not None:
        await asyncio.to_thread(engine.check, request)  # compiles it
    engine.start()
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()

    def sink(theirs: list[TokenEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to hear
            loop.call_soon_threadsafe(events.put_nowait, theirs)

    ends = _end_of(terms)
    engine.submit(request, sink)
    try:
        while not assembler.finished:
            left = None if ends is None else ends - time.monotonic()
            for event in await asyncio.wait_for(events.get(), left):
                yield assembler.push(event)
    finally:
        engine.abort(request.request_id)


def _submitted(engine: TakesRequests, request: Request, sink: Sink, *, ours: int) -> bool:
    """Hands a request in; False where the queue is full of what may be the call's own, whose ends make room.

    Args:
      ours: requests of the call that are alive.
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


def _end_of(terms: Terms) -> float | None:
    # What is longer than a thread can wait, such as math.inf, is for ever as well.
    return None if terms.timeout is None or terms.timeout > threading.TIMEOUT_MAX else time.monotonic() + terms.timeout


def _wait(events: queue.SimpleQueue[list[TokenEvent]], ends: float | None) -> list[TokenEvent]:
    """The next events. Raises TimeoutError once it is too late for them."""
    try:
        return events.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the timeout of the call has passed") from None


def _request(
    engine: TakesRequests,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    terms: Terms,
    of_checkpoint: Mapping[str, Any] | None = None,
) -> Request:
    if isinstance(prompt, Mapping):
        fields = {name: value for name, value in prompt.items() if value is not None}
    else:
        fields = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    given = {name: value for name, value in {**sampling, **fields}.items() if value is not None}
    of_checkpoint = engine.request_defaults if of_checkpoint is None else of_checkpoint
    return parse_request(
        given,
        request_id=_new_name(),
        tokenizer=engine.tokenizer,
        priority=terms.priority,
        arrival=time.monotonic(),
        cache_salt=terms.cache_salt,
        defaults=of_checkpoint if terms.fills_in or given.keys().isdisjoint(SAMPLING_PARAMS) else {},
        longest=engine.limits.longest,
    )


def _assembler(engine: TakesRequests, request: Request) -> Assembler:
    return Assembler(request, engine.tokenizer, engine.model_config.eos_token_ids)
