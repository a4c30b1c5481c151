"""Hostile callers: requests that are malformed in every way hypothesis can think of, and connections that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from server.grpc.server import ROUTER_SERVICES, SERVICE
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

# Every RPC that is served and takes no stream, and one that is not, with the message it takes.
METHODS: dict[str, Any] = {
    f"/{service}/{method.name}": method.input_type
    for service in (SERVICE, *ROUTER_SERVICES)
    for method in descriptor_pool.Default().FindServiceByName(service).methods
}
METHODS[f"/{SERVICE}/NoSuchMethod"] = pb.GenerateRequest.DESCRIPTOR
# What a caller may be answered.
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,  # events of the cache, which this server does not tell
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,
}
# What the library says, ours never: of bytes that are no message, and of a call that its own side has given up.
OF_THE_LIBRARY = ("DecodeError", "Internal error from Core")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _odd_integers(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    if not signed:
        return st.sampled_from((0, 1, 2**31, 2**bits - 1, 257, 2048)) | st.integers(0, 2**bits - 1)
    edge = st.sampled_from((0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 257, 2048))
    return edge | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_odd_floats = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from((0.0, 1.0, -1.0, 1e300, 5e-324))
_odd_text = st.text(max_size=60) | st.sampled_from(("", "\0", "\u202e", "a" * 300, "{{7*7}}", "<eos>", "😀" * 40))
# Without these nothing else of a message is looked at.
_OFTEN = ("prompt", "prompt_token_ids", "ids", "tokenized", "input_ids", "text", "sampling_params", "name")


@st.composite
def requests(draw: st.DrawFn, kind: Any) -> bytes:
    """A message with some fields, most of them wrong."""
    return draw(_messages(kind)).SerializeToString()


@st.composite
def _messages(draw: st.DrawFn, kind: Any) -> Any:
    message: Any = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if draw(st.integers(0, 1 if field.name in _OFTEN else 3)):
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = map(_values, entry.fields)
            for name, drawn in draw(st.dictionaries(key, value, max_size=4)).items():
                if entry.fields[1].message_type is None:
                    getattr(message, field.name)[name] = drawn
                else:
                    getattr(message, field.name)[name].CopyFrom(drawn)
        elif entry is not None and not field.is_repeated:
            getattr(message, field.name).CopyFrom(draw(_messages(entry)))
        elif field.is_repeated:
            most = 20 if field.cpp_type == field.CPPTYPE_STRING else 8
            getattr(message, field.name).extend(draw(st.lists(_values(field), max_size=most)))
        else:
            setattr(message, field.name, draw(_values(field)))
    return message


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _messages(field.message_type)
    if field.type == field.TYPE_BYTES:
        return st.binary(max_size=30) | st.sampled_from((b"abc", b"\3\0\0\0abc", b"\xff\xff\xff\xff"))
    return {
        field.CPPTYPE_BOOL: st.booleans(),
        field.CPPTYPE_DOUBLE: _odd_floats,
        field.CPPTYPE_FLOAT: _odd_floats,
        field.CPPTYPE_STRING: _odd_text,
        field.CPPTYPE_INT32: _odd_integers(32),
        field.CPPTYPE_INT64: _odd_integers(64),
        field.CPPTYPE_UINT32: _odd_integers(32, signed=False),
        field.CPPTYPE_UINT64: _odd_integers(64, signed=False),
    }[field.cpp_type]


@st.composite
def mutated(draw: st.DrawFn, kind: Any) -> bytes:
    """The bytes of a request with some of them changed, left out or put in twice."""
    whole = bytearray(draw(requests(kind)))
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


@st.composite
def calls_of(draw: st.DrawFn, *services: str) -> tuple[str, bytes, str]:
    """(method, message, manner) of a hostile call of one of these services."""
    methods = tuple(method for method in METHODS if method.split("/")[1] in services)
    generating = tuple(method for method in methods if method.endswith(("/Generate", "/GenerateStream", "Infer")))
    method = draw(st.sampled_from(generating or methods) | st.sampled_from(methods))
    kind = METHODS[method]
    message = draw(requests(kind) | mutated(kind) | st.binary(max_size=200))
    manner = draw(st.sampled_from(("wait", "wait", "wait", "cancel", "half-close", "say nothing", "deadline")))
    return method, message, manner


calls = calls_of(SERVICE, *ROUTER_SERVICES)


async def call(channel: grpc.aio.Channel, method: str, message: bytes, manner: str) -> tuple[grpc.StatusCode, str]:
    """One hostile call; returns what it was answered."""
    # The library answers nobody who ends a call of one message before that message: the deadline does.
    timeout = {"deadline": 0.02, "half-close": 0.2}.get(manner, WAIT_SECONDS)
    made: Any = channel.stream_stream(method)(timeout=timeout)
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
    places = asyncio.Semaphore(16)

    async with grpc.aio.insecure_channel(address) as channel:

        async def one(method: str, message: bytes, manner: str) -> None:
            async with places:
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
            draw.choice((b"", noise, PREFACE, PREFACE + noise, b"GET / HTTP/1.1\r\n", b"\x16\x03\x01" + noise))
        )
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
