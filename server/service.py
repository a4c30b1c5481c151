"""The gRPC service: calls become the door's, what comes of them becomes messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from server import errors, messages
from server.door import Door
from server.generation import Call, Generation, new_id
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1 import inference_pb2_grpc


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`jaxserve.v1.Inference` behind a door.

    Args:
      name: what GetModel calls the model.
      version: of the server.
    """

    def __init__(self, door: Door, *, name: str, version: str) -> None:
        self._door, self._engine = door, door.engine
        self._name, self._version = name, version

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        whole, text = pb.GenerateResponse(), []
        async with self._generating(request, context) as (call_id, generation):
            async for response in _responses(generation):
                text.append(response.text)
                whole.MergeFrom(response)
            whole.text = "".join(text)
            whole.request_id = call_id
        return whole

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._generating(request, context) as (call_id, generation):
            async for response in _responses(generation):
                response.request_id = call_id
                await context.write(response)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with self._answering(context, new_id()):
            return pb.TokenizeResponse(token_ids=await self._door.tokenize(request.text))
        raise AssertionError  # `_answering` has raised

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        async with self._answering(context, new_id()):
            return pb.DetokenizeResponse(text=await self._door.detokenize(request.token_ids))
        raise AssertionError

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        async with self._answering(context, new_id()):
            return self._model()
        raise AssertionError

    def _model(self) -> pb.GetModelResponse:
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

    @contextlib.asynccontextmanager
    async def _answering(self, context: Any, call_id: str) -> AsyncIterator[None]:
        """Ends the call with a status where it is refused."""
        try:
            with self._door.answering(call_id):
                try:
                    yield
                except grpc.aio.InternalError:  # a write that was blocked when the caller left
                    raise asyncio.CancelledError from None
        except errors.Refusal as refusal:
            await context.abort_with_status(messages.status_of(refusal))

    @contextlib.asynccontextmanager
    async def _generating(self, message: pb.GenerateRequest, context: Any) -> AsyncIterator[tuple[str, Generation]]:
        """(what the call is named, its one request while the engine works on it)."""
        call = Call(
            id=message.request_id or new_id(),
            protocol="grpc",
            priority=message.priority,
            cache_salt=message.cache_salt,
            deadline=_deadline(context),
        )
        async with (
            self._answering(context, call.id),
            self._door.generate([messages.fields_of(message)], call) as generation,
        ):
            yield call.id, generation


def _deadline(context: Any) -> float | None:
    """In monotonic seconds; None for a caller who waits for ever."""
    seconds = context.time_remaining()
    return None if seconds is None else time.monotonic() + seconds


async def _responses(generation: Generation) -> AsyncIterator[pb.GenerateResponse]:
    """A message whenever the engine has been heard of; the last one has the finish reason, usage and seed."""
    async for deltas in generation:
        response = pb.GenerateResponse()
        for _, delta in deltas:
            messages.add(response, delta)
            if delta.finish_reason is not None:
                messages.conclude(response, generation.completion())
        yield response
