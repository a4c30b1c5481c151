"""Conversion between the messages of `vllm.grpc.engine` and the engine's values."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion, Delta
from jaxserve.generation.samples import MAX_SAMPLES
from jaxserve.request import Alternatives, FinishReason, Request
from jaxserve.sampling_params import SAMPLING_PARAMS, Grammar
from jaxserve.structured_output import grammar
from server.call import Generation
from server.grpc.messages import set_fields
from server.handler import RequestHandler
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as pb

_NOT_SERVED = {
    "kv_transfer_params": "prompts and answers are computed in the same place",
    "kv_transfer_params_json": "prompts and answers are computed in the same place",
    "mm_inputs": "these models read text only",
}
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


def fields_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """The fields of a call, as `parse_request` takes them. Raises InvalidRequest."""
    match request.WhichOneof("input"):
        case "tokenized":
            fields: dict[str, Any] = {"prompt_token_ids": list(request.tokenized.input_ids)}
        case "text":
            fields = {"prompt": request.text}
        case _:
            raise InvalidRequest("tokenized", "is missing, and so is text; give one of them")
    for name, why in _NOT_SERVED.items():
        if request.HasField(name):
            raise InvalidRequest(name, f"is not served: {why}; leave it out")
    if request.data_parallel_rank:
        raise InvalidRequest(
            "data_parallel_rank", f"is {request.data_parallel_rank}; there is one rank, 0, so leave it out"
        )
    params = request.sampling_params
    if (wanted := _grammar(params)) is not None:
        fields["grammar"] = wanted
    if params.min_tokens and not params.HasField("max_tokens"):
        fields["max_tokens"] = params.min_tokens  # `adjusted` sets the real limit
    given = {name: value for name, value in set_fields(params).items() if name in SAMPLING_PARAMS}
    return given | fields


def _grammar(params: pb.SamplingParams) -> Grammar | None:
    match params.WhichOneof("constraint"):
        case "json_schema" as field:
            return grammar.json_schema(field, params.json_schema)
        case "json_object" as field:
            return grammar.json_object(field) if params.json_object else None
        case "regex" as field:
            return grammar.text(field, "regex", params.regex)
        case "grammar" as field:
            return grammar.text(field, "lark", params.grammar)
        case "choice" as field:
            return grammar.choice(field, list(params.choice.choices))
        case str() as field:
            raise InvalidRequest(field, "is not served; give a schema, a regular expression, a choice or a grammar")
    return None


def samples_of(params: pb.SamplingParams) -> int:
    if params.n > MAX_SAMPLES:
        raise InvalidRequest("n", f"is {params.n}; it must be at most {MAX_SAMPLES}")
    return params.n or 1


def adjusted(handler: RequestHandler, params: pb.SamplingParams, request: Request) -> Request:
    """The request with its prompt truncated, and with max_tokens if the call gives none."""
    if params.HasField("truncate_prompt_tokens"):
        most = params.truncate_prompt_tokens
        if most == -1:
            longest = min(handler.engine.max_context, handler.engine.report.request_slots)
            most = max(1, longest - (params.max_tokens or 1))
        if most < 1:
            raise InvalidRequest("truncate_prompt_tokens", f"is {most}; it must be -1, or at least 1")
        request = dataclasses.replace(request, prompt=request.prompt[-most:])
    return request if params.HasField("max_tokens") else handler.fill_context(request)


class VllmSample:
    """The response messages of one sample of a call.

    Args:
      index: index of the sample among the generation's requests.
    """

    def __init__(self, index: int, generation: Generation) -> None:
        self._index, self._generation = index, generation
        self._request = generation.requests[index]
        self._cached: int | None = None  # set by the first chunk

    @property
    def is_whole(self) -> bool:
        return self._generation.completion(self._index).finish_reason is not None

    def chunk(self, delta: Delta) -> pb.GenerateResponse:
        """A message with what was generated since the previous one."""
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=len(delta.token_ids),
            index=self._index,
        )
        if delta.logprobs:
            _fill_output(chunk.output_logprobs, delta)
        if self._cached is None:
            so_far = self._generation.completion(self._index)
            self._cached = so_far.cached_tokens
            if so_far.prompt_logprobs is not None:
                _fill_input(chunk.input_logprobs, self._request, so_far)
        chunk.cached_tokens = self._cached
        return pb.GenerateResponse(chunk=chunk)

    def complete(self) -> pb.GenerateResponse:
        """The last message; its finish reason is "abort" if the engine did not finish the sample."""
        completion = self._generation.completion(self._index)
        reason = completion.finish_reason
        complete = pb.GenerateComplete(
            output_ids=completion.token_ids,
            finish_reason="abort" if reason is None else _REASONS[reason],
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=len(completion.token_ids),
            cached_tokens=completion.cached_tokens,
            index=self._index,
        )
        if completion.logprobs:
            _fill_output(complete.output_logprobs, completion)
        if completion.prompt_logprobs is not None:
            _fill_input(complete.input_logprobs, self._request, completion)
        if completion.matched_stop is not None:
            complete.matched_stop_str = completion.matched_stop
        elif reason is FinishReason.STOP:
            complete.matched_token_id = completion.token_ids[-1]
        return pb.GenerateResponse(complete=complete)


def _fill_output(out: pb.OutputLogProbs, tokens: Delta | Completion) -> None:
    out.token_logprobs.extend(tokens.logprobs or ())
    out.token_ids.extend(tokens.token_ids)
    out.top_logprobs.extend(map(_top, tokens.top_logprobs or ()))


def _fill_input(out: pb.InputLogProbs, request: Request, completion: Completion) -> None:
    """Adds the prompt logprobs; a request that ended early has fewer than prompt tokens."""
    scored = completion.prompt_logprobs or ()
    out.token_logprobs.extend(pb.InputTokenLogProb(value=logprob) for logprob in scored)
    out.token_ids.extend(request.prompt[: len(scored)])
    out.top_logprobs.extend(map(_top, completion.prompt_top_logprobs or ()))


def _top(alternatives: Alternatives | None) -> pb.TopLogProbs:
    if alternatives is None:
        return pb.TopLogProbs()
    return pb.TopLogProbs(values=alternatives.logprobs, token_ids=alternatives.token_ids)
