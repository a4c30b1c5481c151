"""Who may call: API keys from a file, asked for on every path and every RPC that is not open by name.

The file has a table for each tenant. A key is written as it is or as its SHA-256 (`sha256:` and 64 hex digits; what
`printf %s KEY | sha256sum` prints), and a tenant may have several while one is being replaced:

    [team-a]
    keys = ["sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"]
    share = 2        # of a queue that is contended, against the others' shares; 1 if left out
    rate = 10        # requests a second; no bound if left out
    burst = 20       # requests that may come at once; one second's if left out
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger(__name__)

_LONGEST_KEY = 1024  # bytes
_CHECK_SECONDS = 1.0  # how often the file is looked at
_FIELDS = ("keys", "share", "rate", "burst")
_DENIED = "an API key is required: send `authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whom a key belongs to.

    Attributes:
      share: weight against other tenants in a queue that is contended.
      rate: requests a second, or None without a bound.
      burst: requests that may come at once within the rate.
    """

    name: str
    share: float = 1.0
    rate: float | None = None
    burst: float = 1.0


ANYBODY = Tenant(name="")  # every caller, where no keys are asked for

# The tenant of the call that runs; set where a call comes in, read where it is admitted.
current: ContextVar[Tenant] = ContextVar("tenant", default=ANYBODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    digests: tuple[tuple[bytes, Tenant], ...] = ()
    stamp: tuple[int, ...] = field(default=())  # of the file they were read from


class ApiKeys:
    """The keys in a file, read again when it changes.

    Raises:
      ValueError: the file cannot be read or is wrong. Once running, a file that turns wrong is logged and the keys read
        before go on counting.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._keys = _read(path)
        self._failed: tuple[int, ...] | None = None
        self._looked = clock()

    def tenant_of(self, key: bytes) -> Tenant | None:
        """Whose key it is, or None. Takes as long whichever of them it is, or none."""
        self._refresh()
        digest = hashlib.sha256(key[:_LONGEST_KEY]).digest()
        found = None
        for known, tenant in self._keys.digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if len(key) <= _LONGEST_KEY else None

    @property
    def tenants(self) -> dict[str, Tenant]:
        """By name."""
        return {tenant.name: tenant for _, tenant in self._keys.digests}

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _CHECK_SECONDS:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp in (self._keys.stamp, self._failed):
            return
        try:
            self._keys = _read(self._path)
            _log.info("%s: read again, %d tenants", self._path, len(self.tenants))
        except ValueError as problem:
            self._failed = stamp
            _log.error("%s; the keys that were read before go on counting", problem)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends every RPC without a known key with UNAUTHENTICATED, but for those open by name.

    Args:
      open_services: full names, such as grpc.health.v1.Health.
    """

    def __init__(self, keys: ApiKeys, open_services: Iterable[str]) -> None:
        self._keys = keys
        self._open = tuple(f"/{service}/" for service in open_services)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith(self._open):
            return await continuation(handler_call_details)
        headers = {
            key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }
        tenant = self._keys.tenant_of(_key(headers))
        if tenant is None:
            # As a stream of both kinds it asks for no message first, and so it fits every method.
            return grpc.stream_stream_rpc_method_handler(_deny)
        current.set(tenant)  # an RPC has a task of its own
        return await continuation(handler_call_details)


async def _deny(_requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _DENIED)


class KeyMiddleware:
    """The same for HTTP: an ASGI app around another, answering 401 but for calls open by name.

    A path is compared as it came over the wire (`raw_path`): what a router would make of an escaped one opens nothing.

    Args:
      open_calls: methods and paths that take no key, compared whole, such as ("GET", "/health").
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_calls: Iterable[tuple[str, str]]) -> None:
        self._app, self._keys = app, keys
        self._open = frozenset((method, path.encode()) for method, path in open_calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http" and (scope["method"], scope.get("raw_path")) in self._open:
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        tenant = self._keys.tenant_of(_key(headers))
        if tenant is not None:
            token = current.set(tenant)
            try:
                await self._app(scope, receive, send)
            finally:
                current.reset(token)
        elif scope["type"] == "http":
            body = (
                b'{"error":{"message":"%s","type":"authentication_error","param":null,"code":"401"}}' % _DENIED.encode()
            )
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _key(headers: Mapping[str, str]) -> bytes:
    """The key that a caller sends, from either of the two headers in use; names are in lower case."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip().encode("utf-8", "surrogateescape")
    return headers.get("x-api-key", "").encode("utf-8", "surrogateescape")


def _stamp(path: Path) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size, status.st_ino
    return ()


def _read(path: Path) -> _Keys:
    stamp = _stamp(path)  # before reading: a change meanwhile is seen next time
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: the API keys cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{path}: no TOML: {problem}") from None
    digests: dict[bytes, Tenant] = {}
    for name, table in content.items():
        tenant, keys = _tenant(path, name, table)
        for key in keys:
            digest = _digest(path, name, key)
            if digest in digests:
                raise ValueError(f"{path}: {name} has a key that {digests[digest].name} has too")
            digests[digest] = tenant
    if not digests:
        raise ValueError(f"{path}: no tenant is in it, so nobody could call; write [NAME] and keys = [...]")
    return _Keys(digests=tuple(digests.items()), stamp=stamp)


def _tenant(path: Path, name: str, table: Any) -> tuple[Tenant, list[Any]]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {name} stands outside a tenant's table; write [NAME] above it")
    if wrong := sorted(set(table) - set(_FIELDS)):
        raise ValueError(f"{path}: {name} has {wrong[0]}, which is none of {', '.join(_FIELDS)}")
    for number in _FIELDS[1:]:
        value = table.get(number, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{path}: {name} has {number} {value!r}; it must be a number above 0")
    keys = table.get("keys")
    if not isinstance(keys, list) or not keys:
        raise ValueError(f'{path}: {name} has no keys; write keys = ["..."]')
    rate = table.get("rate")
    burst = table.get("burst", max(1.0, rate or 1.0))
    return Tenant(name=name, share=table.get("share", 1.0), rate=rate, burst=max(1.0, burst)), keys


def _digest(path: Path, name: str, key: Any) -> bytes:
    """Errors never show a key."""
    if not isinstance(key, str) or not 8 <= len(key.encode()) <= _LONGEST_KEY:
        raise ValueError(f"{path}: a key of {name} is no string of 8 to {_LONGEST_KEY} bytes")
    if not key.startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    if not re.fullmatch("sha256:[0-9a-fA-F]{64}", key):
        raise ValueError(f"{path}: a key of {name} begins with sha256: and has no 64 hex digits after it")
    return bytes.fromhex(key.removeprefix("sha256:"))
