"""The request handler: everything that the protocols share between a call and the engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.errors import InvalidRequest, QueueFull, WrongState
from jaxserve.generation.beam_search import BeamParams, BeamSearch
from jaxserve.generation.completion import Assembler, Completion
from jaxserve.generation.defaults import for_beam_search
from jaxserve.generation.samples import expand_samples
from jaxserve.request import Request
from server import errors
from server.admission import AdmissionController, Ticket
from server.auth import Tenant, current
from server.beam_search import BeamSearchCall
from server.call import ActiveCalls, Call, Generation, Observer
from server.engine_client import EngineNotReady, EventDelivery
from server.kv_events import KvEventLog
from server.prompts import Adjust, CallPrompts, longest
from server.text import REQUEST_WORK, RefusedWork, TextTools, offload_if_long

if TYPE_CHECKING:
    from server.engine_client import EngineClient

_log = logging.getLogger(__name__)

_LONGEST_ID = 256  # characters of a caller's own id of a call
_Result = TypeVar("_Result")


class RequestHandler:
    """Handles the calls of every protocol to one engine.

    Use it on one event loop; it may be made before that runs.

    Args:
      engine: started, or still starting; calls are refused until it is ready.
      model_name / aliases: the name of the served model, and others that calls may give it.
      version: of the server.
      tenants: returns all tenants, by name.

    Attributes:
      model_names: all names of the model.
      calls: the active calls.
      text: tokenizes and detokenizes.
      observers: of every request and every refused call.
      problem: why the engine does not serve, as the watchdog sees it; None while it does.
      profile: starts (True) and stops (False) a capture of jax's profiler; None where that is not allowed.
      kv_events: what changes in the prefix cache; None unless that is collected.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        model_name: str,
        version: str,
        aliases: Sequence[str] = (),
        tenants: Callable[[], dict[str, Tenant]] = dict,
    ) -> None:
        self.engine, self.model_name, self.version = engine, model_name, version
        self.model_names = (model_name, *aliases)
        self.admission = AdmissionController(engine, tenants=tenants)
        self.calls = ActiveCalls()
        self.text = TextTools(engine)
        self.observers: list[Observer] = []
        self.problem: str | None = None
        self.profile: Callable[[bool], Awaitable[None]] | None = None
        self.kv_events: KvEventLog | None = None
        self._refused = RefusedWork()
        self._delivery = EventDelivery(engine)
        self._numbers = itertools.count()
        self._closed: str | None = None

    # Open or closed

    @property
    def closed(self) -> str | None:
        """Why calls are refused, or None. While an engine process restarts, calls wait for it."""
        if self._closed is None and self.engine.problem is not None:
            return None if self.engine.takes_requests else self.engine.problem
        return self._closed or self.problem

    @property
    def unhealthy_reason(self) -> str | None:
        """Why health checks report that nothing is served, or None."""
        return self._closed or self.engine.problem or self.problem

    def enter(self) -> None:
        """Counts a call against its tenant's rate, unparsed. Raises ApiError if that is used up."""
        # A closed server, or one whose engine is not ready, refuses calls with its own reason.
        if self.closed is None and self.engine.takes_requests:
            self.admission.charge()

    def close(self, message: str) -> None:
        """Refuses new calls from now on (UNAVAILABLE). Active calls continue."""
        self._closed = message

    def open(self) -> None:
        """Takes calls from now on."""
        self._closed = None

    def _check_open(self, call: Call) -> None:
        if len(call.id) > _LONGEST_ID:
            raise errors.invalid("request_id", f"is longer than {_LONGEST_ID} characters")
        highest = call.tenant.max_priority
        if highest is not None and call.priority > highest:
            raise InvalidRequest("priority", f"is {call.priority}; with this API key it may be at most {highest}")
        if self.closed is not None:
            raise errors.unavailable(self.closed, None if self._closed is not None else errors.RETRY_SECONDS)

    # Errors

    @contextlib.contextmanager
    def answering(self, call_id: str) -> Iterator[None]:
        """Turns any exception in the block into an ApiError for this call."""
        try:
            yield
        except Exception as problem:
            refusal = self._api_error(problem, call_id)
            for observer in self.observers:
                observer.refused(call_id, refusal)
            if refusal is problem:
                raise
            raise refusal from problem

    def _api_error(self, problem: Exception, call_id: str) -> errors.ApiError:
        match problem:
            case errors.ApiError():
                return problem
            case InvalidRequest():
                return errors.invalid(problem.field, str(problem))
            case QueueFull():
                return errors.queue_full(str(problem), self.admission.retry_seconds())
            case WrongState():
                return errors.ApiError(errors.ErrorKind.WRONG_STATE, str(problem))
            case EngineNotReady():
                return errors.unavailable(str(problem), errors.RETRY_SECONDS)
        if self.engine.problem is not None:
            return errors.unavailable(self.engine.problem)
        _log.exception("request %r failed", call_id, exc_info=problem)
        return errors.failed(call_id)

    async def set_profile(self, running: bool) -> None:
        """Starts or stops a profile for the current tenant. Raises ApiError, WrongState."""
        tenant = current.get()
        if tenant.name and not tenant.operator:  # it slows all tenants' requests
            raise errors.ApiError(errors.ErrorKind.FORBIDDEN, "profiles are for operators")
        if self.profile is None:
            raise WrongState("start the server with --profile DIR to allow profiles")
        await self.profile(running)

    # Calls

    @contextlib.asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        call: Call,
        *,
        samples: int = 1,
        adjust: Adjust = lambda it: it,
        is_cut: bool = False,
        special_tokens: bool = False,
        by_token: bool = False,
    ) -> AsyncIterator[Generation]:
        """Runs the requests of a call while the block lasts; they are aborted when it ends early.

        Args:
          prompts: fields of each prompt, as `parse_request` takes them.
          samples: requests of each prompt, next to each other in the generation.
          adjust: changes a request once its prompt is tokenized.
          is_cut: whether it may shorten the prompt, so that one that does not fit is no error.
          special_tokens: whether they are in the text of answers.
          by_token: whether each token has a delta of its own.

        Raises:
          InvalidRequest, QueueFull, ApiError: before anything is generated.
        """
        self._check_open(call)
        defaults = self.engine.request_defaults if call.has_defaults else {}
        given = CallPrompts(self.engine, prompts, call, defaults, adjust=adjust, is_cut=is_cut)
        given.check_sizes()
        async with self._admitted(given, samples) as ticket:
            parsed = await given.parse()
            ticket.correct(samples * sum(len(request.prompt) for request in parsed))
            compiled = await self._compile_grammars(parsed)
            tokenizer, eos_token_ids = self.engine.tokenizer, self.engine.model_config.eos_token_ids

            def make() -> tuple[list[Request], list[Assembler]]:
                # The server makes its own ids, because two callers may send the same one.
                requests = [each for request in parsed for each in expand_samples(request, samples, self._new_id)]
                return requests, [
                    Assembler(each, tokenizer, eos_token_ids, special_tokens=special_tokens) for each in requests
                ]

            requests, assemblers = await offload_if_long(REQUEST_WORK * samples * len(parsed), make)
            parts = (call, requests, self.observers, self._delivery, assemblers, ticket)
            generation = Generation(*parts, by_token=by_token)
            with self.calls.under_way(generation):
                try:
                    await generation.submit()
                    del compiled  # from here on the engine keeps the grammars
                    yield generation
                finally:
                    generation.end(self.admission)

    async def search(
        self,
        fields: Mapping[str, Any],
        call: Call,
        params: BeamParams,
        *,
        adjust: Adjust = lambda it: it,
        is_cut: bool = False,
    ) -> tuple[Request, list[Completion]]:
        """Searches for the best answers to one prompt.

        The queue keeps places for all beams until the search ends.

        Args: as of `generate`.

        Returns:
          The request that the prompt became, and its completions, best first.

        Raises:
          InvalidRequest, QueueFull, ApiError; Exception: a step failed in the engine.
        """
        self._check_open(call)
        defaults = for_beam_search(self.engine.request_defaults)
        given = CallPrompts(self.engine, [fields], call, defaults, adjust=adjust, is_cut=is_cut)
        given.check_sizes()
        async with self._admitted(given, params.width) as ticket:
            (request,) = await given.parse()
            ticket.correct(params.width * request.max_length)
            ticket.keep()
            search = BeamSearch(request, params, self.engine.model_config.eos_token_ids)
            searching = BeamSearchCall(call, search, self.observers, self._delivery, self._new_id)
            with self.calls.under_way(searching):
                answers = await searching.run(self.engine.tokenizer, self.engine.model_config.eos_token_ids)
            self.admission.finished(len(answers[0].token_ids), request.sampling.max_tokens)
            return request, answers

    async def check_fit(
        self, prompts: Sequence[Mapping[str, Any]], call: Call, *, adjust: Adjust, is_cut: bool
    ) -> None:
        """Raises InvalidRequest for beam searches of which one can never be served."""
        self._check_open(call)
        defaults = for_beam_search(self.engine.request_defaults)
        given = CallPrompts(self.engine, prompts, call, defaults, adjust=adjust, is_cut=is_cut)
        given.check_sizes()
        await given.check_fit(self._refused)

    def fill_context(self, request: Request, most: int | None = None) -> Request:
        """The request with the rest of the context as max_tokens, for callers without a limit.

        Args:
          most: most tokens to generate, unless its min_tokens are more.
        """
        left = self._longest - len(request.prompt)
        if most is not None:
            left = min(left, max(most, request.sampling.min_tokens))
        return replace(request, sampling=replace(request.sampling, max_tokens=max(1, left)))

    def truncate(self, request: Request, most: int) -> Request:
        """The request with its prompt's last `most` tokens; -1: as many as fit beside max_tokens."""
        if most < 0:
            most = max(1, self._longest - request.sampling.max_tokens)
        return replace(request, prompt=request.prompt[-most:])

    @property
    def _longest(self) -> int:
        """Most tokens of a request."""
        return longest(self.engine)

    @contextlib.asynccontextmanager
    async def _admitted(self, prompts: CallPrompts, samples: int) -> AsyncIterator[Ticket]:
        """Holds the call's place in the queue, from before its text is tokenized until it ends."""
        try:
            ticket = self.admission.admit(
                prompts.call.tenant,
                requests=samples * len(prompts.fields),
                prompt_tokens=samples * prompts.most_tokens,
                new_tokens=prompts.new_tokens,
                exactly=any(fields.get("ignore_eos") for fields in prompts.fields),
                deadline=prompts.call.deadline,
            )
        except errors.ApiError as refusal:
            if refusal.kind in (errors.ErrorKind.QUEUE_FULL, errors.ErrorKind.TOO_LATE):
                await prompts.check_fit(self._refused)
            raise
        try:
            yield ticket
        finally:
            ticket.release()

    async def before_admission(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Does work on `size` bytes of text that a call's prompts are made of.

        Raises:
          ApiError: the queue is full, and too much of such work waits.
        """
        full = None if self.closed is not None else self.admission.full()
        if full is None:
            return await offload_if_long(size, work)
        if not self._refused.takes(size):
            raise full
        return await self._refused.run(size, work)

    async def _compile_grammars(self, requests: Sequence[Request]) -> list[object]:
        """Compiles grammars off this loop. They stay compiled while the returned list is kept."""
        compiled = []
        for grammar in {request.sampling.grammar for request in requests}:
            if grammar is None:
                continue
            if self.engine.grammars is None:
                raise InvalidRequest(grammar.field, "needs a tokenizer, and this checkpoint has none")
            compiled.append(await self.engine.grammars.compile_async(grammar))
        return compiled

    def _new_id(self) -> str:
        return str(next(self._numbers))
