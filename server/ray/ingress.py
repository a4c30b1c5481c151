"""The ingress for routing by prefixes: it reads the prompts, replicas answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from ray.exceptions import RayActorError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.text.tokenizer import Tokenizer
from server.errors import unavailable
from server.http.call import HttpCall, HttpError, status_of
from server.http.openai import error_of
from server.ray.host import Group, end_with_parent, settings
from server.ray.prefixes import Prompt, PromptReader
from server.ray.rpcs import Ending, with_rpcs

_MOST_TRIES = 2  # replicas that get the same call: one that kills them must not kill all
_GONE = "the replica with this call is gone"
# What an application reads of a call; Serve's own objects stay here.
_SCOPE = frozenset(
    ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
)


@with_rpcs
class Ingress:
    """What Serve's proxies call; its router, `PrefixRouter`, chooses a replica in this process.

    A call whose replica dies before it has answered anything goes to another one. After that its connection breaks.

    Args:
      flags: of `jaxserve serve`.
      hosts: of a replica.
      replicas: the deployment of `RoutedReplica`.
    """

    def __init__(self, flags: Sequence[str], hosts: int, replicas: DeploymentHandle) -> None:
        end_with_parent()
        # Some flags are for several hosts only. This is none of them, and nobody listens there.
        group = Group(hosts=hosts, coordinator="127.0.0.1:1", secret=secrets.token_hex(32).encode())
        chosen = settings(flags, group if hosts > 1 else None)
        prompts = PromptReader(Tokenizer.from_directory(chosen.model), chosen.keys)
        # By value, which is gRPC: references to Ray's objects take twice the time. (No part of Ray's documented API.)
        calls = _Calls(replicas.options(stream=True, _by_reference=False))
        self._http = _Forwarder(prompts, calls)
        self.rpcs = _ForwardedRpcs(prompts, calls)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Serve's proxy calls."""
        return Router(default=self._http)


class _Calls:
    """Calls of replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def run(self, method: str, prompt: Prompt, *args: Any) -> AsyncIterator[Any]:
        """Yields what a replica's method yields. Raises RayActorError."""
        for tries in range(1, _MOST_TRIES + 1):
            has_begun = False
            answer = getattr(self._replicas, method).remote(prompt, *args)
            try:
                async for each in answer:
                    has_begun = True
                    yield each
                return
            except RayActorError:
                if has_begun or tries == _MOST_TRIES:
                    raise
            finally:  # the caller may have left
                answer.cancel()


class _Forwarder:
    """The ASGI application: sends each call to a replica."""

    def __init__(self, prompts: PromptReader, calls: _Calls) -> None:
        self._prompts, self._calls = prompts, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send)
        try:
            body = await call.raw_body()
            prompt = await self._prompts.of_http(scope["path"], scope["headers"], body)
            sent = {name: value for name, value in scope.items() if name in _SCOPE}
            async with contextlib.aclosing(self._calls.run("call_http", prompt, sent, body)) as pieces:
                async for messages in pieces:
                    for message in messages:
                        call.has_started = True
                        await send(message)
        except HttpError as refusal:
            await call.json(error_of(refusal), status_of(refusal), {"connection": "close"})
        except RayActorError:
            if call.has_started:
                raise  # the connection breaks
            refusal = unavailable(_GONE)
            await call.json(error_of(refusal), status_of(refusal))
        except asyncio.CancelledError:
            if not call.is_abandoned:
                raise  # the server cancels it; a client that has disconnected needs no answer
        finally:
            call.close()


class _ForwardedRpcs:
    """The RPCs, each sent to a replica; as `InferenceRpcs` has them."""

    def __init__(self, prompts: PromptReader, calls: _Calls) -> None:
        self._prompts, self._calls = prompts, calls

    async def answer(self, name: str, request: Any, grpc_context: RayServegRPCContext) -> Any:
        (answer,) = [each async for each in self.stream(name, request, grpc_context)]
        return answer

    async def stream(self, name: str, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[Any]:
        ending = Ending(list(grpc_context.invocation_metadata()))
        prompt = await self._prompts.of_rpc(request, ending.metadata)
        try:
            async with contextlib.aclosing(self._calls.run("call_rpc", prompt, name, request, ending)) as messages:
                async for message in messages:
                    if isinstance(message, Ending):
                        message.end(grpc_context)
                    yield message
        except RayActorError:
            Ending([], grpc.StatusCode.UNAVAILABLE, _GONE).end(grpc_context)
