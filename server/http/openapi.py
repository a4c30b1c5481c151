"""The OpenAPI description of the HTTP calls, from routes and schemas of bodies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from server.compat.kserve_messages import GenerateBody, InferBody
from server.compat.tgi_schemas import TgiBody
from server.http.embeddings import EmbeddingsBody
from server.http.responses_body import ResponsesBody
from server.http.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.http.score import RerankBody, ScoreBody

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingsBody,
    **dict.fromkeys(("/score", "/v1/score"), ScoreBody),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankBody),
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/generate": TgiBody,
    "/generate_stream": TgiBody,
    "/": TgiBody,
    "/v2/models/{name}/infer": InferBody,
    "/v2/models/{name}/generate": GenerateBody,
    "/v2/models/{name}/generate_stream": GenerateBody,
}
_REFERENCE = "#/components/schemas/{model}"


def description(routes: Sequence[BaseRoute], version: str) -> dict[str, Any]:
    """The document for the routes of an application."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


@functools.cache
def _schemas() -> dict[str, Any]:
    kinds = [(body, "validation") for body in dict.fromkeys(_BODIES.values())]
    _, schemas = models_json_schema(kinds, ref_template=_REFERENCE)  # pyright: ignore[reportArgumentType]
    return schemas["$defs"]


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    names = list(route.param_convertors)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {path}",
        "responses": {"200": {"description": "the answer"}, "default": {"description": "an error, as JSON"}},
    }
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST" and (body := _BODIES.get(path.replace("/versions/{version}", ""))) is not None:
        schema = {"$ref": _REFERENCE.format(model=body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
