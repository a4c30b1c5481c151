"""Joins and leaves the jax.distributed job of all hosts."""

from __future__ import annotations

import ctypes
import math
import socket
import threading

import jax

from jaxserve.multihost.channel import LEAVING_SECONDS
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.process_watchdog import end_process

_HEARTBEAT_TIMEOUT = 60  # seconds after which jax itself ends a process; the watchdogs are much faster
_ADDRESS_TIMEOUT = 30  # seconds to learn another host's address; less than the probe of direct links waits


def join(cluster: ClusterConfig, coordinator: str) -> None:
    """Join the job and wait for all hosts. Call it before anything uses a device.

    Args:
      coordinator: the address of jax's coordinator on this host.

    Raises:
      ValueError: the coordinator's name does not resolve.
    """
    mine = _own_address(cluster)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    if cluster.links != "bridge":  # these settings are for CPUs; accelerators have links of their own
        # The other hosts get exactly this port; with port 0 they would wait for ever (jax 0.10).
        jax.config.update("jax_cross_host_transfer_socket_address", f"{mine}:{_reserve_port(mine)}")
        jax.config.update("jax_cross_host_transfer_timeout_seconds", _ADDRESS_TIMEOUT)
        jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{mine}:0"] * 4))
    jax.distributed.initialize(
        coordinator_address=coordinator,
        coordinator_bind_address=coordinator,
        num_processes=cluster.hosts,
        process_id=cluster.host,
        local_device_ids=cluster.local_devices,
        initialization_timeout=math.ceil(cluster.join_timeout),
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=math.ceil(LEAVING_SECONDS),
    )


def leave() -> None:
    """Leave the job. Ends the process if that takes longer than 5 seconds."""
    timer = threading.Timer(LEAVING_SECONDS, end_process, (0,))
    timer.daemon = True
    timer.start()
    jax.distributed.shutdown()
    timer.cancel()


def keep_client() -> None:
    """Keeps jax's client to the end: its destructor would wait for copies that never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(jax.local_devices()[0].client))


def _own_address(cluster: ClusterConfig) -> str:
    """The address of the interface that leads to the master."""
    name, port = cluster.interface.strip("[]"), int(cluster.coordinator.rpartition(":")[2])
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probing:
            probing.connect(address)  # sends nothing
            found = probing.getsockname()[0]
    except OSError as problem:
        raise ValueError(f"coordinator is {cluster.coordinator}, which cannot be found: {problem}") from None
    return f"[{found}]" if ":" in found else found


def _reserve_port(address: str) -> int:
    """Reserves a port for jax's transfer server, which binds it at the first copy.

    The port stays bound until the process ends, so that no other socket gets it before.
    """
    bare = address.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((bare, 0))
        port = reserved.getsockname()[1]
        reserved.detach()
    return port
