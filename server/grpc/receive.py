"""Takes calls' messages as bytes, bounds them before parsing, refuses malformed ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from jaxserve.errors import InvalidRequest
from server.call import new_id
from server.errors import ApiError, ErrorKind
from server.grpc import calls
from server.handler import RequestHandler
from server.limits import LONG_BYTES, MAX_BODY_BYTES, MAX_FIELDS, MAX_UNFINISHED_BYTES, MAX_VALUES
from server.text import offload_if
from server.unfinished import UnfinishedBodies

MESSAGE_SECONDS = 30.0  # within which a message must arrive
_SLOW_SECONDS = 1.0  # after which a message that has not arrived counts as unfinished
_HIGH = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last
_FIXED = {FieldDescriptor.CPPTYPE_FLOAT: 4, FieldDescriptor.CPPTYPE_DOUBLE: 8}


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """Parses the messages of calls; a wrong one ends in INVALID_ARGUMENT.

    grpc itself ends them with UNKNOWN, and logs two tracebacks.

    Args:
      services: full names of the services whose calls are handled.
    """

    def __init__(self, handler: RequestHandler, services: Iterable[str]) -> None:
        self._handler = handler
        self._services = tuple(f"/{service}/" for service in services)
        self._unfinished = UnfinishedBodies(MAX_UNFINISHED_BYTES)
        self._known: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        name = handler_call_details.method
        if (known := self._known.get(name)) is not None:
            return known
        found = await continuation(handler_call_details)
        if not name.startswith(self._services) or found is None:
            return found
        # Refusals of interceptors after this one would be kept, so there are none.
        method: Callable[[Any, Any], Awaitable[Any]] = found.unary_stream or found.unary_unary
        parse = found.request_deserializer
        if found.request_streaming:  # its answers are a stream too
            answers = found.stream_stream

            async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
                async for answer in answers(self._each(messages, parse), context):
                    yield answer

            wrapped = grpc.stream_stream_rpc_method_handler(stream, None, found.response_serializer)
            self._known[name] = wrapped
            return wrapped

        async def call(_messages: Any, context: Any) -> Any:
            async with calls.answering(self._handler, context, new_id()):
                request = await self._parsed(await self._read(context), parse)
            return await method(request, context)

        # A handler of streams reads its messages itself, and so can stop waiting for one.
        make = grpc.stream_stream_rpc_method_handler if found.unary_stream else grpc.stream_unary_rpc_method_handler
        wrapped = self._known[name] = make(call, None, found.response_serializer)
        return wrapped

    async def _read(self, context: Any) -> bytes:
        """The bytes of the call's message. Raises ApiError if they do not come in time."""
        try:
            async with asyncio.timeout(MESSAGE_SECONDS) as limit:
                with self._unfinished.reading(limit) as has_read:
                    # grpc does not tell how much has come. Most messages come whole at once.
                    slow = asyncio.get_running_loop().call_later(_SLOW_SECONDS, has_read, MAX_BODY_BYTES)
                    try:
                        raw = await context.read()
                    finally:
                        slow.cancel()
        except TimeoutError:
            text = (
                f"the message took longer than {MESSAGE_SECONDS:g} seconds, or the longest of too many unfinished ones"
            )
            raise ApiError(ErrorKind.TOO_LATE, text) from None
        if not isinstance(raw, bytes):  # the end of the stream
            raise InvalidRequest("message", "is missing")
        return raw

    async def _each(self, messages: AsyncIterator[bytes], parse: Any) -> AsyncIterator[Any]:
        async for raw in messages:
            yield await self._parsed(raw, parse)

    async def _parsed(self, raw: bytes, parse: Any) -> Any:
        with self._unfinished.holding(len(raw)):
            await offload_if(len(raw) > LONG_BYTES, lambda: check_size(raw, parse.__self__.DESCRIPTOR))
        try:
            return parse(raw)
        except DecodeError:
            raise _malformed() from None


def _malformed() -> InvalidRequest:
    # Made anew: an exception that is raised again keeps the frames of every time.
    return InvalidRequest("message", "is not of this call: its bytes cannot be parsed")


def check_size(raw: bytes, kind: Descriptor) -> None:
    """InvalidRequest for a long message with too many fields to parse in a few milliseconds."""
    if len(raw) > LONG_BYTES and _count(raw, 0, len(raw), kind, 0, 0) > MAX_FIELDS:
        raise InvalidRequest("message", f"has more than {MAX_FIELDS} fields and strings")


def _count(raw: bytes, at: int, end: int, kind: Descriptor | None, count: int, depth: int) -> int:
    """`count` plus the fields between `at` and `end`, nested ones too; stops when too many.

    Raises:
      InvalidRequest: it is malformed.
    """
    fields = {} if kind is None else kind.fields_by_number
    while at < end and count <= MAX_FIELDS:
        tag, at = _varint(raw, at, end)
        count += 1
        match tag & 7:
            case 0:
                _, at = _varint(raw, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(raw, at, end)
                field = fields.get(tag >> 3)
                if at + size > end or depth > 100:
                    raise _malformed()
                if field is not None and field.message_type is not None:
                    count = _count(raw, at, at + size, field.message_type, count, depth + 1)
                elif field is not None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING and size:
                    packed = raw[at : at + size]
                    width = _FIXED.get(field.cpp_type)
                    if (size // width if width else len(packed.translate(None, _HIGH))) > MAX_VALUES:
                        raise InvalidRequest(field.name, f"has more than {MAX_VALUES} values")
                at += size
            case _:  # groups, which are not used
                raise _malformed()
    return count


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _malformed()
