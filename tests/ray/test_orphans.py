"""What is left of a replica when the raylet that started it dies."""

import os
import signal
from pathlib import Path

import pytest

from tests.ray.local_cluster import Cluster, until

pytestmark = pytest.mark.scale


def test_replica_and_engine_end_soon_after_their_raylet() -> None:
    cluster = Cluster()
    try:
        cluster.deploy()
        (replica,), (engine,) = cluster.replicas(), cluster.engines()
        raylet = cluster.parent_of(replica)
        assert b"raylet" in Path(f"/proc/{raylet}/cmdline").read_bytes()
        os.kill(raylet, signal.SIGKILL)
        until(lambda: not {replica, engine} & (cluster.replicas() | cluster.engines()), 5.0)
    finally:
        cluster.kill()
