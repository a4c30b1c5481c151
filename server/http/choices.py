"""The choices in answers of OpenAI's API, complete or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.generation.completion import Completion, Delta
from jaxserve.request import FinishReason, Request
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tool_calls import Piece
from server.http import logprobs, tool_calls

_REASONS = {None: None, FinishReason.LENGTH: "length", FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


class Choice:
    """One choice of a completion.

    Args:
      body: a CompletionBody.
      index: of the choice.
    """

    def __init__(self, tokenizer: Tokenizer | None, body: Any, request: Request, index: int) -> None:
        self._tokenizer, self._body, self._request, self._index = tokenizer, body, request, index
        self._legacy = logprobs.Legacy(tokenizer)
        self._scored = 0  # prompt tokens sent so far
        self._has_begun = False

    def whole(self, completion: Completion) -> dict[str, Any]:
        (choice,) = self.pieces(completion.delta)
        return choice

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta makes; none if it has nothing new."""
        body, reason = self._body, _REASONS[delta.finish_reason]
        if body.max_tokens == 0:  # the engine generates at least one token; it is dropped
            delta = delta._replace(text="", token_ids=(), logprobs=(), top_logprobs=())
            reason = reason and "length"
        text, prompt_scored = delta.text, self._prompt(delta)
        is_first, self._has_begun = not self._has_begun, True
        if body.echo and is_first:
            text = self._prompt_text() + text
        lines: dict[str, Any] | None = None
        if body.logprobs is not None:
            lines = self._legacy.add([*(prompt_scored if body.echo else ()), *logprobs.generated(delta)])
        asked = body.prompt_logprobs is not None and bool(prompt_scored)
        ids = list(delta.token_ids) if body.return_token_ids else []
        if not text and reason is None and not asked and not ids and not (lines and lines["tokens"]):
            return []
        choice = {"index": self._index, "text": text, "logprobs": lines, "finish_reason": reason}
        if asked:
            choice["prompt_logprobs"] = logprobs.by_id(self._tokenizer, prompt_scored)
        if body.return_token_ids:
            choice["token_ids"] = ids
            if is_first:
                choice["prompt_token_ids"] = list(self._request.prompt)
        return [choice]

    def of_the_call(self, completion: Completion) -> dict[str, Any]:
        """Fields that the first choice adds to the complete answer."""
        return {}

    def of_the_stream(self) -> dict[str, Any]:
        """Fields that the first choice adds to the first chunk."""
        return {}

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
        given: str | Sequence[int] = self._body.prompt[self._index // (self._body.n or 1)]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return "" if self._tokenizer is None else self._tokenizer.decode(self._request.prompt)


class ChatChoice(Choice):
    """One choice of a chat; `body` is a ChatBody."""

    def __init__(self, tokenizer: Tokenizer | None, body: Any, request: Request, index: int) -> None:
        super().__init__(tokenizer, body, request, index)
        template = None if tokenizer is None else tokenizer.chat_template
        self._parser = None if body.tool_use is None else body.tool_use.parser(template)
        self._deltas = tool_calls.CallDeltas()

    def whole(self, completion: Completion) -> dict[str, Any]:
        answer = tool_calls.message(self._read(completion.delta))
        return {
            "index": self._index,
            "message": {"role": "assistant"} | answer | {"refusal": None},
            "logprobs": self._logprobs(completion.delta) if self._body.logprobs else None,
            "finish_reason": self._reason(completion.finish_reason),
        } | self._token_ids(completion.delta)

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        if not self._has_begun:
            found.append(self._piece({"role": "assistant", "content": ""}))
        self._has_begun = True
        scored = self._logprobs(delta) if self._body.logprobs and delta.token_ids else None
        ids = self._token_ids(delta)
        deltas = self._deltas.of(self._read(delta))
        if not deltas and (scored is not None or delta.finish_reason is not None or any(ids.values())):
            deltas = [{} if scored is None else {"content": ""}]
        found += [self._piece(each) for each in deltas[:-1]]
        found += [self._piece(last, scored, self._reason(delta.finish_reason)) | ids for last in deltas[-1:]]
        return found

    def _read(self, delta: Delta) -> list[Piece]:
        """What a delta adds: text, and calls of tools."""
        if self._parser is None:
            return [Piece("content", delta.text)] if delta.text else []
        return self._parser.push(delta.text) + (self._parser.flush() if delta.finish_reason is not None else [])

    def _reason(self, reason: FinishReason | None) -> str | None:
        called = self._parser is not None and self._parser.calls and reason in (FinishReason.EOS, FinishReason.STOP)
        return "tool_calls" if called else _REASONS[reason]

    def of_the_call(self, completion: Completion) -> dict[str, Any]:
        found = self.of_the_stream()
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = logprobs.by_id(self._tokenizer, self._prompt(completion.delta))
        return found

    def of_the_stream(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._request.prompt)} if self._body.return_token_ids else {}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.token_ids)} if self._body.return_token_ids else {}

    def _piece(self, delta: Any, scored: Any = None, reason: str | None = None) -> dict[str, Any]:
        if self._body.for_tgi:
            delta = {"role": "assistant", "tool_calls": None} | delta
        return {"index": self._index, "delta": delta, "logprobs": scored, "finish_reason": reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return logprobs.chat(self._tokenizer, logprobs.generated(delta))
