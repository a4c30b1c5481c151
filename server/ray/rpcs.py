"""`jaxserve.v1.Inference` through Serve's gRPC proxy, which calls methods by RPC name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from server.auth import OPEN_SERVICES, ApiKeys, KeyInterceptor
from server.grpc.server import SERVICE
from server.grpc.service import InferenceService
from server.handler import RequestHandler
from server.proto.jaxserve.v1 import inference_pb2
from server.ray.streams import Put, put_by


class RpcEnded(Exception):
    """Ends an RPC whose status has been set."""


@dataclass(slots=True)
class Ending:
    """The context of an RPC in another process; it returns as the last message of a failed RPC."""

    metadata: list[tuple[str, Any]]
    code: grpc.StatusCode | None = None
    details: str = ""
    trailing_metadata: list[tuple[str, Any]] = field(default_factory=list)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        return self.metadata

    def set_trailing_metadata(self, metadata: list[tuple[str, Any]]) -> None:
        self.trailing_metadata = metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def end(self, context: RayServegRPCContext) -> NoReturn:
        """Ends the caller's RPC in the same way. Raises RpcEnded."""
        assert self.code is not None
        context.set_trailing_metadata(self.trailing_metadata)
        context.set_code(self.code)
        context.set_details(self.details)
        raise RpcEnded(self.details)


class _Context:
    """What services use of a call's context, on Serve's; its proxy keeps deadlines to itself."""

    def __init__(self, context: RayServegRPCContext | Ending, write: Put | None = None) -> None:
        self._context, self.write = context, write

    def time_remaining(self) -> None:
        return None

    async def abort_with_status(self, status: Any) -> NoReturn:
        self._context.set_trailing_metadata(list(status.trailing_metadata))
        await self.abort(status.code, status.details)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._context.set_code(code)
        self._context.set_details(details)
        raise RpcEnded(details)


_RPCS = {rpc.name: rpc for rpc in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}


class InferenceRpcs:
    """The RPCs of a replica.

    Args:
      keys: callers must send one of them; None requires none.
    """

    def __init__(self, handler: RequestHandler, keys: ApiKeys | None) -> None:
        self._service = InferenceService(handler)
        self._keys = None if keys is None else KeyInterceptor(keys, OPEN_SERVICES)

    @staticmethod
    def streams(name: str) -> bool:
        """Whether the answer of an RPC is a stream."""
        return _RPCS[name].server_streaming

    async def answer(self, name: str, request: Any, grpc_context: RayServegRPCContext | Ending) -> Any:
        """The answer of a unary RPC. Raises RpcEnded."""
        return await self._run(name, request, grpc_context, _Context(grpc_context))

    async def stream(self, name: str, request: Any, grpc_context: RayServegRPCContext | Ending) -> AsyncIterator[Any]:
        """The messages of a streaming RPC. Raises RpcEnded."""
        running = put_by(lambda put: self._run(name, request, grpc_context, _Context(grpc_context, put)))
        async with contextlib.aclosing(running) as pieces:
            async for messages in pieces:
                for message in messages:
                    yield message

    async def _run(self, name: str, request: Any, given: RayServegRPCContext | Ending, context: _Context) -> Any:
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
    for rpc_name in _RPCS:

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

        setattr(replica, rpc_name, (streaming if InferenceRpcs.streams(rpc_name) else unary)(rpc_name))
    return replica
