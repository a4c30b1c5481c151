"""A deployment on a Ray cluster of this machine: what its callers get, and what becomes of them when processes end."""

import concurrent.futures
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from server.ray import RayConfig, deployment
from tests.ray.local_cluster import WAIT_SECONDS, Cluster, until

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster()
    yield it
    it.close()


def is_whole(events: list[Any]) -> bool:
    return events[-1] == "data: [DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"


def test_answers_whole_and_streamed(cluster: Cluster) -> None:
    cluster.deploy()
    text = cluster.complete(20)
    events = cluster.stream(20)
    assert is_whole(events)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert httpx.get(f"{cluster.url}/health").status_code == 200


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


def test_streams_of_a_killed_engine_end_with_an_error_and_it_is_replaced(cluster: Cluster) -> None:
    cluster.deploy()
    before = cluster.replicas()
    for events in broken(cluster, lambda: cluster.engines().pop()):
        assert "was killed by signal 9" in events[-1]["error"]["message"]
    until(lambda: cluster.replicas() and not cluster.replicas() & before)
    assert cluster.complete()


def test_streams_of_a_killed_replica_raise_and_no_process_is_left(cluster: Cluster) -> None:
    cluster.deploy()
    engines = until(cluster.engines)
    ends = broken(cluster, lambda: cluster.replicas().pop())
    assert all(isinstance(end, str) for end in ends), ends
    until(lambda: not cluster.engines() & engines, 5.0)
    assert cluster.complete()


def test_an_update_cuts_no_stream(cluster: Cluster) -> None:
    cluster.deploy()
    before, begun = cluster.replicas(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = pool.submit(cluster.stream, 900, begun.set)
        begun.wait(WAIT_SECONDS)
        cluster.deploy("--served-model-name", "second")
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
    ],
)
def test_a_mistake_is_told_at_once(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        deployment(RayConfig(**fields))
