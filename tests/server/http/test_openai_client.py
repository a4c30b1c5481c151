"""The official `openai` client, as it comes, against a server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from tests.server.conftest import Served

openai = pytest.importorskip("openai")

Serve = Callable[..., None]
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = 1500  # tokens: more than any test waits for


def client(it: Served) -> Any:
    return openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0)


def test_completions(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            answer = await ai.completions.create(
                model="echo",
                prompt=["abc", "de"],
                max_tokens=4,
                n=2,
                temperature=0.5,
                seed=7,
                logprobs=1,
                echo=True,
                stop=["x", "y"],
                logit_bias={"97": 1},
                presence_penalty=0.1,
                frequency_penalty=0.1,
                user="someone",
            )
            assert [choice.text for choice in answer.choices] == ["abcabca"] * 2 + ["dedede"] * 2
            assert answer.choices[0].logprobs.token_logprobs[:2] == [None, -0.25]
            assert answer.usage.total_tokens == 21
            text, usage = "", None
            async for chunk in await ai.completions.create(
                model="echo", prompt="abc", max_tokens=5, stream=True, stream_options={"include_usage": True}
            ):
                text += "".join(choice.text for choice in chunk.choices)
                usage = chunk.usage
            assert (text, usage.completion_tokens) == ("abcab", 5)

    serve_http(scenario)


def test_chats(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            answer = await ai.chat.completions.create(
                model="echo", messages=CHAT, max_completion_tokens=5, logprobs=True, top_logprobs=2
            )
            assert answer.choices[0].message.content == "<user"
            assert [token.token for token in answer.choices[0].logprobs.content] == list("<user")
            text = ""
            async for chunk in await ai.chat.completions.create(
                model="echo", messages=CHAT, max_tokens=8, stream=True, n=1
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == "<user>Hi"
            async with ai.chat.completions.stream(model="echo", messages=CHAT, stop=">") as stream:
                last = await stream.get_final_completion()
            assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("<user", "stop")

    serve_http(scenario)


def test_an_answer_is_sent_back(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            messages = [*CHAT]
            answer = await ai.chat.completions.create(model="echo", messages=messages, max_tokens=3)
            message = answer.choices[0].message
            for sent in (message, message.model_dump()):
                messages = [*CHAT, sent, {"role": "user", "content": "more"}]
                again = await ai.chat.completions.create(model="echo", messages=messages, max_tokens=40)
                assert again.choices[0].message.content.startswith("<user>Hi<assistant><us<user>more<bot>")

    serve_http(scenario)


def test_models(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            assert [model.id async for model in ai.models.list()] == ["echo"]
            assert (await ai.models.retrieve("echo")).id == "echo"

    serve_http(scenario)


def test_errors_are_the_clients_own(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            with pytest.raises(openai.BadRequestError) as wrong:
                await ai.completions.create(model="echo", prompt="a", temperature=-1)
            assert wrong.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await ai.completions.create(model="other", prompt="a")
            with pytest.raises(openai.InternalServerError):
                await ai.completions.create(model="echo", prompt="!")

    serve_http(scenario, poison=frozenset(b"!"))


def test_full_queue_and_closed_stream(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            ask: dict[str, Any] = {"model": "echo", "prompt": "abc", "max_tokens": LONG, "stream": True}
            starting = asyncio.create_task(ai.completions.create(**ask))
            await it.until(lambda: it.engine.load().waiting == 1)
            with pytest.raises(openai.RateLimitError) as full:
                await ai.completions.create(**ask)
            assert full.value.response.headers["retry-after"] == "1"
            await it.step()
            stream = await starting
            assert (await anext(stream)).choices[0].text == "a"
            await stream.close()
            await it.until(lambda: it.engine.load().slots_used == 0)
            assert it.engine.iterations == 1

    serve_http(scenario, held=True, config=EngineConfig(max_rows=1, max_queued_requests=1))
