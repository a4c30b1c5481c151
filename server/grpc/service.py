"""The gRPC service jaxserve.v1.Inference: from messages to the request handler and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation import beam_search as beams
from jaxserve.generation.completion import Completion
from jaxserve.generation.samples import MAX_SAMPLES, best
from server.call import Call, Generation, new_id
from server.embed import embed
from server.grpc import calls, messages
from server.handler import RequestHandler
from server.limits import MAX_PROMPTS
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1 import inference_pb2_grpc

_REPORTED = ("family", "parameters", "dtype", "device", "attention", "max_rows", "slots", "block_size")


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`jaxserve.v1.Inference` for a request handler."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler, self._engine = handler, handler.engine

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        call = _call(request, context)
        async with calls.answering(self._handler, context, call.id):
            completions = await self._completions(request, call)
            responses = [messages.whole(each, index) for index, each in enumerate(completions)]
            if request.n <= 1:
                responses[0].request_id = call.id
                return responses[0]
            return pb.GenerateResponse(request_id=call.id, samples=responses)
        raise AssertionError  # `answering` has raised

    async def _completions(self, request: pb.GenerateRequest, call: Call) -> list[Completion]:
        """The completions of a call: all samples, the best of them, or those of a beam search."""
        params = beams.parse_beam_params(_set_of(request, beams.FIELDS))
        if params is not None:
            return (await self._handler.search(messages.fields_of(request), call, params))[1]
        n, drawn = _samples(request)
        fields = messages.fields_of(request)
        if drawn > n:
            fields.setdefault("logprobs", 0)
        async with self._handler.generate([fields], call, samples=drawn) as generation:
            async for _ in generation:
                pass
            answers = best([generation.completion(index) for index in range(drawn)], n)
        return answers if request.HasField("logprobs") else [replace(each, logprobs=None) for each in answers]

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        call = _call(request, context)
        async with calls.answering(self._handler, context, call.id):
            n, drawn = _samples(request)
            if beams.parse_beam_params(_set_of(request, beams.FIELDS)) is not None:
                raise InvalidRequest("use_beam_search", "cannot be streamed: the best answers are known at the end")
            if drawn > n:
                raise InvalidRequest("best_of", "cannot be streamed: which is best is known at the end")
            async with self._handler.generate([messages.fields_of(request)], call, samples=n) as generation:
                async for response in _responses(generation):
                    response.request_id = call.id
                    await context.write(response)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        call = _call(request, context)
        async with calls.answering(self._handler, context, call.id):
            if not 1 <= len(request.inputs) <= MAX_PROMPTS:
                raise InvalidRequest("inputs", f"has {len(request.inputs)} prompts; give 1 to {MAX_PROMPTS}")
            prompts = [messages.input_of(each) for each in request.inputs]
            found = await embed(self._handler, prompts, call, messages.set_fields(request).get("pooling"))
            embeddings = [pb.Embedding(values=each) for each in found.values]
            usage = pb.Usage(prompt_tokens=found.prompt_tokens, cached_tokens=found.cached_tokens)
            return pb.EmbedResponse(request_id=call.id, embeddings=embeddings, usage=usage)
        raise AssertionError  # `answering` has raised

    @calls.answered
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await self._handler.text.tokenize(request.text))

    @calls.answered
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await self._handler.text.detokenize(request.token_ids))

    @calls.answered
    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        engine, report = self._engine, self._engine.report
        return pb.GetModelResponse(
            name=self._handler.model_name,
            vocab_size=engine.model_config.vocab_size,
            max_context=engine.max_context,
            eos_token_ids=engine.model_config.eos_token_ids,
            has_tokenizer=engine.tokenizer is not None,
            buckets=[
                pb.Bucket(tokens=cost.size, compile_seconds=cost.compile_seconds, milliseconds=cost.milliseconds)
                for cost in report.buckets
            ],
            version=self._handler.version,
            **{name: getattr(report, name) for name in _REPORTED},
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        figures = asdict(self._engine.config) | asdict(self._engine.load())
        return pb.GetLoadResponse(**{name: figures[name] for name in pb.GetLoadResponse.DESCRIPTOR.fields_by_name})

    @calls.answered
    async def StartProfile(self, request: pb.StartProfileRequest, context: Any) -> pb.StartProfileResponse:
        await self._handler.set_profile(True)
        return pb.StartProfileResponse()

    @calls.answered
    async def StopProfile(self, request: pb.StopProfileRequest, context: Any) -> pb.StopProfileResponse:
        await self._handler.set_profile(False)
        return pb.StopProfileResponse()


def _call(message: pb.GenerateRequest | pb.EmbedRequest, context: Any) -> Call:
    return Call(
        id=message.request_id or new_id(),
        protocol="grpc",
        priority=message.priority,
        cache_salt=message.cache_salt,
        deadline=calls.deadline(context),
    )


def _set_of(message: pb.GenerateRequest, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}  # pyright: ignore[reportArgumentType]


def _samples(message: pb.GenerateRequest) -> tuple[int, int]:
    """(samples to answer with, samples to draw). Raises InvalidRequest."""
    n = message.n if message.HasField("n") else 1
    drawn = message.best_of if message.HasField("best_of") else n
    for name, value, least in (("n", n, 1), ("best_of", drawn, n)):
        if not least <= value <= MAX_SAMPLES:
            raise InvalidRequest(name, f"is {value}; it must be from {least} to {MAX_SAMPLES}")
    return n, drawn


async def _responses(generation: Generation) -> AsyncIterator[pb.GenerateResponse]:
    """Yields a message for each sample with new events; the last has finish reason and usage."""
    async for deltas in generation:
        for index, delta in deltas:
            response = pb.GenerateResponse(index=index)
            messages.add(response, delta)
            if delta.finish_reason is not None:
                messages.conclude(response, generation.completion(index))
            yield response
