"""Hostile callers of HTTP: requests that are malformed in every way, and requests that are nearly right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import strategies as st

from server.compat import kserve_messages, tgi_schemas
from server.http import schemas

OPENAI = ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/x")
TGI = ("/generate", "/generate_stream", "/", "/info")
KSERVE = (
    *("/v2", "/v2/health/ready", "/v2/health/live", "/v2/models/echo", "/v2/models/%2f/ready"),
    *("/v2/models/echo/generate", "/v2/models/echo/generate_stream", "/v2/models/echo/infer"),
    *("/v2/models/echo/ready", "/v2/models/echo/versions/1/infer", "/v2/models/echo/infer"),
)
NOWHERE = ("/v1/models/%00", "/..%2f", "/metrics", "/nowhere", "/live?after=x")
# 500 and 424 are failures of ours; 505 is for HTTP/2's preface.
STATUSES = {200, 400, 404, 405, 408, 411, 413, 415, 422, 429, 431, 501, 504, 505}
TGI_BODIES = (tgi_schemas.TgiBody, tgi_schemas.TgiParameters)
KSERVE_BODIES = (kserve_messages.InferBody, kserve_messages.InputTensor, kserve_messages.GenerateBody)
BODIES = (schemas.CompletionBody, schemas.ChatBody, schemas.DetokenizeBody, *TGI_BODIES, *KSERVE_BODIES)
FIELDS = tuple(sorted({field.alias or name for body in BODIES for name, field in body.model_fields.items()}))
TGI_FIELDS = tuple(name for body in TGI_BODIES for name in body.model_fields)
# What makes a request that is answered, if no other field is wrong.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["abc", "x"], "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65, 66]},
    "/generate": {"inputs": "abc", "parameters": {"max_new_tokens": 5}},
    "/generate_stream": {"inputs": "abc", "parameters": {"max_new_tokens": 5}},
    "/": {"inputs": "abc", "parameters": {"max_new_tokens": 5}},
    "/v2/models/echo/generate": {"text_input": "abc", "max_tokens": 5},
    "/v2/models/echo/generate_stream": {"text_input": "abc", "max_tokens": 5},
    "/v2/models/echo/infer": {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}],
        "parameters": {"max_tokens": 5},
    },
}
# Of the kind that a field may have: what is wrong with it is seen late, or not at all.
PLAUSIBLE = (
    *(
        True,
        False,
        0,
        1,
        2,
        3,
        20,
        128,
        -1,
        0.5,
        1.0,
        2.0,
        1e-9,
        1e300,
        2**31,
        2**63,
        "abc",
        "\0",
        "\ud800",
        ["abc"],
        [0],
    ),
    *(
        [],
        {},
        {"65": 5.0},
        {"65": float("inf")},
        {"4095": -100},
        {"99999": 1},
        [2**31],
        [""],
        ["a" * 300] * 4,
        "(a|b)+",
    ),
    *({"type": "regex", "value": "[a-z]+"}, {"type": "json_object"}, {"type": "json", "value": {"type": "object"}}),
    *({"include_usage": True}, {"regex": "(a{999}){999}"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}),
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
raw = st.binary(max_size=200) | st.sampled_from(
    (
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """JSON of any fields at all, JSON that is right but for a field or two, or no JSON."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return draw(st.binary(max_size=60) | st.sampled_from((b"[" * 5000, b"{}", b"null", b'{"a":NaN}')))
    body: dict[str, Any] = {"model": "echo"}
    if kind == 1:
        return json.dumps(body | draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=7))).encode()
    body = dict(RIGHT.get(path, {}))
    fields = TGI_FIELDS if isinstance(body.get("inputs"), str) else FIELDS
    odd = draw(st.dictionaries(st.sampled_from(fields), st.sampled_from(PLAUSIBLE) | scalars, max_size=3))
    if isinstance(body.get("inputs"), str):
        outer = {name: odd.pop(name) for name in ("inputs", "stream", "parameters") if name in odd}
        return json.dumps(body | {"parameters": body["parameters"] | odd} | outer).encode()
    return json.dumps(body | odd).encode()


@st.composite
def _requests(draw: st.DrawFn, paths: tuple[str, ...]) -> bytes:
    path = draw(st.sampled_from(paths))
    method = draw(st.sampled_from(("POST", "POST", "POST", "POST", "GET", "PUT", "OPTIONS")))
    kind = draw(st.sampled_from((*("application/json",) * 9, "text/plain", "")))
    body = draw(bodies(path))
    lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def requests_of(*paths: str) -> st.SearchStrategy[tuple[bytes, str]]:
    """(bytes, manner) of a hostile request to one of these paths, or to none."""
    to_paths = _requests(paths) | _requests(paths) | _requests(paths)
    return st.tuples(to_paths | raw, st.sampled_from(("read", "read", "read", "half-close", "leave")))


requests = requests_of(*OPENAI, *TGI, *KSERVE, *NOWHERE)


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


async def attack(port: int, hostile: list[tuple[bytes, str]]) -> None:
    """Sends all of them, eight at a time, and holds that each is answered as callers may be."""
    places = asyncio.Semaphore(8)

    async def one(request: bytes, manner: str) -> None:
        async with places:
            status = await send(port, request, manner)
            assert status is None or status in STATUSES, (status, request, manner)

    await asyncio.gather(*(one(*each) for each in hostile))
