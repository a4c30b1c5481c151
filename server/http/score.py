"""`/score` and `/rerank`: how likely a text is after another, by the model's own logprobs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion
from server.call import Call
from server.handler import RequestHandler
from server.http.body import Body
from server.http.call import HttpCall
from server.http.openai import check_model
from server.limits import MAX_PROMPTS
from server.text import REQUEST_WORK, offload_if_long

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
# The text is scored, and the token after it dropped: the engine generates at least one.
_SCORING = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


class ScoreBody(Body):
    model: str | None = None
    text_1: str | Texts
    text_2: str | Texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each first text with its second; one text stands for as many as the other list has."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        most = max(len(first), len(second))
        if len(first) not in (1, most) or len(second) not in (1, most):
            raise InvalidRequest("text_2", f"has {len(second)} texts, and text_1 has {len(first)}; or give one text")
        return list(zip(first * (most // len(first)), second * (most // len(second)), strict=True))


class Document(Body):
    text: str


class RerankBody(Body):
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Scoring:
    """The endpoints, on one model."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def score(self, http_call: HttpCall) -> None:
        body = await http_call.body(ScoreBody)
        check_model(body, self._handler.model_names)
        scores, tokens = await self._scores(http_call, body.pairs, ("text_1", "text_2"))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{http_call.id}", "object": "list", "created": int(time.time())}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await http_call.json(head | {"model": self._handler.model_name, "data": data, "usage": usage})

    async def rerank(self, http_call: HttpCall) -> None:
        body = await http_call.body(RerankBody)
        check_model(body, self._handler.model_names)
        pairs = [(text + "\n", body.query) for text in body.texts]
        scores, tokens = await self._scores(http_call, pairs, ("documents", "query"))
        ranked = sorted(enumerate(scores), key=lambda each: -each[1])
        results: list[dict[str, Any]] = []
        for index, score in ranked[: body.top_n]:
            document = {"document": {"text": body.texts[index]}} if body.return_documents else {}
            results.append({"index": index, "relevance_score": math.exp(score)} | document)
        head = {"id": f"rerank-{http_call.id}", "model": self._handler.model_name}
        await http_call.json(head | {"results": results, "usage": {"total_tokens": tokens}})

    async def _scores(
        self, http_call: HttpCall, pairs: Sequence[tuple[str, str]], fields: tuple[str, str]
    ) -> tuple[list[float], int]:
        """Mean logprobs of second texts' tokens after the first text, and the number of all tokens.

        Args:
          fields: names of the texts, for errors.
        """

        def tokenized() -> list[tuple[list[int], list[int]]]:
            found = []
            for first, second in pairs:
                before = self._handler.text.ids(first, field=fields[0])
                scored = self._handler.text.ids(second, field=fields[1], special_tokens=False)
                for field, ids in zip(fields, (before, scored), strict=True):
                    if not ids:
                        raise InvalidRequest(field, "has a text without tokens")
                found.append((before, scored))
            return found

        size = sum([REQUEST_WORK + len(first) + len(second) for first, second in pairs])
        ids = await self._handler.before_admission(size, tokenized)
        prompts = [{"prompt_token_ids": before + scored} | _SCORING for before, scored in ids]
        call = Call(id=http_call.id, protocol="http", has_defaults=False)
        async with self._handler.generate(prompts, call) as generation:
            await generation.finish()

            def means() -> list[float]:
                return [
                    _mean(each, len(before)) for each, (before, _) in zip(generation.completions(), ids, strict=True)
                ]

            scores = await offload_if_long(generation.answer_work, means)
        return scores, sum(len(request.prompt) for request in generation.requests)


def _mean(completion: Completion, start: int) -> float:
    """The mean logprob of a prompt's tokens from one on."""
    logprobs = [each for each in (completion.prompt_logprobs or ())[start:] if each is not None]
    return sum(logprobs) / len(logprobs)
