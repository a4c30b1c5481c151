"""How structured output is asked for over HTTP: OpenAI's way and vLLM's, read or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.sampling_params import Grammar
from tests.server.conftest import Served
from tests.server.http.http_calls import ask, post

Serve = Callable[..., None]
SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}
NAMED = {"name": "thing", "description": "of ours", "schema": SCHEMA, "strict": False}
AS_JSON = Grammar(kind="json_schema", text='{"type":"object","properties":{"a":{"type":"null"}}}')
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_schema", text='{"type":"object"}')),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_JSON),
        ({"guided_json": SCHEMA}, AS_JSON),
        ({"guided_json": '{"type": "object", "properties": {"a": {"type": "null"}}}'}, AS_JSON),
        ({"guided_regex": "a+"}, Grammar(kind="regex", text="a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(kind="choice", text='["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar(kind="lark", text='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, AS_JSON),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(kind="regex", text="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(kind="choice", text='["a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(kind="lark", text='start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_schema", text='{"type":"object"}')),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, Grammar(kind="regex", text="a+")),
    ],
)
def test_every_form_becomes_the_same_request(
    serve_http: Serve, given: dict[str, Any], expected: Grammar | None
) -> None:
    async def scenario(it: Served) -> None:
        requests = []
        submit = it.engine.submit
        it.engine.submit = lambda request, sink: (requests.append(request), submit(request, sink))[1]  # pyright: ignore[reportAttributeAccessIssue]
        for path, fields in CALLS.items():
            await ask(it, path, **fields, **given)
        assert [request.sampling.grammar for request in requests] == [expected] * 2

    serve_http(scenario)


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format", "must not have it"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format",
            "cannot be compiled: Invalid type: strin",
        ),
        ({"guided_json": [1]}, "guided_json", "guided_json"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": ""}, "guided_regex", "not an empty one"),
        ({"guided_regex": "(a"}, "guided_regex", "cannot be compiled: unclosed group"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "has 70000 bytes; at most 65536"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_grammar": "nothing"}, "guided_grammar", "cannot be compiled"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "is not served"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "and guided_json are both given; give one"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "and response_format are both given",
        ),
    ],
)
def test_errors_name_the_callers_field(serve_http: Serve, given: dict[str, Any], param: str, told: str) -> None:
    async def scenario(it: Served) -> None:
        for path, fields in CALLS.items():
            for streams in (False, True):
                status, answer = await post(it, path, **fields, **given, stream=streams)
                assert status == 400
                assert (answer["error"]["param"], told in answer["error"]["message"]) == (param, True), answer
        assert it.engine.iterations == 0

    serve_http(scenario)


def test_without_a_tokenizer_it_is_refused(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, "/v1/completions", prompt=[97], guided_regex="a")
        assert (status, answer["error"]["param"]) == (400, "guided_regex")
        assert "needs a tokenizer" in answer["error"]["message"]

    serve_http(scenario, tokenizer=None)
