"""Detects this host's number from TPU pods, Slurm, Open MPI or Kubernetes, through jax."""

from __future__ import annotations

from typing import NamedTuple

_SECONDS = 60  # most seconds to find the coordinator


class DetectedHost(NamedTuple):
    """A host's place in its group; the fields are those of `ClusterConfig`."""

    hosts: int
    host: int
    coordinator: str
    local_devices: tuple[int, ...] | None


def detect() -> DetectedHost:
    """Ask jax. Raises ValueError if jax does not recognise the environment."""
    # The only way that does not connect at once. A worker must first hear from the master by another channel.
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, hosts, host, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, _SECONDS
        )
    except Exception as problem:  # detection may raise anything
        raise ValueError(f"hosts is auto, and jax cannot detect the environment: {problem}") from problem
    if coordinator is None or hosts is None or host is None:
        raise ValueError(
            "hosts is auto, and jax does not recognise the environment (TPU pods, Slurm, Open MPI, or Kubernetes "
            "with the kubernetes package); give --hosts, --host-id and --coordinator"
        )
    return DetectedHost(hosts, host, coordinator, None if devices is None else tuple(devices))
