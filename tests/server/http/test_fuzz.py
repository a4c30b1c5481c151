"""Hostile callers of the HTTP port: nothing crashes, nothing leaks, and whoever behaves is served."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server import fuzz
from tests.server.conftest import Served
from tests.server.http.fuzz import attack, requests
from tests.server.test_fuzz import BATCH, assert_nothing_is_left

Serve = Callable[..., None]


def attacked(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    async def scenario(it: Served) -> None:
        assert it.http_port is not None
        good: Any = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=7))
        await attack(it.http_port, hostile)
        assert (await good).text == "abcabca"
        await fuzz.reset_connections(f"127.0.0.1:{it.http_port}", 20)
        await assert_nothing_is_left(it)

    serve(scenario, http_port=0)


@settings(fuzz.together, max_examples=10)
@given(hostile=st.lists(requests, min_size=BATCH, max_size=BATCH))
def test_hostile_requests(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    attacked(serve, hostile)


@pytest.mark.weekly
@settings(fuzz.together, max_examples=400)
@given(hostile=st.lists(requests, min_size=BATCH, max_size=BATCH))
def test_ten_thousand_hostile_requests(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    attacked(serve, hostile)
