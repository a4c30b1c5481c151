"""Two hosts that serve one model together, each an actor on a node of its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

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
    ("victim", "routing"), [("engine of host 1", "session"), ("replica", "session"), ("replica", "prefix")]
)
def test_a_group_serves_and_comes_back(cluster: Cluster, victim: str, routing: str, tmp_path: Path) -> None:
    cluster.deploy("--stages", "2", "--flight-folder", str(tmp_path), hosts=2, routing=routing)
    text = cluster.complete(20)
    engines = cluster.engines()
    assert len(engines) == 2
    assert len({cluster.node_of(engine) for engine in engines}) == 2
    worker = next(engine for engine in engines if cluster.parent_of(engine) not in cluster.replicas())
    os.kill(worker if victim == "engine of host 1" else cluster.replicas().pop(), signal.SIGKILL)
    until(lambda: not cluster.engines() & engines, 5.0)  # a group fails as a whole
    until(lambda: len(cluster.engines() - engines) == 2)

    assert cluster.complete_when_ready(20) == text


def test_hosts_that_cannot_share_the_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="is 1 devices, which 2 hosts cannot share evenly"):
        group(RayConfig(), hosts=2)
