"""`jaxserve.v1.Inference` through Serve's gRPC proxy, which calls a replica's methods by the names of the RPCs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from server.auth import OPEN_SERVICES, ApiKeys, KeyInterceptor
from server.grpc.server import SERVICE
from server.grpc.service import InferenceService
from server.handler import RequestHandler
from server.proto.jaxserve.v1 import inference_pb2


class RpcEnded(Exception):
    """Ends an RPC whose status has been set."""


class _Context:
    """What services use of the context of a call, on Serve's. Serve's proxy keeps the caller's deadline to itself."""

    def __init__(self, context: RayServegRPCContext) -> None:
        self._context = context
        self.messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)

    def time_remaining(self) -> None:
        return None

    async def write(self, message: Any) -> None:
        await self.messages.put(message)

    async def abort_with_status(self, status: Any) -> NoReturn:
        self._context.set_trailing_metadata(list(status.trailing_metadata))
        await self.abort(status.code, status.details)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._context.set_code(code)
        self._context.set_details(details)
        raise RpcEnded(details)


class InferenceRpcs:
    """The RPCs of a replica.

    Args:
      keys: callers must send one of them; None requires none.
    """

    def __init__(self, handler: RequestHandler, keys: ApiKeys | None) -> None:
        self._service = InferenceService(handler)
        self._keys = None if keys is None else KeyInterceptor(keys, OPEN_SERVICES)

    async def answer(self, name: str, request: Any, grpc_context: RayServegRPCContext) -> Any:
        """The answer of a unary RPC. Raises RpcEnded."""
        return await self._run(name, request, grpc_context, _Context(grpc_context))

    async def stream(self, name: str, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[Any]:
        """The messages of a streaming RPC. Raises RpcEnded."""
        context = _Context(grpc_context)
        running = asyncio.create_task(self._run(name, request, grpc_context, context))
        try:
            while not (running.done() and context.messages.empty()):
                reading = asyncio.create_task(context.messages.get())
                await asyncio.wait([running, reading], return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    yield reading.result()
                else:
                    reading.cancel()
            running.result()
        finally:  # the caller may have left
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, RpcEnded):
                await running

    async def _run(self, name: str, request: Any, given: RayServegRPCContext, context: _Context) -> Any:
        method = getattr(self._service, name)
        if self._keys is None:
            return await method(request, context)

        async def known(_: Any) -> None:
            return None

        details: Any = SimpleNamespace(method=f"/{SERVICE}/{name}", invocation_metadata=given.invocation_metadata())
        denial = await self._keys.intercept_service(known, details)
        if denial is not None:
            await denial.stream_stream(None, context)
        return await method(request, context)


def with_rpcs(replica: type) -> type:
    """Gives a replica's class, which has `rpcs`, a method for each RPC."""
    for rpc in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods:

        def unary(name: str) -> Any:
            async def call(self: Any, request: Any, grpc_context: RayServegRPCContext) -> Any:
                return await self.rpcs.answer(name, request, grpc_context)

            return call

        def streaming(name: str) -> Any:
            async def call(self: Any, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[Any]:
                async with contextlib.aclosing(self.rpcs.stream(name, request, grpc_context)) as messages:
                    async for message in messages:
                        yield message

            return call

        setattr(replica, rpc.name, (streaming if rpc.server_streaming else unary)(rpc.name))
    return replica
