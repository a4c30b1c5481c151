"""The front door: what all protocols share between a call's fields and the engine.

The engine's thread hands over a whole iteration at once (one wake-up of the event loop); here its events are sorted
into one mailbox a call. A mailbox never holds more than its requests generate, and a handler takes all that is in it at
once, so a reader who is slow costs neither memory nor anybody else's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.generation.beam_search import BeamParams, BeamSearch, completions
from jaxserve.generation.completion import Assembler, Completion, parse_request
from jaxserve.generation.samples import for_engine, samples_of
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import Grammar, SamplingParams
from server import errors
from server.admission import AdmissionController, Ticket
from server.auth import Tenant
from server.beam_search import BeamSearchCall
from server.call import Call, Generation, Observer, RequestTiming
from server.engine_client import EngineNotReady

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer
    from server.engine_client import EngineClient

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_LONG_TEXT = 10_000  # characters; more is tokenised off the event loop (about a millisecond's work)
_LONGEST_ID = 256  # characters of a caller's own name of a call
_GRACE = 0.2  # seconds after a deadline in which a protocol that knows of deadlines ends its calls itself


class RequestHandler:
    """One engine's door, for every protocol. Make and use it on the event loop that serves.

    Args:
      engine: started, or to be started; while it is not ready calls are refused.
      tenants: that callers may belong to, by name.
    """

    def __init__(self, engine: EngineClient, *, tenants: Callable[[], dict[str, Tenant]] = dict) -> None:
        self.engine = engine
        self.admission = AdmissionController(engine, tenants=tenants)
        self.problem: str | None = None  # what the watchdog has seen keep the engine from serving, if something does
        self.observers: list[Observer] = []
        self._loop = asyncio.get_running_loop()
        self._alive: dict[str, Generation | BeamSearchCall] = {}  # by request id, until the last event
        self._generations: set[Generation | BeamSearchCall] = set()
        self._numbers = itertools.count()
        self._closed: str | None = None
        self._sink = self._deliver  # one object for all requests: the engine groups events by it
        self._emptied = asyncio.Event()

    # From the engine's thread to the calls

    def _deliver(self, events: list[TokenEvent]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to hear
            self._loop.call_soon_threadsafe(self._sort, events)

    def _sort(self, events: list[TokenEvent]) -> None:
        for event in events:
            generation = self._alive.get(event.request_id)
            if generation is not None:
                if event.finish_reason is not None:
                    del self._alive[event.request_id]
                generation.put(event)

    def _leave(self, request_id: str) -> None:
        """Ends a request in the engine, unless the engine has ended it."""
        if self._alive.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    # Open and closed

    @property
    def closed(self) -> str | None:
        """Why no call is taken, if none is. While the engine is away and will be back, calls wait for it."""
        if self._closed is None and self.engine.problem is not None:
            return None if self.engine.takes_requests else self.engine.problem
        return self._closed or self.problem

    @property
    def unhealthy_reason(self) -> str | None:
        """Why health says that nothing is served, if it does."""
        return self._closed or self.engine.problem or self.problem

    def full(self) -> errors.ApiError | None:
        """What any call for an answer is told now, if the queue takes none, before anything of it is read."""
        # Who is closed says so, and an engine that is not ready has no queue yet.
        return self.admission.full() if self.closed is None and self.engine.takes_requests else None

    def close(self, message: str) -> None:
        """Refuses new calls from now on (UNAVAILABLE); those under way go on."""
        self._closed = message

    def fail_all(self, message: str) -> None:
        """Ends every call under way with UNAVAILABLE."""
        for generation in self._generations:
            generation.fail(errors.unavailable(message))

    @property
    def num_alive(self) -> int:
        """Requests of the calls under way."""
        return sum(len(generation.requests) for generation in self._generations)

    async def idle(self) -> None:
        """Waits until no call is under way."""
        while self._generations:
            self._emptied.clear()
            await self._emptied.wait()

    # The life of a call

    @contextlib.contextmanager
    def answering(self, call_id: str) -> Iterator[None]:
        """Turns whatever goes wrong inside into a refusal of this call and no other."""
        try:
            yield
        except Exception as problem:
            refusal = self._refusal(problem, call_id)
            for observer in self.observers:
                observer.refused(call_id, refusal)
            if refusal is problem:
                raise
            raise refusal from problem

    def _refusal(self, problem: Exception, call_id: str) -> errors.ApiError:
        match problem:
            case errors.ApiError():
                return problem
            case InvalidRequest():
                return errors.invalid(problem.field, str(problem))
            case QueueFull():
                return errors.queue_full(str(problem), self.admission.retry_seconds())
            case EngineNotReady():
                return errors.unavailable(str(problem), errors.RETRY_SECONDS)
        if self.engine.problem is not None:
            return errors.unavailable(self.engine.problem)
        _log.exception("request %r failed", call_id, exc_info=problem)
        return errors.failed(call_id)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        call: Call,
        *,
        samples: int = 1,
        adjust: Callable[[Request], Request] = lambda request: request,
    ) -> AsyncIterator[Generation]:
        """Has the engine work on a call's requests for as long as the block lasts, however it ends.

        Args:
          prompts: fields of each prompt, as `parse_request` takes them.
          samples: requests of each prompt, next to each other in the generation.
          adjust: what is still to be done with a request when its prompt has become tokens.

        Raises:
          InvalidRequest, QueueFull, ApiError: before anything is generated.
        """
        self._check_open(call)
        with self._admitted(prompts, call, samples) as ticket:
            requests = await offload_if_long(
                sum(map(_work, prompts)),
                lambda: [adjust(self._parse(fields, call, ticket.demoted)) for fields in prompts],
            )
            ticket.correct(samples * sum(len(request.prompt) for request in requests))
            grammars = {request.sampling.grammar for request in requests}
            # Held until the engine has them: off this loop is where they are compiled.
            compiled = [await self._compiled(grammar) for grammar in grammars if grammar is not None]
            made = self._generation(call, requests, samples, ticket)
            with self._under_way(made), self._submitted(made, ticket) as generation:
                del compiled
                yield generation

    async def _compiled(self, grammar: Grammar) -> object:
        if self.engine.grammars is None:
            raise InvalidRequest(grammar.field, "needs a tokenizer, and this checkpoint has none")
        return await self.engine.grammars.prepare(grammar)

    def fill_context(self, request: Request) -> Request:
        """A request whose caller gives no limit, with all the room that the context leaves it."""
        room = min(self.engine.max_context, self.engine.report.slots) - len(request.prompt)
        return replace(request, sampling=replace(request.sampling, max_tokens=max(1, room)))

    async def search(
        self,
        fields: Mapping[str, Any],
        call: Call,
        params: BeamParams,
        *,
        adjust: Callable[[Request], Request] = lambda request: request,
    ) -> tuple[Request, list[Completion]]:
        """Searches for the best answers to one prompt: the request that it became, and they, best first. The places of
        all beams in the queue are kept until it is over.

        Args: as of `generate`.

        Raises:
          InvalidRequest, QueueFull, ApiError; Exception: a step of it failed in the engine.
        """
        self._check_open(call)
        with self._admitted([fields], call, params.width) as ticket:
            parse = partial(self._parse, fields, call, ticket.demoted)
            request = await offload_if_long(_work(fields), lambda: adjust(parse()))
            self.engine.check(request)
            search = BeamSearch(request, params, self.engine.model_config.eos_token_ids)
            ticket.correct(params.width * request.max_length)
            ticket.keep()
            searching = BeamSearchCall(
                call,
                search,
                self.observers,
                submit=lambda step: self._submit(step, searching),
                leave=self._leave,
                name=lambda: str(next(self._numbers)),
            )
            with self._under_way(searching):
                answers = await self._searched(searching)
            self.admission.finished(len(answers[0].token_ids), request.sampling.max_tokens)
            return request, answers

    async def _searched(self, searching: BeamSearchCall) -> list[Completion]:
        tokenizer, eos = self.engine.tokenizer, self.engine.model_config.eos_token_ids
        completion = Assembler(searching.search.request, tokenizer, eos).completion()
        for observer in self.observers:
            observer.started(searching.timing)
        try:
            await searching.run()
            answers = completions(searching.search, tokenizer, eos)
            completion = answers[0]
            return answers
        finally:
            for observer in self.observers:
                observer.ended(searching.timing, completion)

    def _submit(self, request: Request, owner: Generation | BeamSearchCall) -> None:
        self._alive[request.request_id] = owner
        try:
            self.engine.submit(request, self._sink)
        except BaseException:
            del self._alive[request.request_id]
            raise

    @contextlib.contextmanager
    def _under_way(self, owner: Generation | BeamSearchCall) -> Iterator[None]:
        """Counts a call's requests as under way, and ends them at its deadline."""
        bound = None
        if (deadline := owner.call.deadline) is not None:
            late = errors.ApiError(errors.ErrorKind.TOO_LATE, "the deadline has passed")
            bound = self._loop.call_later(deadline - time.monotonic() + _GRACE, owner.fail, late)
        self._generations.add(owner)
        try:
            yield
        finally:
            if bound is not None:
                bound.cancel()
            self._generations.remove(owner)
            if not self._generations:
                self._emptied.set()

    def _generation(self, call: Call, requests: list[Request], samples: int, ticket: Ticket) -> Generation:
        # Names of the engine's own: two callers may send the same one.
        requests = [one for each in requests for one in samples_of(each, samples, lambda: str(next(self._numbers)))]
        eos = self.engine.model_config.eos_token_ids
        assemblers = [Assembler(request, self.engine.tokenizer, eos) for request in requests]
        return Generation(call, requests, assemblers, self.observers, ticket, self._leave)

    def _check_open(self, call: Call) -> None:
        if len(call.id) > _LONGEST_ID:
            raise errors.invalid("request_id", f"is longer than {_LONGEST_ID} characters")
        if self.closed is not None:
            raise errors.unavailable(self.closed, None if self._closed is not None else errors.RETRY_SECONDS)

    @contextlib.contextmanager
    def _admitted(self, prompts: Sequence[Mapping[str, Any]], call: Call, samples: int) -> Iterator[Ticket]:
        """Has the call's place in the queue kept, before any text is tokenised and however the call ends."""
        new_tokens = max((fields.get("max_tokens") or SamplingParams().max_tokens for fields in prompts), default=0)
        ticket = self.admission.admit(
            call.tenant,
            requests=samples * len(prompts),
            prompt_tokens=samples * sum(map(_size, prompts)),
            new_tokens=new_tokens,
            exactly=any(fields.get("ignore_eos") for fields in prompts),
            deadline=call.deadline,
        )
        try:
            yield ticket
        finally:
            ticket.release()

    def _parse(self, fields: Mapping[str, Any], call: Call, demoted: bool) -> Request:
        return parse_request(
            fields,
            request_id="",
            tokenizer=self.engine.tokenizer,
            priority=call.priority - demoted,
            arrival=call.arrival,
            cache_salt=call.cache_salt,
        )

    @contextlib.contextmanager
    def _submitted(self, generation: Generation, ticket: Ticket) -> Iterator[Generation]:
        started: list[RequestTiming] = []
        try:
            for timing in generation.timings:
                self._submit(for_engine(timing.request), generation)
                started.append(timing)
                for observer in self.observers:
                    observer.started(timing)
            ticket.submitted()
            yield generation
        finally:
            for timing in started:
                self._leave(timing.request.request_id)
            for index, timing in enumerate(started):
                completion = generation.completion(index)
                if completion.finish_reason is not None and completion.finish_reason.is_answer:
                    self.admission.finished(len(completion.token_ids), timing.request.sampling.max_tokens)
                for observer in self.observers:
                    observer.ended(timing, completion)

    # Text and tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's. Raises ApiError if it has none."""
        if self.engine.tokenizer is None:
            raise errors.ApiError(errors.ErrorKind.UNSUPPORTED, "this checkpoint has no tokenizer")
        return self.engine.tokenizer

    async def tokenize(self, text: str, *, special_tokens: bool = True, field: str = "text") -> list[int]:
        """Token ids of a text. Raises ApiError, naming the field, for what has none."""
        try:
            return await offload_if_long(len(text), self.tokenizer.encode, text, special_tokens=special_tokens)
        except ValueError as problem:
            raise errors.invalid(field, str(problem)) from problem

    async def detokenize(self, token_ids: Sequence[int], *, field: str = "token_ids") -> str:
        """The text of token ids. Raises ApiError, naming the field, for ids outside the vocabulary."""
        tokenizer, vocab_size = self.tokenizer, self.engine.model_config.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise errors.invalid(field, f"has token id {token}; the vocabulary has {vocab_size}")
        return await offload_if_long(len(token_ids), tokenizer.decode, token_ids)


def _size(fields: Mapping[str, Any]) -> int:
    """Most tokens that a prompt can have: a token of a text stands for a byte at least. (A tokenizer that adds tokens
    or rewrites the text, or a chat's template, may make a few more; they are counted when they are known.)"""
    texts = [] if (text := fields.get("prompt")) is None else [text]
    texts += [text for message in fields.get("messages") or () for text in message.values()]
    return sum(len(text.encode(errors="replace")) for text in texts) + len(fields.get("prompt_token_ids") or ())


def _work(fields: Mapping[str, Any]) -> int:
    """How long a text has to be worked on for a prompt. A chat's counts as a long one: templates are programs, and what
    one does with a short chat may take long."""
    return _LONG_TEXT + 1 if fields.get("messages") else _size(fields)


async def offload_if_long(size: int, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Does work on a text, and off the event loop if the text is long."""
    if size <= _LONG_TEXT:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
