"""Embeddings: the pooled hidden states of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from jaxserve.errors import InvalidRequest, shown
from jaxserve.generation.completion import Completion
from jaxserve.request import Pooling

# The engine generates at least one token, which is dropped.
SAMPLING: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}


def parse_pooling(value: Any) -> Pooling:
    """The pooling that a caller asks for; None is "last". Raises InvalidRequest."""
    if value is None:
        return "last"
    if value not in get_args(Pooling):
        raise InvalidRequest("pooling", f"is {shown(value)}; it must be one of {', '.join(get_args(Pooling))}")
    return value


def normalized(values: Sequence[float]) -> list[float]:
    """The values divided by their Euclidean norm."""
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return [value / length for value in values]


def of(completion: Completion) -> tuple[float, ...]:
    """The embedding of a completion's prompt. Raises RuntimeError if its request has failed."""
    if completion.embedding is None:
        raise RuntimeError(completion.error or "the request was ended")
    return completion.embedding
