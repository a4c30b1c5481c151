"""`/score` and `/rerank`. The engine says of position i of a prompt that its token has the logprob -i / 4."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.http.http_calls import ask, post

Serve = Callable[..., None]


def mean(start: int, end: int) -> float:
    return sum(-position / 4 for position in range(start, end)) / (end - start)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_score_is_the_mean_logprob_of_the_second_text(serve_http: Serve, path: str) -> None:
    async def scenario(it: Served) -> None:
        answer = await ask(it, path, text_1="abc", text_2=["de", "defg"])
        assert answer["data"] == [
            {"index": 0, "object": "score", "score": mean(3, 5)},
            {"index": 1, "object": "score", "score": mean(3, 7)},
        ]
        assert (answer["object"], answer["model"]) == ("list", "echo")
        assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
        for fields in ({"text_1": ["abc", "a"], "text_2": "de"}, {"text_1": ["abc", "a"], "text_2": ["de", "fg"]}):
            scores = [each["score"] for each in (await ask(it, path, **fields))["data"]]
            assert scores == [mean(3, 5), mean(1, 3)]

    serve_http(scenario)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_query_after_them(serve_http: Serve, path: str) -> None:
    """After a longer document the query stands further back, where this engine finds everything less likely."""

    async def scenario(it: Served) -> None:
        documents = ["four", {"text": "a"}, "two"]
        answer = await ask(it, path, query="xy", documents=documents)
        assert [(each["index"], each["document"]["text"]) for each in answer["results"]] == [
            (1, "a"),
            (2, "two"),
            (0, "four"),
        ]
        assert answer["results"][0]["relevance_score"] == pytest.approx(math.exp(mean(2, 4)))
        assert answer["usage"]["total_tokens"] == len("four\nxy" + "a\nxy" + "two\nxy")
        answer = await ask(it, path, query="xy", documents=documents, top_n=2, return_documents=False)
        assert [each["index"] for each in answer["results"]] == [1, 2]
        assert all("document" not in each for each in answer["results"])

    serve_http(scenario)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 1025}, "text_2"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_what_is_wrong_is_refused_by_name(serve_http: Serve, path: str, fields: dict[str, Any], param: str) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, path, **fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert (await post(it, path, **fields | {"model": "other"}))[0] in (400, 404)

    serve_http(scenario)
