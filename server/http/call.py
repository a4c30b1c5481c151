"""One HTTP call: reads and checks its body, and sends its answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import pydantic
from starlette.types import Receive, Scope, Send

from server.call import new_id, traceparent
from server.errors import ApiError, ErrorKind
from server.handler import RequestHandler
from server.http import json_text
from server.http.body import IgnoredLog, ignored_fields, warning_header
from server.limits import LONG_BYTES, MAX_BODY_BYTES, MAX_UNFINISHED_BYTES
from server.text import offload_if, offload_if_long
from server.unfinished import UnfinishedBodies

DONE = b"[DONE]"  # the last event of a stream in OpenAI's API
BODY_SECONDS = 30.0  # within which the body must arrive

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ignored_log = IgnoredLog()
_unfinished = UnfinishedBodies(MAX_UNFINISHED_BYTES)
_Model = TypeVar("_Model", bound=pydantic.BaseModel)
_Result = TypeVar("_Result")
_STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.UNSUPPORTED: 400,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.WRONG_STATE: 409,
    ErrorKind.UNIMPLEMENTED: 501,
    ErrorKind.QUEUE_FULL: 429,
    ErrorKind.RATE_LIMITED: 429,
    ErrorKind.TOO_LATE: 504,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.FAILED: 500,
}


class HttpError(ApiError):
    """An error with a status that only HTTP has, such as 413."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(ErrorKind.INVALID, message)
        self.status = status


def status_of(refusal: ApiError) -> int:
    return refusal.status if isinstance(refusal, HttpError) else _STATUS[refusal.kind]


class HttpCall:
    """One HTTP call while it is answered.

    Attributes:
      id: for answer and log: the caller's x-request-id, if it sent a proper one.
      path_params: values of the route's parameters.
      ignored: names of fields in the body that the call does not read.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, enter: Callable[[], None] = lambda: None) -> None:
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.header("x-request-id")
        self.id = given if _ID.fullmatch(given) else new_id()
        self.path_params: Mapping[str, Any] = scope.get("path_params", {})
        self.has_started = False
        self.ignored: list[str] = []
        self.is_abandoned = False  # whether the client has disconnected
        self._receive, self._send, self._enter = receive, send, enter
        self._watcher: asyncio.Task[None] | None = None
        self._size = 0  # of the body

    async def body(self, model: type[_Model]) -> _Model:
        """The body as a value. From here on, the call is cancelled when its caller disconnects.

        Raises:
          ApiError: the body is too large, too slow, not JSON or not of this model, or the rate is used up.
        """
        if self.content_type != "application/json":
            raise HttpError(415, "the body must be JSON, with the header Content-Type: application/json")
        return await self.parsed(await self.raw_body(), model)

    async def raw_body(self) -> bytes:
        """The bytes of the body; otherwise as `body`."""
        if self.header("content-encoding") not in ("", "identity"):
            raise HttpError(415, "the body must not be compressed")
        body = await self._read()
        self._size = len(body)
        self._enter()  # before the body is parsed, so that a flood is cheap
        task = asyncio.current_task()
        assert task is not None
        self._watcher = asyncio.create_task(self._watch(task))
        return body

    async def parsed(self, body: bytes, model: type[_Model]) -> _Model:
        """JSON as a value. Notes the fields that the call does not read. Raises ApiError."""

        def parse() -> tuple[list[str], _Model]:
            value, parsed = json_text.parse(body, model)
            return list(ignored_fields(value, parsed)), parsed

        with _unfinished.holding(self._size):
            self.ignored, parsed = await self.offload(parse)
        if self.ignored:
            _ignored_log.add(self.ignored)
        return parsed

    async def offload(self, work: Callable[[], _Result]) -> _Result:
        """Does work on the body that was read; on another thread if it is long."""
        return await offload_if(self._size > LONG_BYTES, work)

    async def _read(self) -> bytes:
        too_large = HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS) as limit:
                with _unfinished.reading(limit) as has_read:
                    while True:
                        message = await self._receive()
                        if message["type"] == "http.disconnect":
                            self.is_abandoned = True
                            raise asyncio.CancelledError
                        body += message.get("body", b"")
                        if len(body) > MAX_BODY_BYTES:
                            raise too_large
                        if not message.get("more_body"):
                            return bytes(body)
                        has_read(len(body))
        except TimeoutError:
            text = f"the body took longer than {BODY_SECONDS:g} seconds, or the longest of too many unfinished ones"
            raise HttpError(408, text) from None

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_abandoned = True
        task.cancel()

    @property
    def content_type(self) -> str:
        return self.header("content-type").split(";")[0].strip().lower()

    def header(self, name: str) -> str:
        """A header of the request by its name in lower case; "" if it has none."""
        return self._headers.get(name.encode(), b"").decode("latin-1")

    def close(self) -> None:
        """Stops waiting for more from the client."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.whole(encoded(value), "application/json", status, headers)

    async def made_json(self, size: int, make: Callable[[], Any]) -> None:
        """Answers with what `make` returns, made on another thread if `size` is long."""
        await self.whole(await offload_if_long(size, lambda: encoded(make())), "application/json")

    async def whole(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        known = {"content-type": content_type, "content-length": str(len(body))}
        await self._start(status, known | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, values: Iterable[Any], *, named: bool = False) -> None:
        """Sends JSON values, or DONE, as server-sent events in one piece.

        Args:
          named: whether the events have names, which are the types of the values.
        """
        await self.event_data(encoded_events(values, named=named))

    async def event_data(self, data: bytes) -> None:
        """Sends events as `encoded_events` makes them, in one piece."""
        if data and not self.has_started:
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_started = True
        if self.ignored:
            headers = {**headers, "warning": warning_header(self.ignored)}
        named = {**headers, "x-request-id": self.id, "x-content-type-options": "nosniff"}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class Endpoint:
    """An ASGI application that answers one route.

    Args:
      handle: answers a call, or raises.
      error: the JSON body of a refusal.
      statuses: status codes that differ from the usual ones.
      queued: whether its calls wait in the queue, and so count against rates.
    """

    def __init__(
        self,
        handler: RequestHandler,
        handle: Callable[[HttpCall], Awaitable[None]],
        error: Callable[[ApiError], Any],
        statuses: Mapping[ErrorKind, int] | None = None,
        *,
        queued: bool = False,
    ) -> None:
        self._handler, self._handle, self._error = handler, handle, error
        self._statuses = statuses or {}
        self._queued = queued

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_call = HttpCall(scope, receive, send, *((self._handler.enter,) if self._queued else ()))
        traceparent.set(http_call.header("traceparent"))  # every call has its own task
        try:
            try:
                with self._handler.answering(http_call.id):
                    await self._handle(http_call)
            except ApiError as refusal:
                await self._refuse(http_call, refusal)
        except asyncio.CancelledError:
            if not http_call.is_abandoned:
                raise  # the server cancels it; a client that has disconnected needs no answer
        finally:
            http_call.close()

    async def _refuse(self, http_call: HttpCall, refusal: ApiError) -> None:
        body = self._error(refusal)
        if http_call.has_started:  # a stream: the status has been sent
            await http_call.events([body])
            await http_call.end()
            return
        status = status_of(refusal)
        if not isinstance(refusal, HttpError):
            status = self._statuses.get(refusal.kind, status)
        headers = {}
        if refusal.retry_after is not None:
            headers["retry-after"] = str(math.ceil(refusal.retry_after))
        if status in (408, 413, 415):  # the rest of the body is not read
            headers["connection"] = "close"
        await http_call.json(body, status, headers)


def encoded_events(values: Iterable[Any], *, named: bool = False) -> bytes:
    """JSON values, or DONE, as server-sent events."""
    pieces = []
    for value in values:
        name = f"event: {value['type']}\n".encode() if named else b""
        pieces.append(name + b"data: " + (DONE if value is DONE else encoded(value)) + b"\n\n")
    return b"".join(pieces)


def encoded(value: Any) -> bytes:
    """JSON in UTF-8. Surrogates have no UTF-8; text with them is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()
