"""`/v1/embeddings`, as OpenAI's API has it."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from jaxserve.errors import InvalidRequest
from server.call import Call
from server.embed import embed
from server.handler import RequestHandler
from server.http.body import Body
from server.http.call import HttpCall
from server.http.openai import check_model
from server.http.schemas import check_prompts, prompt_fields


class EmbeddingsBody(Body):
    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field(default="", max_length=256)

    _are_prompts = field_validator("input")(check_prompts)


class EmbeddingsEndpoint:
    """The endpoint, on one model."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    async def __call__(self, http_call: HttpCall) -> None:
        body = await http_call.body(EmbeddingsBody)
        check_model(body, self._handler.model_names)
        special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
        prompts = [fields | special for fields in prompt_fields(body.input)]
        call = Call(id=http_call.id, protocol="http", priority=body.priority, cache_salt=body.cache_salt)
        found = await embed(self._handler, prompts, call, body.pooling)
        if body.dimensions not in (None, size := len(found.values[0])):
            raise InvalidRequest("dimensions", f"is {body.dimensions}; embeddings of this model have {size}")

        def answer() -> dict[str, Any]:
            data = [
                {"object": "embedding", "index": index, "embedding": _encoded(values, body.encoding_format)}
                for index, values in enumerate(found.values)
            ]
            usage = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
            return {"object": "list", "data": data, "model": self._handler.model_name, "usage": usage}

        await http_call.made_json(4 * size * len(found.values), answer)


def _encoded(values: list[float], form: str) -> list[float] | str:
    """The numbers, or their little-endian float32 in base64."""
    return values if form == "float" else base64.b64encode(np.array(values, "<f4").tobytes()).decode()
