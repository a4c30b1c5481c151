"""A group on a TPU slice: nodes that only say, by their labels and resources, that they have TPUs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from server.ray import RayConfig, group, tpu
from tests.ray.local_cluster import Cluster, until

pytestmark = pytest.mark.scale

TYPE, CHIPS = "v6e-8", {"num_cpus": 1, "resources": {"TPU": 4}}


def host(name: str, worker: int) -> tuple[dict[str, str], dict[str, float]]:
    """What Ray gives a node of a slice of two hosts."""
    labels = {"slice-name": name, "worker-id": f"{worker}", "topology": "2x4", "pod-type": TYPE}
    head = {} if worker else {f"TPU-{TYPE}-head": 1.0}
    return {f"ray.io/tpu-{key}": value for key, value in labels.items()}, {"TPU": 4.0} | head


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    it = Cluster(others=[host("b", 1), host("a", 0), host("b", 0), host("a", 1)])
    yield it
    it.close()


def test_a_group_has_one_slice(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--stages", "2", "--flight-folder", str(tmp_path)]
    cluster.deploy(*flags, hosts=2, tpu_slice=TYPE, actor_options=CHIPS)
    text, engines = cluster.complete(20), cluster.engines()

    def workers() -> dict[str, str]:
        """The slices of the engines, by their workers."""
        labels = [cluster.labels[cluster.node_of(engine)] for engine in cluster.engines()]
        return {each["ray.io/tpu-worker-id"]: each["ray.io/tpu-slice-name"] for each in labels}

    found = workers()
    assert sorted(found) == ["0", "1"]
    assert found["0"] == found["1"]
    (replica,) = cluster.replicas()
    assert cluster.labels[cluster.parent_of(replica)]["ray.io/tpu-worker-id"] == "0"
    os.kill(replica, signal.SIGKILL)
    until(lambda: len(cluster.engines() - engines) == 2)

    assert cluster.complete_when_ready(20) == text
    assert len(set(workers().values())) == 1


def test_a_slice_is_for_hosts_with_chips() -> None:
    with pytest.raises(ValueError, match="it is for several hosts whose actor_options have the chips of one"):
        group(RayConfig(flags=("--stages", "2")), hosts=2, tpu_slice=TYPE)


def test_a_slice_of_other_hosts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, _ = host("a", 0)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_labels=lambda: labels))
    with pytest.raises(ValueError, match=r"hosts is 4; the slice a \(v6e-8\) has 2, with 4 chips each"):
        tpu.slice_of_this_node(4, CHIPS)
