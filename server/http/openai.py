"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxserve.generation.beam_search import BeamParams
from jaxserve.generation.completion import Completion, Delta
from jaxserve.generation.samples import best
from jaxserve.request import Request
from jaxserve.text.chat_template import ChatTemplate
from server.call import Call, Generation
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http.call import DONE, HttpCall, encoded_events, status_of
from server.http.choices import ChatChoice, Choice
from server.http.schemas import ChatBody, CompletionBody
from server.prompts import Adjust
from server.text import offload_if_long

_TYPES = {
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.FORBIDDEN: "permission_error",
    ErrorKind.QUEUE_FULL: "rate_limit_error",
    ErrorKind.RATE_LIMITED: "rate_limit_error",
    ErrorKind.TOO_LATE: "timeout_error",
    ErrorKind.UNAVAILABLE: "service_unavailable_error",
    ErrorKind.FAILED: "internal_server_error",
}
_TGI_NAMES = ("tgi", "dummy")  # TGI's clients name every model so
_CODES = {ErrorKind.QUEUE_FULL: "queue_full", ErrorKind.NOT_FOUND: "not_found"}


def error_of(refusal: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(refusal),
            "type": _TYPES.get(refusal.kind, "invalid_request_error"),
            "param": refusal.field,
            "code": _CODES.get(refusal.kind) or str(status_of(refusal)),
        }
    }


def check_model(body: Any, names: Sequence[str]) -> None:
    """Raises ApiError (404) if a call names a model that is not served."""
    if body.model not in (None, *names, *_TGI_NAMES):
        raise ApiError(
            ErrorKind.NOT_FOUND, f"model: {body.model[:100]!r} is not served here; {names[0]!r} is", field="model"
        )


class Completions:
    """`/v1/completions`, or with `chat` `/v1/chat/completions`, of the served model."""

    def __init__(self, handler: RequestHandler, *, chat: bool) -> None:
        self._handler = handler
        self._schema: type[ChatBody] | type[CompletionBody] = ChatBody if chat else CompletionBody
        self._choice: type[Choice] = ChatChoice if chat else Choice
        self._kind, self._prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(self._schema)
        check_model(body, self._handler.model_names)
        usage_wanted = body.usage_wanted
        samples, prompts = await http_call.offload(lambda: (body.samples, _prompts(body)))
        if isinstance(body, ChatBody) and body.tool_use is not None:
            body.tool_use.check(self._template)
        call = Call(
            id=http_call.id,
            protocol="http",
            priority=body.priority,
            cache_salt=body.cache_salt,
            deadline=None if body.timeout is None else time.monotonic() + body.timeout,
        )

        def adjust(request: Request) -> Request:
            if body.truncate_prompt_tokens is not None:
                request = self._handler.truncate(request, body.truncate_prompt_tokens)
            return self._filled(request) if body.fills_context else request

        if (params := body.beams) is not None:
            await http_call.json(await self._searched(body, call, params, prompts, adjust))
            return
        async with self._handler.generate(
            prompts,
            call,
            samples=samples,
            adjust=adjust,
            is_cut=body.truncate_prompt_tokens is not None,
            special_tokens=self._shows_special_tokens(body),
        ) as generation:
            if body.stream:
                await self._stream(http_call, body, generation, usage_wanted)
            else:
                await generation.finish()
                await http_call.made_json(generation.answer_work, lambda: self._whole(body, generation, samples))

    def _shows_special_tokens(self, body: Any) -> bool:
        """Whether the text has special tokens: on request, or because tool calls are between them."""
        use = getattr(body, "tool_use", None)
        return not body.skip_special_tokens or (use is not None and use.special_tokens(self._template))

    @property
    def _template(self) -> ChatTemplate | None:
        tokenizer = self._handler.engine.tokenizer
        return None if tokenizer is None else tokenizer.chat_template

    def _filled(self, request: Request) -> Request:
        """The request of a chat without a limit: its answer may fill the context."""
        return self._handler.fill_context(request, self._handler.engine.request_defaults.get("max_tokens"))

    async def _searched(
        self, body: Any, call: Call, params: BeamParams, prompts: Sequence[dict[str, Any]], adjust: Adjust
    ) -> dict[str, Any]:
        is_cut = body.truncate_prompt_tokens is not None
        if len(prompts) > 1:  # they are searched for one after another
            await self._handler.check_fit(prompts, call, adjust=adjust, is_cut=is_cut)
        found = [await self._handler.search(prompt, call, params, adjust=adjust, is_cut=is_cut) for prompt in prompts]
        answers = [(request, completion) for request, completions in found for completion in completions]
        choices = [self._chosen(body, request, i).whole(each) for i, (request, each) in enumerate(answers)]
        usage = _usage([len(request.prompt) for request, _ in found], [len(each.token_ids) for _, each in answers])
        return self._header(call.id) | {"choices": choices, "usage": usage}

    def _whole(self, body: Any, generation: Generation, samples: int) -> dict[str, Any]:
        completions, n = generation.completions(), body.n or 1
        answers = [
            (generation.requests[first], completion)
            for first in range(0, len(completions), samples)
            for completion in best(completions[first : first + samples], n)
        ]
        choices = [self._chosen(body, request, i).whole(each) for i, (request, each) in enumerate(answers)]
        answer = self._header(generation.call.id) | {"choices": choices}
        answer["usage"] = _usage_of(completions, samples, body)
        first = self._chosen(body, generation.requests[0], 0)
        return answer | first.of_the_call(completions[0])

    async def _stream(self, http_call: HttpCall, body: Any, generation: Generation, usage_wanted: bool) -> None:
        header = self._header(http_call.id, chunk=True) | ({"usage": None} if usage_wanted else {})
        choices = [self._chosen(body, request, index) for index, request in enumerate(generation.requests)]
        prompts = [len(request.prompt) for request in generation.requests[:: body.n or 1]]
        generated, first = 0, choices[0].of_the_stream()

        def made(deltas: Sequence[tuple[int, Delta]]) -> bytes:
            nonlocal generated, first
            events = []
            for index, delta in deltas:
                generated += len(delta.token_ids)
                usage = {"usage": _usage(prompts, [generated])} if body.continuous_usage else {}
                for piece in choices[index].pieces(delta):
                    events.append(header | usage | first | {"choices": [piece]})
                    first = {}
            return encoded_events(events)

        async for deltas in generation:
            scored = sum(len(delta.prompt_logprobs) for _, delta in deltas)
            await http_call.event_data(await offload_if_long(100 * scored, made, deltas))
        last = []
        if usage_wanted:
            completions = [generation.completion(index) for index in range(len(choices))]
            last = [header | {"choices": [], "usage": _usage_of(completions, body.n or 1, body)}]
        await http_call.events([*last, *([] if body.for_tgi else [DONE])])
        await http_call.end()

    def _chosen(self, body: Any, request: Request, index: int) -> Choice:
        return self._choice(self._handler.engine.tokenizer, body, request, index)

    def _header(self, call_id: str, *, chunk: bool = False) -> dict[str, Any]:
        """The first fields of every answer and every chunk."""
        kind = "chat.completion.chunk" if chunk and self._schema is ChatBody else self._kind
        return {
            "id": f"{self._prefix}-{call_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._handler.model_name,
            "system_fingerprint": f"jaxserve-{self._handler.version}",
        }


def _prompts(body: ChatBody | CompletionBody) -> list[dict[str, Any]]:
    """The fields of each prompt, as `parse_request` takes them. Raises InvalidRequest."""
    sampling = body.sampling
    return [prompt | sampling for prompt in body.prompts]


def _usage_of(completions: Sequence[Completion], samples: int, body: Any) -> dict[str, Any]:
    """Usage of a call: each prompt once, without the token generated for max_tokens 0."""
    dropped = body.max_tokens == 0
    usage = _usage(
        [each.prompt_tokens for each in completions[::samples]],
        [max(0, len(each.token_ids) - dropped) for each in completions],
    )
    cached = sum(completion.cached_tokens for completion in completions[::samples])
    return usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def _usage(prompts: Sequence[int], generated: Sequence[int]) -> dict[str, Any]:
    prompt, answer = sum(prompts), sum(generated)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
