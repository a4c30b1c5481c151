"""The HTTP API of text-generation-inference (TGI): /generate, /generate_stream, / and /info."""

from __future__ import annotations

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
from server.compat.tgi_schemas import TgiBody, TgiGrammar, TgiParameters
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import logprobs
from server.http.call import HttpCall
from server.http.schemas import seed_of

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
    message = "Model is overloaded" if refusal.kind is ErrorKind.QUEUE_FULL else str(refusal)
    return {"error": message, "error_type": _ERRORS.get(refusal.kind, refusal.kind.value)}


class Generate:
    """`/generate` and `/generate_stream` of one model.

    Args:
      streams: True streams, False answers once. None is for `/`: it follows the body's `stream`, answers a list, and
        returns the prompt with the answer by default, as TGI does for models that generate text.
    """

    def __init__(self, handler: RequestHandler, *, streams: bool | None) -> None:
        self._handler, self._streams = handler, streams

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(TgiBody)
        given = body.parameters or TgiParameters()
        if self._streams is None and given.return_full_text is None:
            given.return_full_text = True
        streams = body.stream if self._streams is None else self._streams
        fields, samples = _fields(given), given.best_of or 1
        if streams and samples > 1:
            raise InvalidRequest("best_of", "cannot be streamed: the best answer is known at the end")
        if streams and given.decoder_input_details:
            raise InvalidRequest("decoder_input_details", "is not in the events of a stream; leave stream out")
        answer = _Answer(body.inputs, given, self._handler.text.tokenizer)
        async with self._handler.generate(
            [{"prompt": body.inputs} | fields],
            Call(id=http_call.id, protocol="http"),
            samples=samples,
            adjust=lambda request: self._truncated(request, given.truncate),
            is_cut=given.truncate is not None,
        ) as generation:
            if streams:
                await answer.stream(http_call, generation)
            else:
                whole = await answer.whole(generation)
                await http_call.json([whole] if self._streams is None else whole)

    def _truncated(self, request: Request, most: int | None) -> Request:
        return request if most is None else self._handler.truncate(request, most)


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


class _Answer:
    """The JSON of an answer to one prompt."""

    def __init__(self, inputs: str, given: TgiParameters, tokenizer: Tokenizer) -> None:
        self._inputs, self._given, self._tokenizer = inputs, given, tokenizer

    async def whole(self, generation: Generation) -> dict[str, Any]:
        await generation.finish()
        completions, prompt = generation.completions(), generation.requests[0].prompt
        (first,) = best(completions, 1)
        others = [one for one in completions if one is not first]
        answer: dict[str, Any] = {"generated_text": self._text(first)}
        if self._given.details:
            answer["details"] = self._details(first, prompt)
            if others:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(one)} | self._details(one, prompt) for one in others
                ]
        return answer

    async def stream(self, http_call: HttpCall, generation: Generation) -> None:
        text, index = self._tokenizer.stream(generation.requests[0].prompt), 0
        async for deltas in generation:
            events = []
            for _, delta in deltas:
                for token, logprob, top in logprobs.generated(delta):
                    index += 1
                    line: dict[str, Any] = {
                        "index": index,
                        "token": self._token(token, logprob) | {"text": text.push([token])},
                        "generated_text": None,
                        "details": None,
                    }
                    if top is not None:
                        line["top_tokens"] = self._top(top)
                    events.append(line)
                if delta.finish_reason is not None:
                    completion = generation.completion()
                    events[-1]["generated_text"] = self._text(completion)
                    events[-1]["details"] = _ending(completion) | {"input_length": completion.prompt_tokens}
            await http_call.events(events)
        await http_call.end()

    def _text(self, completion: Completion) -> str:
        return self._inputs + completion.text if self._given.return_full_text else completion.text

    def _details(self, completion: Completion, prompt: Sequence[int]) -> dict[str, Any]:
        pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
        details = _ending(completion) | {"tokens": [self._token(token, logprob) for token, logprob in pairs]}
        if self._given.top_n_tokens:
            details["top_tokens"] = [self._top(top) for top in completion.top_logprobs or ()]
        scored = zip(prompt, completion.prompt_logprobs or (), strict=False)
        prefill = [self._token(token, logprob) for token, logprob in scored]
        details["prefill"] = [{name: token[name] for name in ("id", "text", "logprob")} for token in prefill]
        return details

    def _top(self, top: Alternatives) -> list[dict[str, Any]]:
        return [self._token(token, logprob) for token, logprob in zip(*top, strict=True)]

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        known = {"id": token, "text": logprobs.token_text(self._tokenizer, token), "logprob": logprobs.finite(logprob)}
        return known | {"special": not self._tokenizer.is_text(token)}


def _ending(completion: Completion) -> dict[str, Any]:
    assert completion.finish_reason is not None
    return {
        "finish_reason": _REASONS[completion.finish_reason],
        "generated_tokens": len(completion.token_ids),
        "seed": completion.seed,
    }


def info(handler: RequestHandler) -> dict[str, Any]:
    engine, report = handler.engine, handler.engine.report
    return {
        "model_id": handler.model_name,
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
        "version": handler.version,
    }
