"""Sends workloads to a server over gRPC, and asks it for its model and load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from jaxserve.simulate.outcome import Outcome
from jaxserve.simulate.workload import Job, Workload
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub

SERVICE = "jaxserve.v1.Inference"


def get_model(address: str, *, timeout: float = 10.0) -> pb.GetModelResponse:
    """The server's model and limits; raises ValueError if none answers within `timeout` seconds."""
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout)
            return InferenceStub(channel).GetModel(pb.GetModelRequest(), timeout=timeout)
        except grpc.FutureTimeoutError:
            raise ValueError(f"no server answers at {address} within {timeout:g} s") from None
        except grpc.RpcError as error:
            raise ValueError(f"the server at {address} does not serve {SERVICE}: {error}") from None


def get_load(address: str) -> pb.GetLoadResponse:
    with grpc.insecure_channel(address) as channel:
        return InferenceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The outcomes of a workload that was sent to a server.

    Attributes:
      late: largest delay in seconds with which this process sent a request. Latencies count from the time at which
        the request was due.
    """

    outcomes: list[Outcome]
    late: float


def send(address: str, workload: Workload, progress: Callable[[int], None]) -> Sent:
    """Sends every job at its time (an open loop), and waits for the last to end.

    Args:
      progress: receives the number of requests that have ended.
    """
    return asyncio.run(_send(address, workload, progress))


async def _send(address: str, workload: Workload, progress: Callable[[int], None]) -> Sent:
    ended, late = 0, 0.0
    # Requests are made before the clock starts, so that this process does not delay a burst.
    requests = [_request(index, job) for index, job in enumerate(workload.jobs)]
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub = InferenceStub(channel)
        start = time.monotonic()

        async def one(job: Job, request: pb.GenerateRequest) -> Outcome:
            nonlocal ended, late
            outcome = Outcome(arrival=start + job.arrival, prompt_tokens=len(job.prompt))
            await asyncio.sleep(outcome.arrival - time.monotonic())
            late = max(late, time.monotonic() - outcome.arrival)
            try:
                async for message in stub.GenerateStream(request):
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


def _request(index: int, job: Job) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True, request_id=f"bench-{index}"
    )
    request.prompt_token_ids.ids.extend(job.prompt.tolist())
    return request
