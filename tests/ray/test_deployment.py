"""A deployment on a Ray cluster of this machine: what its callers get, and what becomes of them when processes end."""

import concurrent.futures
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.ray import RayConfig, deployment
from tests.ray.local_cluster import ROOT, WAIT_SECONDS, Cluster, until

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster()
    yield it
    it.close()


routings = pytest.mark.parametrize("routing", ["session", "prefix"])


def is_whole(events: list[Any]) -> bool:
    return events[-1] == "data: [DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


@routings
def test_answers_whole_and_streamed(cluster: Cluster, routing: str) -> None:
    cluster.deploy(routing=routing)
    text = cluster.complete(20)
    events = cluster.stream(20)
    assert is_whole(events)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert httpx.get(f"{cluster.url}/health").status_code == 200


@routings
def test_grpc_through_the_proxy(cluster: Cluster, tmp_path: Path, routing: str) -> None:
    (keys := tmp_path / "keys.toml").write_text('[team]\nkeys = ["a-secret"]\n')
    cluster.deploy("--api-keys", str(keys), routing=routing)
    metadata = (("authorization", "Bearer a-secret"),)
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub: Any = InferenceStub(channel)
        request = pb.GenerateRequest(prompt="It was", max_tokens=20, temperature=0, ignore_eos=True)
        whole = stub.Generate(request, metadata=metadata)
        messages = list(stub.GenerateStream(request, metadata=metadata))
        assert len(whole.token_ids) == 20
        assert "".join(each.text for each in messages) == whole.text
        assert len(messages) > 5
        assert stub.GetModel(pb.GetModelRequest(), metadata=metadata).name == "demo"
        for call in (stub.Generate, lambda *args, **given: list(stub.GenerateStream(*args, **given))):
            with pytest.raises(grpc.RpcError) as refused:
                call(request)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as refused:
                call(pb.GenerateRequest(prompt="a", top_p=2), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "top_p" in refused.value.details()
        endless = stub.GenerateStream(
            pb.GenerateRequest(prompt="It was", max_tokens=900, ignore_eos=True), metadata=metadata
        )
        next(endless)
        endless.cancel()
        until(lambda: stub.GetLoad(pb.GetLoadRequest(), metadata=metadata).running == 0, 5.0)


@routings
def test_a_caller_who_leaves_ends_the_call(cluster: Cluster, routing: str) -> None:
    cluster.deploy(routing=routing)

    def ended() -> dict[str, float]:
        text = httpx.get(f"{cluster.url}/metrics").text
        return {
            how: float(n) for how, n in re.findall(r'jaxserve_requests_total\{finish_reason="(.+?)".*\} (.+)', text)
        }

    before = ended()
    body = {"prompt": "It was", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=WAIT_SECONDS) as response:
        next(response.iter_lines())
    after = until(lambda: (now := ended()) != before and now, 30.0)
    assert after == before | {"cut short": before["cut short"] + 1}


def test_the_calls_of_a_session_find_their_prefix(cluster: Cluster) -> None:
    cluster.deploy(min_replicas=2, max_replicas=2)
    until(lambda: len(cluster.engines()) == 2)

    def cached(session: str, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-session-id": session}, timeout=60)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def are_kept(trial: int) -> bool:
        prompts = {f"{index}": f"Trial {trial}, turn {index} " + "of it " * 100 for index in range(10)}
        assert all(cached(session, prompt) == 0 for session, prompt in prompts.items())
        return all(cached(session, prompt) >= 64 for session, prompt in prompts.items())

    trial = next(trial for trial in range(3) if are_kept(trial))  # the proxy may learn of a replica during the first
    # Both have sessions: another session's prompt is cached on one of them only.
    prompt = f"Trial {trial}, turn 0 " + "of it " * 100
    assert {cached(f"{index}", prompt) >= 64 for index in range(10, 30)} == {False, True}


def test_a_replica_answers_without_the_proxy() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.ray.cost", "--rounds", "1", "--port", "30000"]
    environment = os.environ | {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert "| gap between tokens |" in done.stdout, done.stderr


def broken(cluster: Cluster, kill: Callable[[], int], streams: int = 8) -> list[list[Any] | str]:
    """What streams come to whose process is killed once all have begun: their events, or what their client raised."""
    begun = threading.Barrier(streams + 1)

    def run() -> list[Any] | str:
        told = iter([begun.wait])
        try:
            return cluster.stream(900, lambda: next(told, lambda: None)())
        except httpx.HTTPError as problem:
            return type(problem).__name__

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        answers = [pool.submit(run) for _ in range(streams)]
        begun.wait(WAIT_SECONDS)
        os.kill(kill(), signal.SIGKILL)
        return [answer.result() for answer in answers]


@routings
def test_a_killed_engine_ends_its_streams_and_is_restarted(cluster: Cluster, routing: str) -> None:
    cluster.deploy(routing=routing)
    replicas, engines = cluster.replicas(), cluster.engines()
    for events in broken(cluster, lambda: min(engines)):
        assert "was killed by signal 9" in events[-1]["error"]["message"]
    assert cluster.complete()  # which waits for the engine
    assert cluster.replicas() == replicas
    assert not cluster.engines() & engines


def test_a_replica_whose_engine_keeps_dying_is_replaced(cluster: Cluster) -> None:
    cluster.deploy()
    before = cluster.replicas()

    def is_replaced() -> bool:
        for engine in cluster.engines():
            with contextlib.suppress(OSError):  # it has ended
                if cluster.parent_of(engine) in before:
                    os.kill(engine, signal.SIGKILL)
        return not cluster.replicas() & before

    until(is_replaced)
    assert cluster.complete_when_ready()


@routings
def test_a_killed_replica_breaks_its_streams_and_leaves_nothing(cluster: Cluster, routing: str) -> None:
    cluster.deploy(routing=routing)
    engines = until(cluster.engines)
    ends = broken(cluster, lambda: cluster.replicas().pop())
    assert all(isinstance(end, str) for end in ends), ends
    until(lambda: not cluster.engines() & engines, 5.0)
    assert cluster.complete()


@routings
def test_an_update_cuts_no_stream(cluster: Cluster, routing: str) -> None:
    cluster.deploy(routing=routing)
    before, begun = cluster.replicas(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = pool.submit(cluster.stream, 900, begun.set)
        begun.wait(WAIT_SECONDS)
        cluster.deploy("--served-model-name", "second", routing=routing)
        assert is_whole(stream.result())
    until(lambda: not cluster.replicas() & before)
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "second"


def test_replicas_follow_owed_tokens_and_each_has_metrics(cluster: Cluster) -> None:
    cluster.deploy(max_replicas=2, target_owed_tokens=1500, upscale_delay=0.5, downscale_delay=1.0)
    assert len(cluster.replicas()) == 1
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            cluster.complete(900)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call) for _ in range(4)]
        try:
            until(lambda: len(cluster.replicas()) == 2)
            until(lambda: len(_replicas_with_metrics(cluster)) >= 2)
        finally:
            stop.set()
        for each in calls:
            each.result()
    until(lambda: len(cluster.replicas()) == 1)


def _replicas_with_metrics(cluster: Cluster) -> set[str]:
    text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics").text
    return set(re.findall(r'jaxserve_slots\{.*?replica="([^"]+)"', text))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"flags": ("--port", "1")}, "--port has no meaning on Ray Serve"),
        ({"flags": ("--hosts", "auto")}, "--hosts has no meaning on Ray Serve"),
        ({"flags": ("--max-rowz", "1")}, "--max-rowz 1: jaxserve serve refuses them"),
        ({"min_replicas": 2}, "min_replicas is 2 and max_replicas 1"),
        ({"target_owed_tokens": 0}, "target_owed_tokens is 0"),
        ({"routing": "prompt"}, "routing is 'prompt'; it must be session or prefix"),
    ],
)
def test_a_mistake_is_told_at_once(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        deployment(RayConfig(**fields))
