"""Hugging Face's own client of TGI servers, as it comes."""

from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest

from tests.server.conftest import Served

Serve = Callable[..., None]
CHAT = [{"role": "user", "content": "Hi"}]


def client(it: Served, **settings: Any) -> huggingface_hub.AsyncInferenceClient:
    return huggingface_hub.AsyncInferenceClient(**settings or {"model": it.url}, token="none")


def test_texts(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with client(it) as ai:
            assert await ai.text_generation("abc", max_new_tokens=4, return_full_text=False) == "abca"
            assert await ai.text_generation("abc", max_new_tokens=4) == "abcabca"
            found = await ai.text_generation("abc", max_new_tokens=2, details=True, decoder_input_details=True, seed=3)
            assert [token.text for token in found.details.tokens] == ["a", "b"]
            assert [token.text for token in found.details.prefill] == ["a", "b", "c"]
            stream = await ai.text_generation("abc", max_new_tokens=5, stream=True, stop=["ca"])
            assert "".join([piece async for piece in stream]) == "abca"
            with pytest.raises(huggingface_hub.errors.ValidationError, match="top_p"):
                await ai.text_generation("abc", top_p=2.0)

    serve_http(scenario)


@pytest.mark.parametrize("named", ["model", "base_url"])
def test_chats(serve_http: Serve, named: str) -> None:
    async def scenario(it: Served) -> None:
        async with client(it, **{named: it.url if named == "model" else f"{it.url}/v1"}) as ai:
            answer = await ai.chat_completion(CHAT, max_tokens=8, seed=1)
            assert answer.choices[0].message.content == "<user>Hi"
            text = ""
            async for chunk in await ai.chat_completion(CHAT, max_tokens=8, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == "<user>Hi"
            answer = await ai.chat.completions.create(
                messages=CHAT, max_tokens=2, logprobs=True, top_logprobs=1, stop=["x"], tools=[], tool_choice="none"
            )
            assert answer.choices[0].logprobs.content[0].token == "<"

    serve_http(scenario)
