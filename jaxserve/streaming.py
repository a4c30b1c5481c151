"""Calls from Python: prompts in, completions or a stream of deltas out, on top of `Engine.submit`."""

from __future__ import annotations

import asyncio
import queue
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxserve.completion import Assembler, Completion, Delta
from jaxserve.config import EngineConfig
from jaxserve.models.schema import ModelConfig
from jaxserve.parsing import parse_request
from jaxserve.request import Request, TokenEvent
from jaxserve.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Sink = Callable[[list[TokenEvent]], None]


class TakesRequests(Protocol):
    """What these calls need of an engine."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None

    def start(self) -> None: ...
    def check(self, request: Request) -> None: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def abort(self, request_id: str) -> None: ...


def generate(engine: TakesRequests, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> list[Completion]:
    """Completions of all prompts, in their order (see `Engine.generate`)."""
    if isinstance(prompts, str):
        prompts = [prompts]
    requests = [_request(engine, prompt, sampling) for prompt in prompts]
    for request in requests:
        engine.check(request)
    assemblers = {r.request_id: _assembler(engine, r) for r in requests}
    engine.start()
    events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
    unsent, alive = list(reversed(requests)), set()
    # A few more than fit the batches are kept waiting, so that the queue's bounds hold for long lists too.
    most_alive = min(2 * engine.config.max_rows * engine.config.replicas, engine.config.max_queued_requests)
    try:
        while unsent or alive:
            while unsent and len(alive) < most_alive:
                request = unsent.pop()
                alive.add(request.request_id)
                engine.submit(request, events.put)
            for event in events.get():
                assembler = assemblers[event.request_id]
                assembler.push(event)
                if assembler.finished and event.request_id in alive:
                    alive.remove(event.request_id)
                    if event.finish_reason is None:  # a stop string, which the engine does not know of
                        engine.abort(event.request_id)
    finally:
        for request_id in alive:
            engine.abort(request_id)
    return [assemblers[request.request_id].completion() for request in requests]


async def stream(engine: TakesRequests, prompt: Prompt, sampling: Mapping[str, Any]) -> AsyncIterator[Delta]:
    """Deltas of one completion (see `Engine.stream`)."""
    request = _request(engine, prompt, sampling)
    assembler = _assembler(engine, request)
    if request.sampling.grammar is not None:
        await asyncio.to_thread(engine.check, request)  # compiles it
    engine.start()
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()

    def sink(theirs: list[TokenEvent]) -> None:
        loop.call_soon_threadsafe(events.put_nowait, theirs)

    engine.submit(request, sink)
    try:
        while not assembler.finished:
            for event in await events.get():
                yield assembler.push(event)
    finally:
        engine.abort(request.request_id)


def _request(engine: TakesRequests, prompt: Prompt, sampling: Mapping[str, Any]) -> Request:
    field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return parse_request(
        {field: prompt, **sampling},
        request_id=uuid.uuid4().hex,
        tokenizer=engine.tokenizer,
        arrival=time.monotonic(),
    )


def _assembler(engine: TakesRequests, request: Request) -> Assembler:
    return Assembler(request, engine.tokenizer, engine.model_config.eos_token_ids)
