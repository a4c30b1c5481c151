"""The gRPC service: calls become requests, the engine's iterations become messages.

The engine's thread hands over a whole iteration at once (one wake-up of the event loop); here its events are sorted
into one mailbox a call. A mailbox never holds more than its request generates, and a handler takes all that is in it as
one message, so a reader who is slow costs neither memory nor anybody else's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from jaxserve.completion import Assembler, parse_request
from jaxserve.request import FinishReason, InvalidRequest, QueueFull, Request, TokenEvent
from server import errors, messages
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.tokenizer import Tokenizer

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_LONG_TEXT = 10_000  # characters; more is tokenised off the event loop (about a millisecond's work)
_LONGEST_ID = 256  # characters of a caller's request_id
_FAILED = "the engine has failed"


class _Mailbox:
    """What the engine has said for one request and its handler has not taken yet."""

    def __init__(self) -> None:
        self.is_over = False  # whether the engine has sent the last event
        self._events: list[TokenEvent] = []
        self._refusal: errors.Refusal | None = None
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self.is_over = event.finish_reason is not None
        self._arrived.set()

    def fail(self, refusal: errors.Refusal) -> None:
        """Has the handler end with this status as soon as it looks."""
        self._refusal = refusal
        self._arrived.set()

    async def take(self) -> list[TokenEvent]:
        """Waits until there is something, and takes all of it."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events, []
        return events


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`jaxserve.v1.Inference` on one engine. Make and use it on the event loop that serves.

    Args:
      engine: started, or to be started.
      name: what GetModel calls the model.
      version: of the server.
    """

    def __init__(self, engine: Engine, *, name: str, version: str) -> None:
        self._engine = engine
        self._name, self._version = name, version
        self._loop = asyncio.get_running_loop()
        self._mailboxes: dict[str, _Mailbox] = {}
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
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)

    # Open and closed

    def close(self, message: str) -> None:
        """Refuses new calls from now on (UNAVAILABLE); those under way go on."""
        self._closed = message

    def fail_all(self, message: str) -> None:
        """Ends every call under way with UNAVAILABLE."""
        for mailbox in self._mailboxes.values():
            mailbox.fail(errors.unavailable(message))

    @property
    def num_alive(self) -> int:
        """Generations under way."""
        return len(self._mailboxes)

    async def idle(self) -> None:
        """Waits until no generation is under way."""
        while self._mailboxes:
            self._emptied.clear()
            await self._emptied.wait()

    # The calls

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        whole, text = pb.GenerateResponse(), []
        async with self._answering(context, request.request_id) as call_id:
            admitted = await self._admit(request, call_id)
            async with contextlib.aclosing(self._responses(admitted)) as responses:
                async for response in responses:
                    text.append(response.text)
                    whole.MergeFrom(response)
            whole.text = "".join(text)
            whole.request_id = call_id
        return whole

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._answering(context, request.request_id) as call_id:
            admitted = await self._admit(request, call_id)
            async with contextlib.aclosing(self._responses(admitted)) as responses:
                async for response in responses:
                    response.request_id = call_id
                    await context.write(response)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with self._answering(context, ""):
            try:
                token_ids = await _aside(len(request.text), self._tokenizer().encode, request.text)
            except ValueError as problem:
                raise errors.invalid("text", str(problem)) from problem
            return pb.TokenizeResponse(token_ids=token_ids)
        raise AssertionError  # `_answering` has raised

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        async with self._answering(context, ""):
            tokenizer, vocab_size = self._tokenizer(), self._engine.model_config.vocab_size
            for token in request.token_ids:
                if not 0 <= token < vocab_size:
                    raise errors.invalid("token_ids", f"has token id {token}; the vocabulary has {vocab_size}")
            return pb.DetokenizeResponse(text=tokenizer.decode(list(request.token_ids)))
        raise AssertionError

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        engine, report = self._engine, self._engine.report
        return pb.GetModelResponse(
            name=self._name,
            family=report.family,
            parameters=report.parameters,
            dtype=report.dtype,
            vocab_size=engine.model_config.vocab_size,
            max_context=engine.max_context,
            eos_token_ids=engine.model_config.eos_token_ids,
            has_tokenizer=engine.tokenizer is not None,
            device=report.device,
            attention=report.attention,
            max_rows=report.max_rows,
            slots=report.slots,
            block_size=report.block_size,
            buckets=[
                pb.Bucket(tokens=cost.size, compile_seconds=cost.compile_seconds, milliseconds=cost.milliseconds)
                for cost in report.buckets
            ],
            version=self._version,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        load, config = self._engine.load(), self._engine.config
        return pb.GetLoadResponse(
            running=load.running,
            max_rows=config.max_rows,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            slots_used=load.slots_used,
            slots_cached=load.slots_cached,
            slots_total=load.slots_total,
            iterations=load.iterations,
            prompt_tokens=load.prompt_tokens,
            generated_tokens=load.generated_tokens,
            cached_tokens=load.cached_tokens,
            preemptions=load.preemptions,
            drafted_tokens=load.drafted_tokens,
            accepted_tokens=load.accepted_tokens,
            host_seconds=load.host_seconds,
            bucket_seconds=load.bucket_seconds,
            padding_seconds=load.padding_seconds,
            compiled_after_ready=load.compiled_after_ready,
        )

    # The life of a generation

    @contextlib.asynccontextmanager
    async def _answering(self, context: Any, caller_id: str) -> AsyncIterator[str]:
        """Names the call, and turns whatever goes wrong in it into a status of this call and no other."""
        call_id = caller_id or f"{next(self._numbers):x}-{secrets.token_hex(4)}"
        try:
            yield call_id
        except errors.Refusal as refusal:
            await context.abort_with_status(refusal.status)
        except InvalidRequest as problem:
            await context.abort_with_status(errors.invalid(problem.field, str(problem)).status)
        except QueueFull as problem:
            await context.abort_with_status(errors.queue_full(str(problem)).status)
        except grpc.aio.InternalError:  # a write that was blocked when the caller left
            raise asyncio.CancelledError from None
        except Exception as problem:
            if not self._engine.is_healthy:
                await context.abort_with_status(errors.unavailable(_FAILED).status)
            _log.exception("request %r failed", call_id, exc_info=problem)
            await context.abort_with_status(errors.internal(call_id).status)

    async def _admit(self, message: pb.GenerateRequest, call_id: str) -> Request:
        """Makes the engine's request of a message; refuses at once what cannot be taken in now.

        A queue that is full is noticed here before any text is tokenised; `submit` decides, in one step.
        """
        arrival = time.monotonic()
        if len(call_id) > _LONGEST_ID:
            raise errors.invalid("request_id", f"is longer than {_LONGEST_ID} characters")
        if self._closed is not None:
            raise errors.unavailable(self._closed)
        if not self._engine.is_healthy:
            raise errors.unavailable(_FAILED)
        load, config = self._engine.load(), self._engine.config
        if load.waiting >= config.max_queued_requests or load.waiting_tokens >= config.max_queued_tokens:
            raise QueueFull(f"{load.waiting} requests with {load.waiting_tokens} tokens are waiting")
        return await _aside(
            len(message.prompt),
            parse_request,
            messages.fields_of(message),
            request_id=str(next(self._numbers)),  # the engine's own: two callers may send the same one
            tokenizer=self._engine.tokenizer,
            priority=message.priority,
            arrival=arrival,
            cache_salt=message.cache_salt,
        )

    @contextlib.contextmanager
    def _submitted(self, request: Request) -> Iterator[_Mailbox]:
        """Has the engine work on a request for as long as the block lasts, however it ends."""
        mailbox = self._mailboxes[request.request_id] = _Mailbox()
        try:
            self._engine.submit(request, self._sink)
            try:
                yield mailbox
            finally:
                if not mailbox.is_over:
                    self._engine.abort(request.request_id)
        finally:
            del self._mailboxes[request.request_id]
            if not self._mailboxes:
                self._emptied.set()

    async def _responses(self, request: Request) -> AsyncGenerator[pb.GenerateResponse]:
        """A message whenever the engine has been heard of; the last one has the finish reason, usage and seed."""
        assembler = Assembler(request, self._engine.tokenizer, self._engine.model_config.eos_token_ids)
        with self._submitted(request) as mailbox:
            while not assembler.finished:
                response = pb.GenerateResponse()
                for event in await mailbox.take():
                    self._check(event)
                    messages.add(response, assembler.push(event))
                if assembler.finished:
                    messages.conclude(response, assembler.completion())
                yield response

    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise errors.Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this checkpoint has no tokenizer")
        return self._engine.tokenizer

    @staticmethod
    def _check(event: TokenEvent) -> None:
        """Raises where the engine gave a request up."""
        if event.finish_reason is FinishReason.ABORTED:
            raise errors.unavailable(event.error or "the request was ended by the server")
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(event.error)


async def _aside(characters: int, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Does work on a text, and off the event loop if the text is long."""
    if characters <= _LONG_TEXT:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
