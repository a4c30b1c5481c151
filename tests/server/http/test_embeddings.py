"""`/v1/embeddings`. The engine's embedding of a prompt of n tokens is (4n, 3n), or (4n, -3n) for the mean."""

import base64
from collections.abc import Callable

import numpy as np
import openai
import pytest

from tests.server.conftest import Served
from tests.server.http.http_calls import ask, post

Serve = Callable[..., None]


def test_each_input_has_an_embedding_of_unit_length(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        for given, tokens in (("abc", 3), (["abc", "d"], 4), ([1, 2, 3, 4], 4), ([[1], [2, 3]], 3)):
            answer = await ask(it, "/v1/embeddings", input=given, model="echo")
            count = len(given) if isinstance(given[0], str) and not isinstance(given, str) else 1
            count = len(given) if isinstance(given[0], list) else count
            assert [each["index"] for each in answer["data"]] == list(range(count))
            assert all(each["embedding"] == pytest.approx([0.8, 0.6]) for each in answer["data"])
            assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = await ask(it, "/v1/embeddings", input="abc", pooling="mean", encoding_format="base64", dimensions=2)
        found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
        assert found == pytest.approx([0.8, -0.6])

    serve_http(scenario)


def test_the_openai_client_reads_them(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client:
            found = await client.embeddings.create(model="echo", input=["abc", "d"])
        assert [each.embedding for each in found.data] == [pytest.approx([0.8, 0.6])] * 2

    serve_http(scenario)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": "a", "dimensions": 3}, "dimensions", "is 3; embeddings of this model have 2"),
        ({"input": "a", "pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ["a"] * 1025}, "input", "too many prompts; one call may have 1024"),
        ({"input": ""}, "prompt", "is empty"),
        ({}, "input", "required"),
        ({"input": "a", "model": "other"}, "model", "is not served here"),
    ],
)
def test_what_is_wrong_is_told(serve_http: Serve, fields: dict, param: str, told: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, "/v1/embeddings", **fields)
        assert status == (404 if param == "model" else 400)
        assert answer["error"]["param"] == param
        assert told in answer["error"]["message"]

    serve_http(scenario)
