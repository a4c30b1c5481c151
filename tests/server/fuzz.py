"""Hostile callers: requests that are malformed in every way hypothesis can think of, and connections that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from server.grpc_server import SERVICE
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.fake_engine import WAIT_SECONDS

# A failure names its call; making a batch of them smaller would take hours.
together = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
)

METHODS = ("Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModel", "GetLoad", "NoSuchMethod")
# What a caller may be answered.
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}
# What the library says, ours never: of bytes that are no message, and of a call that its own side has given up.
OF_THE_LIBRARY = ("DecodeError", "Internal error from Core")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _odd_integers(bits: int) -> st.SearchStrategy[int]:
    edge = st.sampled_from((0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 257, 2048))
    return edge | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_odd_floats = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from((0.0, 1.0, -1.0, 1e300, 5e-324))
_odd_text = st.text(max_size=60) | st.sampled_from(("", "\0", "\u202e", "a" * 300, "{{7*7}}", "<eos>", "😀" * 40))
_ids = st.lists(_odd_integers(32), max_size=8)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A GenerateRequest with some fields, most of them wrong."""
    message = pb.GenerateRequest()
    if draw(st.booleans()):
        message.prompt = draw(_odd_text)
    elif draw(st.booleans()):
        message.prompt_token_ids.ids.extend(draw(_ids))
    for field in message.DESCRIPTOR.fields:
        if field.name in ("prompt", "prompt_token_ids") or draw(st.integers(0, 3)):
            continue
        if field.name == "logit_bias":
            message.logit_bias.update(draw(st.dictionaries(_odd_integers(32), _odd_floats, max_size=4)))
        elif field.name in ("stop", "bad_words"):
            getattr(message, field.name).extend(draw(st.lists(_odd_text, max_size=20)))
        elif field.name == "stop_token_ids":
            message.stop_token_ids.extend(draw(_ids))
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, draw(st.booleans()))
        elif field.cpp_type == field.CPPTYPE_DOUBLE:
            setattr(message, field.name, draw(_odd_floats))
        elif field.cpp_type == field.CPPTYPE_STRING:
            setattr(message, field.name, draw(_odd_text))
        else:
            bits = 64 if field.cpp_type == field.CPPTYPE_INT64 else 32
            setattr(message, field.name, draw(_odd_integers(bits)))
    return message.SerializeToString()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The bytes of a request with some of them changed, left out or put in twice."""
    whole = bytearray(draw(requests()))
    for _ in range(draw(st.integers(1, 4))):
        if whole:
            where = draw(st.integers(0, len(whole) - 1))
            match draw(st.integers(0, 2)):
                case 0:
                    whole[where] = draw(st.integers(0, 255))
                case 1:
                    del whole[where:]
                case _:
                    whole[where:where] = whole[: draw(st.integers(0, 20))]
    return bytes(whole)


calls = st.tuples(
    st.sampled_from(METHODS[:2]) | st.sampled_from(METHODS),
    requests() | mutated() | st.binary(max_size=200),
    st.sampled_from(("wait", "wait", "wait", "cancel", "half-close", "say nothing", "deadline")),
)


async def call(channel: grpc.aio.Channel, method: str, message: bytes, manner: str) -> tuple[grpc.StatusCode, str]:
    """One hostile call; returns what it was answered."""
    # The library answers nobody who ends a call of one message before that message: the deadline does.
    timeout = {"deadline": 0.02, "half-close": 0.2}.get(manner, WAIT_SECONDS)
    made: Any = channel.stream_stream(f"/{SERVICE}/{method}")(timeout=timeout)
    ours: tuple[type[BaseException], ...] = (asyncio.CancelledError,) if manner in ("cancel", "say nothing") else ()
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, *ours):
        if manner == "half-close":  # the end of the messages, and no message before it
            await made.done_writing()
        elif manner != "say nothing":
            await made.write(message)
            await made.done_writing()
        if manner in ("cancel", "say nothing"):
            await asyncio.sleep(0)
            made.cancel()
        while (await made.read()) is not grpc.aio.EOF:
            if manner == "cancel":
                made.cancel()
    if made.cancelled():
        return grpc.StatusCode.CANCELLED, ""
    return await made.code(), await made.details()


async def attack(address: str, hostile: list[tuple[str, bytes, str]]) -> None:
    """Sends all of them, sixteen at a time, and holds that each is answered as callers may be."""
    room = asyncio.Semaphore(16)

    async with grpc.aio.insecure_channel(address) as channel:

        async def one(method: str, message: bytes, manner: str) -> None:
            async with room:
                code, details = await call(channel, method, message, manner)
                told = (method, message, manner, code, details)
                assert code in CODES or any(word in details for word in OF_THE_LIBRARY), told

        await asyncio.gather(*(one(*each) for each in hostile))


async def reset_connections(address: str, count: int, seed: int = 0) -> None:
    """Connections that say something or other and are then reset, without so much as an end of file."""
    draw = random.Random(seed)
    host, port = address.rsplit(":", 1)
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        noise = draw.randbytes(draw.randrange(200))
        writer.write(
            draw.choice((b"", noise, _PREFACE, _PREFACE + noise, b"GET / HTTP/1.1\r\n", b"\x16\x03\x01" + noise))
        )
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
