"""TGI's calls."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.fake_engine import EOS
from tests.server.http.http_calls import ask, events, post

Serve = Callable[..., None]


def test_generate_answers_with_text_and_details(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        parameters: dict[str, Any] = {"max_new_tokens": 2, "details": True, "decoder_input_details": True}
        answer = await ask(it, "/generate", inputs="abc", parameters=parameters | {"top_n_tokens": 1})
        tops = [[{"id": i, "text": chr(i), "logprob": 0.0, "special": False}] for i in (0, 1)]
        assert answer == {
            "generated_text": "ab",
            "details": {
                "finish_reason": "length",
                "generated_tokens": 2,
                "seed": None,
                "prefill": [
                    {"id": 97, "text": "a", "logprob": None},
                    {"id": 98, "text": "b", "logprob": -0.25},
                    {"id": 99, "text": "c", "logprob": -0.5},
                ],
                "tokens": [
                    {"id": 97, "text": "a", "logprob": 0.0, "special": False},
                    {"id": 98, "text": "b", "logprob": -0.25, "special": False},
                ],
                "top_tokens": tops,
            },
        }
        assert await ask(it, "/generate", inputs="abc", parameters={"max_new_tokens": 1}) == {"generated_text": "a"}
        assert len((await ask(it, "/generate", inputs="abc"))["generated_text"]) == 100
        full = {"max_new_tokens": 1, "return_full_text": True, "truncate": 2}
        assert await ask(it, "/generate", inputs="abc", parameters=full) == {"generated_text": "abcb"}

    serve_http(scenario)


def test_details_of_the_prompt_are_not_streamed(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
            status, answer = await post(it, path, inputs="abc", parameters={"decoder_input_details": True}, **more)
            assert (status, answer["error"][:21]) == (422, "decoder_input_details")

    serve_http(scenario)


def test_the_root_answers_a_list_with_the_prompt(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        one = {"max_new_tokens": 1}
        assert await ask(it, "/", inputs="abc", parameters=one) == [{"generated_text": "abca"}]
        without = one | {"return_full_text": False}
        assert await ask(it, "/", inputs="abc", parameters=without) == [{"generated_text": "a"}]
        (last,) = [event async for event in events(it, "/", inputs="abc", parameters=one, stream=True)]
        assert last["generated_text"] == "abca"
        status, answer = await post(it, "/", inputs="abc", parameters={"top_p": 2})
        assert (status, answer["error_type"]) == (422, "validation")

    serve_http(scenario)


@pytest.mark.parametrize("name", ["tgi", "dummy"])
def test_the_names_that_clients_give_every_model(serve_http: Serve, name: str) -> None:
    async def scenario(it: Served) -> None:
        chat = [{"role": "user", "content": "Hi"}]
        answer = await ask(it, "/v1/chat/completions", model=name, messages=chat, max_tokens=2)
        assert answer["model"] == "echo"
        assert (await ask(it, "/v1/completions", model=name, prompt="abc"))["model"] == "echo"

    serve_http(scenario)


def test_best_of_tells_of_the_others_too(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        parameters = {"max_new_tokens": 2, "best_of": 3, "do_sample": True, "seed": 1, "details": True}
        answer = await ask(it, "/generate", inputs="abc", parameters=parameters)
        others = answer["details"]["best_of_sequences"]
        assert [one["generated_text"] for one in others] == ["ab", "ab"]
        assert others[0]["generated_tokens"] == 2

    serve_http(scenario)


@pytest.mark.parametrize(("path", "more"), [("/generate_stream", {}), ("/", {"stream": True})])
def test_a_stream_has_an_event_a_token(serve_http: Serve, path: str, more: dict[str, Any]) -> None:
    async def scenario(it: Served) -> None:
        parameters = {"max_new_tokens": 9, "stop": ["ca"], "do_sample": True, "seed": 5}
        found = [event async for event in events(it, path, inputs="abcé", parameters=parameters, **more)]
        assert [event["index"] for event in found] == [*range(1, 10)]
        texts = [event["token"]["text"] for event in found]
        assert texts == ["a", "b", "c", "", "é", "a", "b", "c", ""]
        assert found[0]["token"] == {"id": 97, "text": "a", "logprob": 0.0, "special": False}
        assert all(event["generated_text"] is None and event["details"] is None for event in found[:-1])
        prompt = "abcé" if path == "/" else ""
        assert found[-1]["generated_text"] == prompt + "abcéabc\ufffd"
        ending = {"finish_reason": "length", "generated_tokens": 9, "seed": 5, "input_length": 5}
        assert found[-1]["details"] == ending
        ended = [event async for event in events(it, "/generate_stream", inputs="abab", parameters={"stop": ["ba"]})]
        assert (ended[-1]["generated_text"], ended[-1]["details"]["finish_reason"]) == ("a", "stop_sequence")

    serve_http(scenario)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"top_k": 3}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"top_p": 0.5}, 1.0),
    ],
)
def test_what_draws_and_what_is_greedy(given: dict[str, Any], temperature: float) -> None:
    from server.compat.tgi import _fields
    from server.compat.tgi_schemas import TgiParameters

    assert _fields(TgiParameters(**given))["temperature"] == temperature


@pytest.mark.parametrize(
    ("named", "parameters"),
    [
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("temperature", {"temperature": 0.0}),
        ("typical_p", {"typical_p": 0.0}),
        ("typical_p", {"typical_p": 1.5}),
        ("watermark", {"watermark": True}),
        ("grammar", {"grammar": {"type": "regex", "value": "(a"}}),
        ("grammar", {"grammar": {"type": "regex", "value": {}}}),
        ("grammar", {"grammar": {"type": "lark", "value": "a"}}),
        ("top_p", {"top_p": 1.5}),
        ("logit_bias", {"logit_bias": {"1": 1}}),
        ("max_tokens", {"max_new_tokens": 5000}),
    ],
)
def test_a_wrong_parameter_is_a_validation_error(serve_http: Serve, named: str, parameters: dict[str, Any]) -> None:
    async def scenario(it: Served) -> None:
        for path in ("/generate", "/generate_stream"):
            status, answer = await post(it, path, inputs="abc", parameters=parameters)
            assert (status, answer["error_type"]) == (422, "validation")
            assert named in answer["error"]

    serve_http(scenario)


def test_info_tells_the_limits(serve_http: Serve) -> None:
    import httpx2 as httpx

    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            told = (await client.get("/info")).json()
        assert (told["model_id"], told["max_total_tokens"], told["version"]) == ("echo", 2048, "1.2.3")

    serve_http(scenario)


def test_users_of_the_bloom_server_are_served(serve_http: Serve) -> None:
    """A random-length beginning of one prompt, a float as seed: what its load test sends."""

    async def scenario(it: Served) -> None:
        sentence = "Translate to chinese. EN: I like soup. CN: "
        draw = random.Random(0)
        for _ in range(5):
            inputs = sentence[: draw.randint(1, len(sentence))]
            parameters = {"max_new_tokens": 20, "do_sample": True, "top_p": 0.9, "seed": draw.random()}
            answer = await ask(it, "/generate", inputs=inputs, parameters=parameters)
            assert answer["generated_text"] == (inputs * 20)[:20]

    serve_http(scenario)


def test_end_of_sequence_is_named(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        found = [event async for event in events(it, "/generate_stream", inputs="a<eos>")]
        assert [event["token"]["special"] for event in found] == [False, True]
        assert found[-1]["token"]["id"] == EOS
        assert found[-1]["details"]["finish_reason"] == "eos_token"

    serve_http(scenario)
