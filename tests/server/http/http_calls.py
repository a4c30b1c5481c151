"""Calls over HTTP that tests make, and what comes back as JSON."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx

from tests.server.conftest import Served


async def post(it: Served, path: str, /, **body: Any) -> tuple[int, Any]:
    """(status, JSON) of one call."""
    async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
        answer = await client.post(path, json=body)
        return answer.status_code, answer.json()


async def ask(it: Served, path: str, /, **body: Any) -> Any:
    """The JSON of a call that is answered."""
    status, answer = await post(it, path, **body)
    assert status == 200, answer
    return answer


async def events(it: Served, path: str, /, **body: Any) -> AsyncIterator[Any]:
    """The JSON of each server-sent event; None for OpenAI's [DONE]."""
    async with (
        httpx.AsyncClient(base_url=it.url, timeout=None) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                yield None if data == "[DONE]" else json.loads(data)
