"""`/v1/chat/completions`: a chat becomes a prompt by the checkpoint's own template."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion, Delta
from jaxserve.request import Request
from server.call import Generation
from server.handler import RequestHandler
from server.http import logprobs, sse
from server.http.call import HttpCall
from server.http.openai import call_of, check_model, finished, header_of, reason_of, usage_of, usage_of_beams
from server.http.schemas import ChatBody


class ChatCompletions:
    """`/v1/chat/completions` of one model."""

    def __init__(self, handler: RequestHandler, name: str) -> None:
        self._handler, self._name = handler, name

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(ChatBody)
        check_model(body, self._name)
        usage_wanted, sampling = body.usage_wanted, body.sampling
        if body.stream and body.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "is not in the stream of a chat; leave stream out")
        prompt = body.prompt_fields | sampling
        if "max_tokens" not in sampling and "min_tokens" in sampling:
            prompt["max_tokens"] = max(1, sampling["min_tokens"])  # until it is known how many there can be
        call = call_of(http_call, body)

        def adjust(request: Request) -> Request:
            return request if "max_tokens" in sampling else self._handler.fill_context(request)

        if (params := body.beams) is not None:
            found = await self._handler.search(prompt, call, params, adjust=adjust)
            answer = header_of(http_call, "chat.completion", "chatcmpl", self._name)
            answer["choices"] = [self._choice(body, index, one) for index, one in enumerate(found[1])]
            await http_call.json(answer | {"usage": usage_of_beams([found])})
            return
        async with self._handler.generate([prompt], call, samples=body.n or 1, adjust=adjust) as generation:
            if body.stream:
                await self._stream(http_call, body, generation, usage_wanted)
            else:
                await self._whole(http_call, body, generation)

    async def _whole(self, http_call: HttpCall, body: ChatBody, generation: Generation) -> None:
        completions = await finished(generation)
        answer = header_of(http_call, "chat.completion", "chatcmpl", self._name)
        answer["choices"] = [self._choice(body, index, one) for index, one in enumerate(completions)]
        answer["usage"] = usage_of(generation, body.n or 1)
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(generation)
        await http_call.json(answer)

    def _choice(self, body: ChatBody, index: int, completion: Completion) -> dict[str, Any]:
        scored = None
        if body.logprobs:
            tops = completion.top_logprobs or ()
            tokens = logprobs.generated(completion.token_ids, completion.logprobs or (), tops)
            scored = logprobs.chat(self._handler.engine.tokenizer, tokens)
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": scored,
            "finish_reason": reason_of(completion.finish_reason),
        }

    def _prompt_logprobs(self, generation: Generation) -> list[dict[str, Any] | None]:
        prompt, completion = generation.requests[0].prompt, generation.completion()
        values = completion.prompt_logprobs or ()
        tops = completion.prompt_top_logprobs or (None,) * len(values)
        return logprobs.by_id(self._handler.engine.tokenizer, list(zip(prompt, values, tops, strict=True)))

    async def _stream(self, http_call: HttpCall, body: ChatBody, generation: Generation, usage_wanted: bool) -> None:
        header = header_of(http_call, "chat.completion.chunk", "chatcmpl", self._name)
        if usage_wanted:
            header["usage"] = None
        started: set[int] = set()
        async for deltas in generation:
            chunks = []
            for index, delta in deltas:
                if index not in started:
                    started.add(index)
                    role = {"role": "assistant", "content": ""}
                    chunks.append({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
                chunks.append(self._piece(body, index, delta))
            events = [sse.event(header | {"choices": [chunk]}) for chunk in chunks if chunk is not None]
            if events:
                await http_call.event(b"".join(events))
        last = b""
        if usage_wanted:
            last = sse.event(header | {"choices": [], "usage": usage_of(generation, body.n or 1)})
        await http_call.event(last + sse.DONE)
        await http_call.end()

    def _piece(self, body: ChatBody, index: int, delta: Delta) -> dict[str, Any] | None:
        scored = None
        if body.logprobs and delta.token_ids:
            tokens = logprobs.generated(delta.token_ids, delta.logprobs, delta.top_logprobs)
            scored = logprobs.chat(self._handler.engine.tokenizer, tokens)
        if not delta.text and scored is None and delta.finish_reason is None:
            return None
        content = {"content": delta.text} if delta.text or scored is not None else {}
        reason = reason_of(delta.finish_reason)
        return {"index": index, "delta": content, "logprobs": scored, "finish_reason": reason}
