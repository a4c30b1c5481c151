"""Two hosts that serve one model together, each an actor on a node of its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from server.ray import RayConfig, group
from tests.ray.local_cluster import Cluster, until

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster(nodes=2)
    yield it
    it.close()


@pytest.mark.parametrize(
    ("victim", "supervise", "routing"),
    [
        ("engine of host 1", False, "session"),
        ("engine of host 1", True, "session"),
        ("replica", False, "session"),
        ("replica", False, "prefix"),
    ],
)
def test_a_group_serves_and_comes_back(
    cluster: Cluster, victim: str, supervise: bool, routing: str, tmp_path: Path
) -> None:
    flags = ["--stages", "2", "--flight-folder", str(tmp_path), *["--supervise"] * supervise]
    cluster.deploy(*flags, hosts=2, routing=routing)
    text = cluster.complete(20)
    engines = cluster.engines()
    assert len(engines) == 2
    assert len({cluster.node_of(engine) for engine in engines}) == 2
    worker = next(engine for engine in engines if cluster.parent_of(engine) not in cluster.replicas())
    os.kill(worker if victim == "engine of host 1" else cluster.replicas().pop(), signal.SIGKILL)
    until(lambda: not cluster.engines() & engines, 5.0)  # a group fails as a whole
    until(lambda: len(cluster.engines() - engines) == 2)

    def again() -> str | None:
        try:
            return cluster.complete(20)
        except (AssertionError, httpx.HTTPError):  # it is not ready yet
            return None

    assert until(again) == text


def test_hosts_that_cannot_share_the_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="is 1 devices, which 2 hosts cannot share evenly"):
        group(RayConfig(), hosts=2)
