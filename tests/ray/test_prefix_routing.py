"""Calls go where their prompts are cached, and elsewhere if that replica has too much or dies."""

import asyncio
import concurrent.futures
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from ray import serve

from jaxserve.demo import DEMO_MODEL
from jaxserve.text.tokenizer import Tokenizer
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.ray.prefixes import PromptReader
from tests.ray.local_cluster import WAIT_SECONDS, Cluster, until

pytestmark = pytest.mark.scale

BLOCK, ANSWER = 64, 16
JSON = [(b"content-type", b"application/json")]
TWO = {"min_replicas": 2, "max_replicas": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster()
    yield it
    it.close()


def words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choice(("one", "two", "three", "four", "five")) for _ in range(number))


def conversations(cluster: Cluster) -> tuple[float, float]:
    """The share of prompt tokens that was cached when twelve conversations went on, and what one cache would have."""
    draw = random.Random(0)
    prompts = [f"Conversation {i}: {words(draw, 250)}" for i in range(12)]
    tokens, cached, cacheable, before = 0, 0, 0, [0] * len(prompts)
    for turn in range(4):
        for i, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_SECONDS).json()
            usage = answer["usage"]
            if turn:
                tokens += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                cacheable += before[i] // BLOCK * BLOCK
            before[i] = usage["prompt_tokens"]
            prompts[i] += f"{answer['choices'][0]['text']} And {words(draw, 30)}"
    return cached / tokens, cacheable / tokens


def test_conversations_stay_with_their_cache(cluster: Cluster) -> None:
    cluster.deploy(**TWO)
    by_queues, _ = conversations(cluster)
    cluster.deploy(routing="prefix", **TWO)
    by_prefix, most = conversations(cluster)
    print(f"cached: {by_queues:.0%} by queues, {by_prefix:.0%} by prefix, {most:.0%} with one cache")
    assert by_prefix > 0.95 * most
    assert by_prefix > by_queues + 0.1


def test_a_replica_with_too_many_calls_is_passed_by(cluster: Cluster) -> None:
    cluster.deploy(routing="prefix", **TWO)
    replicas = serve.get_deployment_handle("jaxserve", "default").options(stream=True)  # with a router of this process
    reader, draw = PromptReader(Tokenizer.from_directory(DEMO_MODEL), None), random.Random(1)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": JSON, "query_string": b""}

    async def cached(prompt: str, max_tokens: int = 1) -> int:
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
        read = await reader.of_http(scope["path"], JSON, body)
        pieces = [messages async for messages in replicas.call_http.remote(read, scope, body)]
        answer = json.loads(b"".join(message.get("body", b"") for messages in pieces for message in messages))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def run() -> list[list[int]]:
        in_row = 0
        while in_row < 5:  # until the router has reports
            fresh = words(draw, 200)
            in_row = in_row + 1 if await cached(fresh) == 0 and await cached(fresh) >= BLOCK else 0
        found = []
        for number in (4, 16):
            prompt = words(draw, 200)
            await cached(prompt)
            found.append(await asyncio.gather(*[cached(prompt, 300) for _ in range(number)]))
        return found

    few, many = asyncio.run(run())
    assert min(few) >= BLOCK, few  # no more than half of the rows
    assert min(many) == 0, many
    assert sum(each >= BLOCK for each in many) >= 4, many


def test_calls_without_an_answer_survive_their_replica(cluster: Cluster) -> None:
    cluster.deploy(routing="prefix", **TWO)

    def call(index: int) -> Any:
        body = {"prompt": f"Call {index}", "max_tokens": 900, "ignore_eos": True}
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=WAIT_SECONDS)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call, index) for index in range(8)]
        until(lambda: re.search(r"jaxserve_requests_running\S* [1-9]", httpx.get(f"{cluster.url}/metrics").text))
        os.kill(cluster.replicas().pop(), signal.SIGKILL)
        answers = [each.result() for each in calls]
    assert [each.status_code for each in answers] == [200] * 8
    assert {each.json()["usage"]["completion_tokens"] for each in answers} == {900}


def test_an_rpc_says_that_its_replica_is_gone(cluster: Cluster) -> None:
    cluster.deploy(routing="prefix")
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub: Any = InferenceStub(channel)
        messages = stub.GenerateStream(pb.GenerateRequest(prompt="It was", max_tokens=900, ignore_eos=True))
        next(messages)
        os.kill(cluster.replicas().pop(), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as ended:
            list(messages)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the replica with this call is gone" in ended.value.details()
