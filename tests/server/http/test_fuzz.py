"""Hostile callers of the HTTP port: nothing crashes, nothing leaks, and whoever behaves is served."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server import fuzz
from tests.server.conftest import Served
from tests.server.test_fuzz import BATCH, assert_nothing_is_left

Serve = Callable[..., None]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/generate", "/generate_stream", "/")
OTHER_PATHS = (
    *("/v1/models/x", "/v1/models/%00", "/..%2f", "/metrics", "/nowhere"),
    *("/v2", "/v2/health/ready", "/v2/models/echo", "/v2/models/%2f/ready", "/v2/models/echo/versions/1/infer"),
)
STATUSES = {200, 400, 404, 405, 408, 411, 413, 415, 422, 429, 431, 501, 504}  # 500 and 424 are failures of ours
FIELDS = (
    *(
        "model",
        "prompt",
        "inputs",
        "parameters",
        "messages",
        "max_tokens",
        "max_new_tokens",
        "temperature",
        "top_p",
        "n",
    ),
    *(
        "best_of",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "echo",
        "seed",
        "logit_bias",
        "tokens",
        "suffix",
        "user",
    ),
    *("use_beam_search", "length_penalty", "early_stopping", "min_tokens", "bad_words", "timeout"),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=30)
    | st.sampled_from(("echo", "abc", 0, 1, 20, "\ud800", "{{ 7 * 7 }}"))
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=7).map(lambda body: {"model": "echo"} | body)
encoded = bodies.map(lambda body: json.dumps(body).encode())
whole = st.builds(
    lambda method, path, body, kind: (
        (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        + body
    ),
    st.sampled_from(("POST", "POST", "POST", "POST", "GET", "PUT", "OPTIONS")),
    st.sampled_from(PATHS) | st.sampled_from(OTHER_PATHS),
    encoded | encoded | encoded | st.binary(max_size=60) | st.sampled_from((b"[" * 5000, b"{}", b"null", b'{"a":NaN}')),
    st.sampled_from(("application/json", "application/json", "application/json", "text/plain", "")),
)
raw = st.binary(max_size=200) | st.sampled_from(
    (
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
)
requests = st.tuples(whole | whole | whole | raw, st.sampled_from(("read", "read", "read", "half-close", "leave")))


async def send(port: int, request: bytes, manner: str) -> int | None:
    """The status that a request is answered with; None where it is not, or nobody waits for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if manner == "leave":
            return None
        if manner == "half-close" or b"Connection: close" not in request:
            writer.write_eof()
        async with asyncio.timeout(1 if b"Connection: close" not in request else 15):
            answer = await reader.read(2**20)
        return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None
    except (OSError, TimeoutError):
        return None
    finally:
        writer.transport.abort()


def attacked(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    async def scenario(it: Served) -> None:
        assert it.http_port is not None
        room = asyncio.Semaphore(8)

        async def one(request: bytes, manner: str) -> None:
            async with room:
                status = await send(it.http_port or 0, request, manner)
                assert status is None or status in STATUSES, (status, request, manner)

        good: Any = it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=7))
        await asyncio.gather(*(one(*each) for each in hostile))
        assert (await good).text == "abcabca"
        await fuzz.reset_connections(f"127.0.0.1:{it.http_port}", 20)
        await assert_nothing_is_left(it)

    serve(scenario, http_port=0)


@settings(fuzz.together, max_examples=10)
@given(hostile=st.lists(requests, min_size=BATCH, max_size=BATCH))
def test_hostile_requests(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    attacked(serve, hostile)


@pytest.mark.exhaustive
@settings(fuzz.together, max_examples=400)
@given(hostile=st.lists(requests, min_size=BATCH, max_size=BATCH))
def test_ten_thousand_hostile_requests(serve: Serve, hostile: list[tuple[bytes, str]]) -> None:
    attacked(serve, hostile)
