"""`/v1/completions`, and what it shares with `/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.beam_search import BeamParams
from jaxserve.generation.completion import Completion, Delta
from jaxserve.generation.samples import best
from jaxserve.request import FinishReason, Request
from server.call import Call, Generation
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import logprobs, sse
from server.http.call import HttpCall, status_of
from server.http.schemas import CompletionBody, OpenAIBody
from server.text import offload_if_long

_DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
_REASONS = {FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}
_TYPES = {
    ErrorKind.UNAUTHENTICATED: "authentication_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.QUEUE_FULL: "rate_limit_error",
    ErrorKind.RATE_LIMITED: "rate_limit_error",
    ErrorKind.TOO_LATE: "timeout_error",
    ErrorKind.UNAVAILABLE: "service_unavailable_error",
    ErrorKind.FAILED: "internal_server_error",
}
_CODES = {
    ErrorKind.QUEUE_FULL: "queue_full",
    ErrorKind.NOT_FOUND: "not_found",
    ErrorKind.UNAUTHENTICATED: "invalid_api_key",
}


def error_of(refusal: ApiError) -> dict[str, Any]:
    """An error as the JSON of OpenAI's API."""
    return {
        "error": {
            "message": str(refusal),
            "type": _TYPES.get(refusal.kind, "invalid_request_error"),
            "param": refusal.field,
            "code": _CODES.get(refusal.kind) or str(status_of(refusal)),
        }
    }


def check_model(body: Any, name: str) -> None:
    """Raises ApiError (404) where a call names a model that is not the one served."""
    if body.model is not None and body.model != name:
        raise ApiError(
            ErrorKind.NOT_FOUND, f"model: {body.model[:100]!r} is not served here; {name!r} is", field="model"
        )


def call_of(http_call: HttpCall, body: OpenAIBody) -> Call:
    """The Call of an HTTP call."""
    deadline = None if body.timeout is None else time.monotonic() + body.timeout
    return Call(id=http_call.id, protocol="http", priority=body.priority, cache_salt=body.cache_salt, deadline=deadline)


def header_of(http_call: HttpCall, kind: str, prefix: str, model: str) -> dict[str, Any]:
    """The first fields of every answer and every chunk."""
    return {"id": f"{prefix}-{http_call.id}", "object": kind, "created": int(time.time()), "model": model}


def usage_of(generation: Generation, samples: int, dropped: int = 0) -> dict[str, Any]:
    """Usage of a call: each prompt counts once; `dropped` tokens of each request do not count."""
    completions = [generation.completion(index) for index in range(len(generation.requests))]
    prompt = sum(completion.prompt_tokens for completion in completions[::samples])
    generated = sum(max(0, len(completion.token_ids) - dropped) for completion in completions)
    cached = sum(completion.cached_tokens for completion in completions[::samples])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_of_beams(found: Sequence[tuple[Request, Sequence[Completion]]]) -> dict[str, Any]:
    """Usage of the prompts, each once, and of the returned answers."""
    prompt = sum(len(request.prompt) for request, _ in found)
    generated = sum(len(completion.token_ids) for _, completions in found for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def reason_of(reason: FinishReason | None) -> str | None:
    """OpenAI's finish_reason of a completion."""
    return None if reason is None else _REASONS[reason]


async def finished(generation: Generation) -> list[Completion]:
    """Waits for all requests of a call."""
    async for _ in generation:
        pass
    return [generation.completion(index) for index in range(len(generation.requests))]


class Completions:
    """`/v1/completions` of one model."""

    def __init__(self, handler: RequestHandler, name: str) -> None:
        self._handler, self._name = handler, name

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(CompletionBody)
        check_model(body, self._name)
        if body.suffix:
            raise InvalidRequest("suffix", "is not served: these models do not fill in the middle")
        usage_wanted, samples, sampling = body.usage_wanted, body.samples, _sampling(body)
        prompts = [prompt | sampling for prompt in body.prompts]
        if (params := body.beams) is not None:
            await http_call.json(await self._searched(http_call, body, params, prompts))
            return
        async with self._handler.generate(prompts, call_of(http_call, body), samples=samples) as generation:
            if body.stream:
                await self._stream(http_call, body, generation, usage_wanted)
            else:
                await self._whole(http_call, body, generation, samples)

    async def _searched(
        self, http_call: HttpCall, body: CompletionBody, params: BeamParams, prompts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        answer = header_of(http_call, "text_completion", "cmpl", self._name)
        call = call_of(http_call, body)  # one Call, so one deadline for all prompts
        found = [await self._handler.search(prompt, call, params) for prompt in prompts]
        answer["choices"] = choices = []
        for request, completions in found:
            for completion in completions:
                choices.append(_Choice(self._handler, body, request, len(choices)).whole(completion))
        answer["usage"] = usage_of_beams(found)
        return answer

    async def _whole(self, http_call: HttpCall, body: CompletionBody, generation: Generation, samples: int) -> None:
        completions, n = await finished(generation), body.n or 1

        def choices() -> Iterator[dict[str, Any]]:
            for first in range(0, len(completions), samples):
                for sample, completion in enumerate(best(completions[first : first + samples], n)):
                    choice = _Choice(self._handler, body, generation.requests[first], first // samples * n + sample)
                    yield choice.whole(completion)

        scored = sum(len(completion.prompt_logprobs or ()) for completion in completions)
        answer = header_of(http_call, "text_completion", "cmpl", self._name)
        size = 100 * scored  # a token takes as long as a line of text
        answer["choices"] = await offload_if_long(size, lambda: list(choices()))
        answer["usage"] = usage_of(generation, samples, dropped=body.max_tokens == 0)
        await http_call.json(answer)

    async def _stream(
        self, http_call: HttpCall, body: CompletionBody, generation: Generation, usage_wanted: bool
    ) -> None:
        header = header_of(http_call, "text_completion", "cmpl", self._name)
        if usage_wanted:
            header["usage"] = None
        choices = [_Choice(self._handler, body, request, index) for index, request in enumerate(generation.requests)]
        async for deltas in generation:
            found = (choices[index].piece(delta) for index, delta in deltas)
            chunks = [sse.event(header | {"choices": [choice]}) for choice in found if choice is not None]
            if chunks:
                await http_call.event(b"".join(chunks))
        last = b""
        if usage_wanted:
            usage = usage_of(generation, body.n or 1, dropped=body.max_tokens == 0)
            last = sse.event(header | {"choices": [], "usage": usage})
        await http_call.event(last + sse.DONE)
        await http_call.end()


def _sampling(body: CompletionBody) -> dict[str, Any]:
    fields = {"max_tokens": _DEFAULT_MAX_TOKENS} | body.sampling
    if fields["max_tokens"] == 0:
        if not body.echo:
            raise InvalidRequest("max_tokens", "is 0, which makes sense with echo only")
        fields |= {"max_tokens": 1, "temperature": 0.0}  # which is dropped
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, fields.get("prompt_logprobs", 0))
    if (body.best_of or 1) > (body.n or 1):
        fields.setdefault("logprobs", 0)
    return fields


class _Choice:
    """One choice of a completion, whole or in pieces."""

    def __init__(self, handler: RequestHandler, body: CompletionBody, request: Request, index: int) -> None:
        self._tokenizer = handler.engine.tokenizer
        self._body, self._request, self._index = body, request, index
        self._legacy = logprobs.Legacy(self._tokenizer)
        self._scored = 0  # prompt tokens sent so far
        self._drops = body.max_tokens == 0
        self._echoes = bool(body.echo)

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of a finished completion."""
        scored = () if completion.prompt_logprobs is None else completion.prompt_logprobs[1:]
        tops = completion.prompt_top_logprobs
        others = tops[1:] if tops is not None else (None,) * len(scored)
        choice = self.piece(
            Delta(
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs or (),
                top_logprobs=completion.top_logprobs or (),
                prompt_logprobs=tuple(zip(scored, others, strict=True)),  # pyright: ignore[reportArgumentType]
                finish_reason=completion.finish_reason,
            )
        )
        assert choice is not None  # it has a finish reason
        return choice

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """The choice of one chunk, or None if it has nothing new."""
        body, reason = self._body, reason_of(delta.finish_reason)
        if self._drops:
            delta = delta._replace(text="", token_ids=(), logprobs=(), top_logprobs=())
            reason = reason and "length"
        text, prompt_scored = delta.text, self._prompt(delta)
        if self._echoes:
            text, self._echoes = self._prompt_text() + text, False
        lines: dict[str, Any] | None = None
        if body.logprobs is not None:
            scored = logprobs.generated(delta.token_ids, delta.logprobs, delta.top_logprobs)
            lines = self._legacy.add([*(prompt_scored if body.echo else ()), *scored])
        asked = body.prompt_logprobs is not None and bool(prompt_scored)
        if not text and reason is None and not asked and not (lines and lines["tokens"]):
            return None
        choice = {"index": self._index, "text": text, "logprobs": lines, "finish_reason": reason}
        if asked:
            choice["prompt_logprobs"] = logprobs.by_id(self._tokenizer, prompt_scored)
        return choice

    def _prompt(self, delta: Delta) -> list[logprobs.Scored]:
        """The prompt logprobs of a delta; the first token has none."""
        prompt, start = self._request.prompt, self._scored
        if self._request.sampling.prompt_logprobs is None or (start and not delta.prompt_logprobs):
            return []
        first: list[logprobs.Scored] = [] if start else [(prompt[0], None, None)]
        start = max(1, start)
        self._scored = start + len(delta.prompt_logprobs)
        return first + logprobs.prompt(prompt[start : self._scored], delta.prompt_logprobs)

    def _prompt_text(self) -> str:
        given = self._body.prompt[self._index // (self._body.n or 1)]
        if isinstance(given, str):
            return given
        return "" if self._tokenizer is None else self._tokenizer.decode(given)
