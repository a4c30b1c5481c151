"""API keys from a file, required on every path and every RPC that is not listed as open.

The file has a table for each tenant. A key is written as it is or as its SHA-256 (`sha256:` and 64 hex digits, as
`printf %s KEY | sha256sum` prints them). A tenant may have several keys, for example while one is being replaced:

    [team-a]
    keys = ["sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"]
    share = 2        # of the device and of a contended queue, relative to other tenants; default: 1
    rate = 10        # requests a second; default: no limit
    burst = 20       # requests that may come at once; default: those of one second
    shared_prefixes = true  # with other tenants that have this; default: false
    max_priority = 0 # the highest `priority` that its calls may ask for; default: no limit
    operator = true  # sees everybody's iterations in /live and KV events, may profile; default: false
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

# All that is open without a key: methods and whole paths, and full names of gRPC services.
OPEN_CALLS = (("GET", "/health"), ("GET", "/"))
OPEN_SERVICES = ("grpc.health.v1.Health",)

_log = logging.getLogger(__name__)

_LONGEST_KEY = 1024  # bytes
_CHECK_SECONDS = 1.0  # how often the file is checked for changes
_FIELDS = ("keys", "share", "rate", "burst", "shared_prefixes", "operator", "max_priority")
_NUMBERS, _CHOICES = _FIELDS[1:4], _FIELDS[4:6]
_DENIED = "an API key is required: send `authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A group of callers with keys of its own.

    Attributes:
      share: weight relative to other tenants, for turns at the device and in a contended queue.
      rate: requests a second; None for no limit.
      burst: requests that may come at once within the rate.
      shared_prefixes: whether it shares cached prefixes with the other tenants that do. Who shares them can find out,
        by `cached_tokens` and by the time to the first token, whether another has sent a prompt.
      operator: whether it sees what the engine does for all tenants, iteration by iteration, and may profile it.
      max_priority: the highest priority that its calls may ask for; None for no limit.
    """

    name: str
    share: float = 1.0
    rate: float | None = None
    burst: float = 1.0
    shared_prefixes: bool = False
    operator: bool = False
    max_priority: int | None = None

    def salt(self, given: str) -> str:
        """The salt of this tenant's cached prefixes, for a call with the salt `given`.

        Salts of two tenants differ, unless both share prefixes. Where no keys are required, it is the call's own.
        """
        if not self.name:
            return given
        return json.dumps([given] if self.shared_prefixes else [self.name, given])


ANYBODY = Tenant(name="")  # every caller, where no keys are required

# The tenant of the current call: set where a call comes in, read where it is admitted.
current: ContextVar[Tenant] = ContextVar("tenant", default=ANYBODY)


class ApiKeys:
    """The keys in a file, read again when it changes.

    Raises:
      ValueError: the file cannot be read or is wrong. If a later version is wrong, the error is logged and the keys
        read before stay valid.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stamp = _stamp(path)  # before reading: a change during the read is seen next time
        self._digests = _read(path)
        self._looked = clock()

    def tenant_of(self, key: bytes) -> Tenant | None:
        """The tenant with this key, or None. Takes the same time for every key, known or not."""
        self._refresh()
        digest = hashlib.sha256(key[:_LONGEST_KEY]).digest()
        found = None
        for known, tenant in self._digests.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if len(key) <= _LONGEST_KEY else None

    @property
    def tenants(self) -> dict[str, Tenant]:
        """All tenants, by name."""
        return {tenant.name: tenant for tenant in self._digests.values()}

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _CHECK_SECONDS:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _read(self._path)
            _log.info("%s: read again; %d tenants", self._path, len(self.tenants))
        except ValueError as problem:
            _log.error("%s; the keys read before stay valid", problem)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends RPCs without a known key with UNAUTHENTICATED, except those of open services.

    Args:
      open_services: full names, such as grpc.health.v1.Health.
    """

    def __init__(self, keys: ApiKeys, open_services: Iterable[str]) -> None:
        self._keys = keys
        self._open = tuple(f"/{service}/" for service in open_services)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith(self._open):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        tenant = self._keys.tenant_of(key_of({key: value for key, value in metadata if isinstance(value, str)}))
        if tenant is None:
            # A handler of streams reads no message first, so it fits every method.
            return grpc.stream_stream_rpc_method_handler(_deny)
        current.set(tenant)  # every RPC has its own task
        return await continuation(handler_call_details)


async def _deny(_requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _DENIED)


class KeyMiddleware:
    """ASGI middleware that answers 401 to calls without a known key, except open calls.

    It compares the path as received (`raw_path`), so that an escaped path does not count as an open one.

    Args:
      open_calls: methods and whole paths that need no key, such as ("GET", "/health").
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_calls: Iterable[tuple[str, str]]) -> None:
        self._app, self._keys = app, keys
        self._open = frozenset((method, path.encode()) for method, path in open_calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["method"], scope.get("raw_path")) in self._open:
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        tenant = self._keys.tenant_of(key_of(headers))
        if tenant is not None:
            token = current.set(tenant)
            try:
                await self._app(scope, receive, send)
            finally:
                current.reset(token)
        else:
            error = {"message": _DENIED, "type": "authentication_error", "param": None, "code": "401"}
            await JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


def key_of(headers: Mapping[str, str]) -> bytes:
    """The key in `authorization: Bearer` or `x-api-key`; header names are in lower case."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip().encode("utf-8", "surrogateescape")
    return headers.get("x-api-key", "").encode("utf-8", "surrogateescape")


def _stamp(path: Path) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size, status.st_ino
    return ()


def _read(path: Path) -> dict[bytes, Tenant]:
    """The tenants by the digests of their keys. Raises ValueError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: the API keys cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{path}: not TOML: {problem}") from None
    digests: dict[bytes, Tenant] = {}
    for name, table in content.items():
        tenant, keys = _tenant(path, name, table)
        for key in keys:
            digest = _digest(path, name, key)
            if digest in digests:
                raise ValueError(f"{path}: {name} and {digests[digest].name} have the same key")
            digests[digest] = tenant
    if not digests:
        raise ValueError(f"{path}: it has no tenant, so no call would be allowed; write [NAME] and keys = [...]")
    return digests


def _tenant(path: Path, name: str, table: Any) -> tuple[Tenant, list[Any]]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {name} is outside a tenant's table; write [NAME] above it")
    if wrong := sorted(set(table) - set(_FIELDS)):
        raise ValueError(f"{path}: {name} has {wrong[0]}; the fields are {', '.join(_FIELDS)}")
    for number in _NUMBERS:
        value = table.get(number, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{path}: {name} has {number} {value!r}; it must be a number above 0")
    choices = {choice: table.get(choice, False) for choice in _CHOICES}
    for choice, value in choices.items():
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {name} has {choice} {value!r}; it must be true or false")
    highest = table.get("max_priority")
    if highest is not None and (type(highest) is not int or highest < 0):
        raise ValueError(f"{path}: {name} has max_priority {highest!r}; it must be a whole number of at least 0")
    keys = table.get("keys")
    if not isinstance(keys, list) or not keys:
        raise ValueError(f'{path}: {name} has no keys; write keys = ["..."]')
    rate = table.get("rate")
    burst = table.get("burst", max(1.0, rate or 1.0))
    limits = {"share": table.get("share", 1.0), "rate": rate, "burst": max(1.0, burst)}
    return Tenant(name=name, max_priority=highest, **choices, **limits), keys


def _digest(path: Path, name: str, key: Any) -> bytes:
    """The SHA-256 of a key. Errors never show the key."""
    if not isinstance(key, str) or not 8 <= len(key.encode()) <= _LONGEST_KEY:
        raise ValueError(f"{path}: a key of {name} is not a string of 8 to {_LONGEST_KEY} bytes")
    if not key.startswith("sha256:"):
        return hashlib.sha256(key.encode()).digest()
    if not re.fullmatch("sha256:[0-9a-fA-F]{64}", key):
        raise ValueError(f"{path}: a key of {name} begins with sha256: but 64 hex digits do not follow")
    return bytes.fromhex(key.removeprefix("sha256:"))
