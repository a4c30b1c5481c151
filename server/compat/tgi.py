"""The HTTP API of text-generation-inference (TGI): /generate, /generate_stream and /info."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion
from jaxserve.generation.samples import MAX_SAMPLES, best
from jaxserve.request import Alternatives, FinishReason, Request
from jaxserve.sampling_params import MAX_STOP, SAMPLING_PARAMS, Grammar
from jaxserve.structured_output import grammar
from jaxserve.text.tokenizer import Tokenizer
from server.call import Call, Generation
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import logprobs, sse
from server.http.call import HttpCall
from server.http.openai import finished
from server.http.schemas import TgiBody, TgiGrammar, TgiParameters, seed_of

STATUSES = {ErrorKind.INVALID: 422, ErrorKind.UNSUPPORTED: 422, ErrorKind.FAILED: 424}
_DEFAULT_MAX_NEW_TOKENS = 100
_TGI_PARAMS = [param for param in SAMPLING_PARAMS.values() if param.in_tgi]
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "eos_token", FinishReason.STOP: "stop_sequence"}
_ERRORS = {
    ErrorKind.INVALID: "validation",
    ErrorKind.UNSUPPORTED: "validation",
    ErrorKind.QUEUE_FULL: "overloaded",
    ErrorKind.RATE_LIMITED: "overloaded",
    ErrorKind.UNAVAILABLE: "healthcheck",
    ErrorKind.FAILED: "generation",
}


def error_of(refusal: ApiError) -> dict[str, Any]:
    """An error as the JSON of TGI."""
    message = "Model is overloaded" if refusal.kind is ErrorKind.QUEUE_FULL else str(refusal)
    return {"error": message, "error_type": _ERRORS.get(refusal.kind, refusal.kind.value)}


class Generate:
    """`/generate` and `/generate_stream` of one model.

    Args:
      streams: True streams, False answers once, None follows the body's `stream`.
    """

    def __init__(self, handler: RequestHandler, *, streams: bool | None) -> None:
        self._handler, self._streams = handler, streams

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(TgiBody)
        given = body.parameters or TgiParameters()
        streams = body.stream if self._streams is None else self._streams
        fields, samples = _fields(given), given.best_of or 1
        if streams and samples > 1:
            raise InvalidRequest("best_of", "cannot be streamed: the best answer is known at the end")
        tokenizer = self._handler.text.tokenizer
        async with self._handler.generate(
            [{"prompt": body.inputs} | fields],
            Call(id=http_call.id, protocol="http"),
            samples=samples,
            adjust=lambda request: _truncated(request, given.truncate),
        ) as generation:
            if streams:
                await _stream(http_call, body.inputs, given, generation, tokenizer)
            else:
                await _whole(http_call, body.inputs, given, generation, tokenizer)


def _fields(given: TgiParameters) -> dict[str, Any]:
    """The sampling parameters of a TGI call. Raises InvalidRequest for one that is not served."""
    for name, value in (("adapter_id", given.adapter_id), ("watermark", given.watermark)):
        if value:
            raise InvalidRequest(name, "is not served")
    # As in TGI, a parameter that changes the distribution turns sampling on, as do_sample does.
    draws = (
        given.do_sample
        or given.temperature not in (None, 1.0)
        or any(getattr(given, param.name) not in (None, param.default) for param in _TGI_PARAMS if param.truncates)
        or (given.best_of or 1) > 1
    )
    fields = {param.name: getattr(given, param.name) for param in _TGI_PARAMS}
    fields |= {
        "max_tokens": given.max_new_tokens or _DEFAULT_MAX_NEW_TOKENS,
        "temperature": (given.temperature or 1.0) if draws else 0.0,
        "stop": given.stop,
        "logprobs": given.top_n_tokens or 0,
        "prompt_logprobs": 0 if given.decoder_input_details else None,
        "seed": None if given.seed is None else seed_of(given.seed),
        "grammar": None if given.grammar is None else _grammar(given.grammar),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _grammar(given: TgiGrammar) -> Grammar:
    """The constraint of TGI's types: regex, json, or json_schema as in OpenAI's API."""
    if given.type == "regex":
        return grammar.text("grammar", "regex", given.value)
    schema = given.value
    if given.type == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        schema = schema["schema"]
    return grammar.json_schema("grammar", schema)


def _truncated(request: Request, most: int | None) -> Request:
    """The request with only the last tokens of its prompt."""
    return request if most is None else dataclasses.replace(request, prompt=request.prompt[-most:])


async def _whole(
    http_call: HttpCall, inputs: str, given: TgiParameters, generation: Generation, tokenizer: Tokenizer
) -> None:
    completions = await finished(generation)
    (first,) = best(completions, 1)
    others = [one for one in completions if one is not first]
    prompt = generation.requests[0].prompt
    answer: dict[str, Any] = {"generated_text": _text(inputs, given, first)}
    if given.details:
        answer["details"] = _details(tokenizer, given, first) | {"prefill": _prefill(tokenizer, prompt, first)}
        if others:
            answer["details"]["best_of_sequences"] = [
                {"generated_text": _text(inputs, given, one)}
                | _details(tokenizer, given, one)
                | {"prefill": _prefill(tokenizer, prompt, one)}
                for one in others
            ]
    await http_call.json(answer)


async def _stream(
    http_call: HttpCall, inputs: str, given: TgiParameters, generation: Generation, tokenizer: Tokenizer
) -> None:
    text, index = tokenizer.stream(generation.requests[0].prompt), 0
    async for deltas in generation:
        events = []
        for _, delta in deltas:
            tops = delta.top_logprobs or (None,) * len(delta.token_ids)
            for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=True):
                index += 1
                line: dict[str, Any] = {
                    "index": index,
                    "token": _token(tokenizer, token, logprob) | {"text": text.push([token])},
                    "generated_text": None,
                    "details": None,
                }
                if top is not None:
                    line["top_tokens"] = _top(tokenizer, top)
                events.append(line)
            if delta.finish_reason is not None:
                completion = generation.completion()
                events[-1]["generated_text"] = _text(inputs, given, completion)
                events[-1]["details"] = _ending(completion) | {"input_length": completion.prompt_tokens}
        if events:
            await http_call.event(b"".join(sse.event(line) for line in events))
    await http_call.end()


def _text(inputs: str, given: TgiParameters, completion: Completion) -> str:
    return inputs + completion.text if given.return_full_text else completion.text


def _ending(completion: Completion) -> dict[str, Any]:
    assert completion.finish_reason is not None
    return {
        "finish_reason": _REASONS[completion.finish_reason],
        "generated_tokens": len(completion.token_ids),
        "seed": completion.seed,
    }


def _details(tokenizer: Tokenizer, given: TgiParameters, completion: Completion) -> dict[str, Any]:
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
    details = _ending(completion) | {"tokens": [_token(tokenizer, token, logprob) for token, logprob in pairs]}
    if given.top_n_tokens:
        details["top_tokens"] = [_top(tokenizer, top) for top in completion.top_logprobs or ()]
    return details


def _prefill(tokenizer: Tokenizer, prompt: Sequence[int], completion: Completion) -> list[dict[str, Any]]:
    pairs = zip(prompt, completion.prompt_logprobs or (), strict=False)
    tokens = [_token(tokenizer, token, logprob) for token, logprob in pairs]
    return [{name: value for name, value in token.items() if name != "special"} for token in tokens]


def _top(tokenizer: Tokenizer, top: Alternatives) -> list[dict[str, Any]]:
    return [_token(tokenizer, token, logprob) for token, logprob in zip(*top, strict=True)]


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "id": token,
        "text": logprobs.token_text(tokenizer, token),
        "logprob": logprobs.finite(logprob),
        "special": not tokenizer.is_text(token),
    }


def info(handler: RequestHandler, name: str, version: str) -> dict[str, Any]:
    """The answer to `/info`."""
    engine, report = handler.engine, handler.engine.report
    return {
        "model_id": name,
        "model_sha": None,
        "model_dtype": report.dtype,
        "model_device_type": report.platform,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": engine.config.max_queued_requests,
        "max_best_of": MAX_SAMPLES,
        "max_stop_sequences": MAX_STOP,
        "max_input_tokens": engine.max_context - 1,
        "max_total_tokens": engine.max_context,
        "max_batch_size": report.max_rows,
        "max_batch_total_tokens": report.slots,
        "router": "jaxserve",
        "version": version,
    }
