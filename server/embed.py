"""Embeddings of prompts, for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxserve.generation import embedding
from server.call import Call
from server.handler import RequestHandler
from server.text import offload_if_long


class Embeddings(NamedTuple):
    """An embedding of each prompt, of unit length, and the number of all their tokens."""

    values: list[list[float]]
    prompt_tokens: int
    cached_tokens: int


async def embed(handler: RequestHandler, prompts: Sequence[Mapping[str, Any]], call: Call, pooling: Any) -> Embeddings:
    """Embeds the prompts of a call.

    Args:
      prompts: fields of each prompt, as `parse_request` takes them.
      pooling: see `Request`; None is the default.

    Raises: as `RequestHandler.generate`.
    """
    kind = embedding.parse_pooling(pooling)
    fields = [{**prompt, **embedding.SAMPLING} for prompt in prompts]
    adjust = lambda request: replace(request, pooling=kind)  # noqa: E731
    async with handler.generate(fields, replace(call, has_defaults=False), adjust=adjust) as generation:
        await generation.finish()
        completions = generation.completions()
    numbers = sum([len(each.embedding or ()) for each in completions])
    values = await offload_if_long(
        numbers, lambda: [embedding.normalized(embedding.of(completion)) for completion in completions]
    )
    return Embeddings(values, *(sum(getattr(each, name) for each in completions) for name in Embeddings._fields[1:]))
