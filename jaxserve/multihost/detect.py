"""Detects this host's number from TPU pods, Slurm, Open MPI or Kubernetes, through jax."""

from __future__ import annotations

from typing import NamedTuple

_SECONDS = 60  # that finding the coordinator may take


class DetectedHost(NamedTuple):
    """As in `ClusterConfig`."""

    hosts: int
    host: int
    coordinator: str
    local_devices: tuple[int, ...] | None


def detect() -> DetectedHost:
    """Asks jax. Raises ValueError if jax finds no environment that it knows."""
    # The one way to it that does not connect at once, and a worker's plans come by another channel first.
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, hosts, host, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, _SECONDS
        )
    except Exception as problem:  # whatever the surroundings' own services answer
        raise ValueError(f"hosts is auto, and jax cannot find out where it runs: {problem}") from problem
    if coordinator is None or hosts is None or host is None:
        raise ValueError(
            "hosts is auto, and jax finds none of the surroundings it knows (TPU pods, Slurm, Open MPI, Kubernetes "
            "with the kubernetes package); give --hosts, --host-id and --coordinator"
        )
    return DetectedHost(hosts, host, coordinator, None if devices is None else tuple(devices))
