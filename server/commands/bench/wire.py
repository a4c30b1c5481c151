"""A client of the inference service, which it knows by the server's own reflection, and load sent through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Job, Workload

SERVICE = "jaxserve.v1.Inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of the service, and the classes of its messages."""

    path: str
    request: type[Any]
    response: type[Any]


def methods(address: str, *, timeout: float = 10.0) -> dict[str, Method]:
    """The service's methods by name.

    Raises:
      ValueError: no such service answers there within `timeout` seconds.
    """
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout)
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            service = pool.FindServiceByName(SERVICE)
        except grpc.FutureTimeoutError:
            raise ValueError(f"no server answers at {address} within {timeout:g} s") from None
        except (KeyError, grpc.RpcError) as error:
            raise ValueError(f"the server at {address} does not show the service {SERVICE}: {error}") from None
        return {
            method.name: Method(
                path=f"/{SERVICE}/{method.name}",
                request=GetMessageClass(method.input_type),
                response=GetMessageClass(method.output_type),
            )
            for method in service.methods
        }


def call(address: str, method: Method) -> dict[str, Any]:
    """Calls a method that takes nothing; returns its answer's fields by name."""
    with grpc.insecure_channel(address) as channel:
        unary = channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        answer = unary(method.request(), timeout=30.0)
    return {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What came of a workload sent to a server.

    Attributes:
      late: seconds by which the load generator itself sent its latest request too late; latencies count from the time
        at which a request should have been sent.
    """

    outcomes: list[Outcome]
    late: float


def send(address: str, workload: Workload, known: Mapping[str, Method], progress: Callable[[int], None]) -> Sent:
    """Sends every job at its time, whether or not earlier ones have ended, and waits for the last (an open loop).

    Args:
      progress: called with the number of requests that have ended.
    """
    return asyncio.run(_send(address, workload, known["GenerateStream"], progress))


async def _send(address: str, workload: Workload, method: Method, progress: Callable[[int], None]) -> Sent:
    ended, late = 0, 0.0
    # Messages are encoded before the clock starts, so that a burst does not wait for this process.
    requests = [encode(index, job, method) for index, job in enumerate(workload.jobs)]
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stream = channel.unary_stream(method.path, response_deserializer=method.response.FromString)
        start = time.monotonic()

        async def one(job: Job, request: bytes) -> Outcome:
            nonlocal ended, late
            outcome = Outcome(arrival=start + job.arrival, prompt_tokens=len(job.prompt))
            await asyncio.sleep(outcome.arrival - time.monotonic())
            late = max(late, time.monotonic() - outcome.arrival)
            try:
                async for message in stream(request):
                    outcome.token_times.extend([time.monotonic()] * len(message.token_ids))
            except grpc.aio.AioRpcError as error:
                outcome.error = f"{error.code().name}: {error.details()}"
            else:
                if len(outcome.token_times) != job.max_tokens:
                    outcome.error = f"the stream ended after {len(outcome.token_times)} of {job.max_tokens} tokens"
            ended += 1
            progress(ended)
            return outcome

        jobs = zip(workload.jobs, requests, strict=True)
        outcomes = await asyncio.gather(*(one(job, request) for job, request in jobs))
    return Sent(outcomes=list(outcomes), late=late)


def encode(index: int, job: Job, method: Method) -> bytes:
    """A job as the message of a method that generates."""
    request = method.request(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True, request_id=f"bench-{index}")
    request.prompt_token_ids.ids.extend(job.prompt.tolist())
    return request.SerializeToString()
