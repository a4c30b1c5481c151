"""`/v1/responses`: an answer as items, whole or as a stream of events. Nothing is stored."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion, Delta
from jaxserve.request import FinishReason, Request
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_calls import Piece
from server.call import Call, new_id
from server.handler import RequestHandler
from server.http import logprobs
from server.http.call import HttpCall
from server.http.openai import check_model
from server.http.responses_body import FIELDS, ResponsesBody
from server.http.schemas import ChatBody
from server.http.tool_calls import new_call_id

Events = list[dict[str, Any]]


class Responses:
    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(ResponsesBody)
        check_model(body, self._handler.model_names)
        with _own_names():
            chat, prompts = await http_call.offload(lambda: _prompts(body))
            await self._answer(http_call, body, chat, prompts)

    async def _answer(
        self, http_call: HttpCall, body: ResponsesBody, chat: ChatBody, prompts: list[dict[str, Any]]
    ) -> None:
        tokenizer, use = self._handler.engine.tokenizer, chat.tool_use
        template = None if tokenizer is None else tokenizer.chat_template
        if use is not None:
            use.check(template)

        def adjust(request: Request) -> Request:
            usual = self._handler.engine.request_defaults.get("max_tokens")
            return self._handler.fill_context(request, usual) if chat.fills_context else request

        call = Call(id=http_call.id, protocol="http")
        told = {
            "special_tokens": use is not None and use.special_tokens(template),
            # Which text a logprob is of must not depend on what came together.
            "by_token": body.has_logprobs,
        }
        async with self._handler.generate(prompts, call, adjust=adjust, **told) as generation:
            answer = Answer(body, chat, tokenizer, f"resp_{call.id}", self._handler.model_name)
            if body.stream:
                await http_call.events(answer.start(), named=True)
            async for deltas in generation:
                events = [event for _, delta in deltas for event in answer.add(delta)]
                if body.stream:
                    await http_call.events(events, named=True)
            events = answer.end(generation.completion())
            if body.stream:
                await http_call.events(events, named=True)
                await http_call.end()
            else:
                await http_call.json(answer.response)


def _prompts(body: ResponsesBody) -> tuple[ChatBody, list[dict[str, Any]]]:
    """The body as a chat, and the fields of its prompt. Raises InvalidRequest."""
    chat = body.chat
    sampling = chat.sampling
    return chat, [prompt | sampling for prompt in chat.prompts]


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Names fields in errors as this call has them, and not as a chat has them."""
    try:
        yield
    except InvalidRequest as problem:
        if problem.field not in FIELDS:
            raise
        raise InvalidRequest(FIELDS[problem.field], str(problem).removeprefix(f"{problem.field}: ")) from problem


class Answer:
    """Makes the items of a response, and the events that tell of them.

    Attributes:
      response: as it is so far.
    """

    def __init__(
        self, body: ResponsesBody, chat: ChatBody, tokenizer: Tokenizer | None, response_id: str, model: str
    ) -> None:
        template = None if tokenizer is None else tokenizer.chat_template
        self._parser = None if chat.tool_use is None else chat.tool_use.parser(template)
        self._tokenizer, self._has_logprobs = tokenizer, body.has_logprobs
        self._scored: list[Any] = []  # logprobs of tokens whose text, if any, is to come
        self._events: Events = []
        self._number = 0  # of the next event
        self._item: dict[str, Any] | None = None  # the one that is not complete
        given = body.model_dump(by_alias=True, exclude_none=True)
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": given.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": given.get("temperature"),
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": given.get("top_p"),
            "truncation": "disabled",
        }

    def start(self) -> Events:
        self._tell("response.created", response=self.response)
        self._tell("response.in_progress", response=self.response)
        return self._told()

    def add(self, delta: Delta) -> Events:
        """What a delta adds."""
        pieces = [Piece("content", delta.text)] if delta.text else []
        if self._parser is not None:
            ends = delta.finish_reason is not None
            pieces = self._parser.push(delta.text) + (self._parser.flush() if ends else [])
        if self._has_logprobs:
            self._scored += logprobs.chat(self._tokenizer, logprobs.generated(delta))["content"]
        for piece in pieces:
            self._add(piece)
        return self._told()

    def end(self, completion: Completion) -> Events:
        """Completes the response."""
        is_cut = completion.finish_reason is FinishReason.LENGTH
        if self._item is None or (self._scored and self._item["type"] == "message"):
            self._add(Piece("content", ""))
        self._close("incomplete" if is_cut else "completed")
        given, made = completion.prompt_tokens, len(completion.token_ids)
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {"cached_tokens": completion.cached_tokens},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": given + made,
            },
        }
        self._tell(f"response.{self.response['status']}", response=self.response)
        return self._told()

    def _add(self, piece: Piece) -> None:
        scored, self._scored = self._scored, []
        if piece.kind == "name":
            self._open({"type": "function_call", "id": f"fc_{new_id()}", "call_id": new_call_id(), "name": piece.text})
            return
        if piece.kind == "content" and (self._item is None or self._item["type"] != "message"):
            self._open({"type": "message", "id": f"msg_{new_id()}", "role": "assistant"})
        assert self._item is not None
        if piece.kind == "content":
            (part,) = self._item["content"]
            part["text"] += piece.text
            part["logprobs"] += scored
            where = self._where | {"content_index": 0}
            self._tell("response.output_text.delta", **where, delta=piece.text, logprobs=scored)
        else:
            self._item["arguments"] += piece.text
            self._tell("response.function_call_arguments.delta", **self._where, delta=piece.text)

    def _open(self, item: dict[str, Any]) -> None:
        """Begins an item, after the last one is complete."""
        self._close("completed")
        is_message = item["type"] == "message"
        self._item = item | {"status": "in_progress"} | ({"content": []} if is_message else {"arguments": ""})
        self.response["output"].append(self._item)
        self._tell("response.output_item.added", output_index=self._index, item=self._item)
        if is_message:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._item["content"].append(part)
            self._tell("response.content_part.added", **self._where, content_index=0, part=part)

    def _close(self, status: str) -> None:
        if (item := self._item) is None:
            return
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            where = self._where | {"content_index": 0}
            self._tell("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            self._tell("response.content_part.done", **where, part=part)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **self._where, **told)
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self._item = None

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _where(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._index}

    def _tell(self, kind: str, **fields: Any) -> None:
        # A copy: what an event says must not change with the response.
        self._events.append(copy.deepcopy({"type": kind, "sequence_number": self._number} | fields))
        self._number += 1

    def _told(self) -> Events:
        told, self._events = self._events, []
        return told
