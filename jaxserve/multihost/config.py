"""A process's settings for several hosts, and the facts that all hosts must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.fields import param, params
from sharding import axes

LinksName = Literal["auto", "direct", "bridge"]

_OF_THE_HOST = (
    "compilation_cache",
    "max_queued_requests",
    "max_queued_tokens",
    "max_queue_seconds",
)  # settings that may differ
_LEAST_DEADLINE = 10.0  # seconds
_MOST_SECONDS = 1_000_000  # limit for settings in seconds; threads cannot wait for an infinite time
_COSTS = 20  # an iteration's deadline is this many times the measured cost of the slowest bucket
LEAST_SECRET = 16  # bytes; who connects could try shorter ones, as host 0 proves first that it knows it
_VERSIONS = ("jax", "jaxlib", "numpy", "llguidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Mutual TLS between the hosts: contents of PEM files.

    Attributes:
      authority: certificate of the authority that signed the certificate of every host.
      certificate / key: those of this host.
    """

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """This host's place in a group of hosts. Times are in seconds; flags come from the metadata.

    Attributes:
      hosts: number of hosts; each has the same number of devices.
      host: this host's number. Host 0 is the master: it schedules, serves clients, and runs its stages.
      coordinator: HOST:PORT where the master listens for the other hosts, on this interface only.
      secrets: TLS files; None sends plain text.
      shared_secret: what every host proves to know when it joins.
      local_devices: which of its devices this process uses; None for all.
    """

    hosts: int
    host: int
    coordinator: str
    join_timeout: float = param(300.0, "how long the hosts wait for each other", metavar="S")
    step_deadline: float | None = param(
        None,
        "all hosts fail if an iteration takes longer",
        default_help="20 times the measured time of the largest bucket, and at least 10",
        metavar="S",
    )
    links: LinksName = param(
        "auto",
        "how stages on different hosts pass arrays; direct: the runtime copies; bridge: a program on both; auto: "
        "direct if a probe finds that it works",
    )
    record_seconds: float = param(
        120.0,
        "seconds of iterations kept for `jaxserve replay`; written when a host fails and on SIGUSR2",
        metavar="S",
        flag="--flight-seconds",
    )
    record_folder: Path = param(
        Path(),
        "directory for flight records",
        default_help="the current directory",
        metavar="DIR",
        flag="--flight-folder",
    )
    secrets: TlsFiles | None = None
    shared_secret: bytes | None = dataclasses.field(default=None, repr=False)
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise ValueError(f"hosts is {self.hosts}; it must be at least 2")
        if not 0 <= self.host < self.hosts:
            raise ValueError(f"host-id is {self.host}; with {self.hosts} hosts it must be from 0 to {self.hosts - 1}")
        name, _, port = self.coordinator.rpartition(":")
        if not name or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"coordinator is {self.coordinator!r}; it must be HOST:PORT of host 0")
        for name, value in (
            ("join-timeout", self.join_timeout),
            ("step-deadline", self.step_deadline),
            ("flight-seconds", self.record_seconds),
        ):
            if value is not None and not 0 < value <= _MOST_SECONDS:
                raise ValueError(f"{name} is {value}; it must be above 0 seconds and at most {_MOST_SECONDS}")
        if self.shared_secret is not None and len(self.shared_secret) < LEAST_SECRET:
            raise ValueError(f"the secret of the hosts has {len(self.shared_secret)} bytes; it needs {LEAST_SECRET}")
        if self.links not in get_args(LinksName):
            raise ValueError(f"links is {self.links!r}; it must be one of {', '.join(get_args(LinksName))}")

    @property
    def interface(self) -> str:
        """The master's name or address, where it listens."""
        return self.coordinator.rpartition(":")[0]

    def deadline(self, slowest: float) -> float:
        """Seconds until the deadline of an iteration.

        Args:
          slowest: measured seconds of the slowest bucket.
        """
        return self.step_deadline or max(_LEAST_DEADLINE, _COSTS * slowest)


CLUSTER_PARAMS = params(ClusterConfig)


def check_settings(config: EngineConfig, cluster: ClusterConfig) -> None:
    """Raise ValueError for settings that several hosts do not support."""
    if config.host_cache is not None:
        raise ValueError(f"host_cache is {config.host_cache}; several hosts support none")
    if config.draft_model is not None:
        raise ValueError(f"speculate is {config.speculate}; several hosts support no draft model, only ngram")
    if config.num_devices % cluster.hosts:
        raise ValueError(
            f"{product(config)} is {config.num_devices} devices, which {cluster.hosts} hosts cannot share evenly; it "
            f"must be a multiple of {cluster.hosts}"
        )
    if cluster.links == "direct" and (shared := shared_by_links(config, cluster.hosts)):
        raise ValueError(f"links is direct, but {shared}; it must be auto or bridge")
    if cluster.shared_secret is None and cluster.secrets is None and not _is_loopback(cluster.interface):
        raise ValueError(
            f"coordinator is {cluster.coordinator}, which other machines may reach: give every host the same "
            "--hosts-secret, or certificates (--hosts-cert)"
        )


def _is_loopback(interface: str) -> bool:
    try:
        return ipaddress.ip_address(interface.strip("[]")).is_loopback
    except ValueError:
        return interface == "localhost"


def product(config: EngineConfig) -> str:
    """The devices of all replicas as a product, for messages."""
    replicas = f" times replicas {config.replicas}" if config.replicas > 1 else ""
    return f"{axes.product(config.stage_axes)} times stages {config.stages}{replicas}"


def place(config: EngineConfig, hosts: int) -> list[dict[int, tuple[int, ...]]]:
    """Each replica's hosts, with the stages that have devices there.

    Hosts share the devices of all replicas evenly. Replicas, and the stages of each, take them in order.
    """
    size, share = config.stage_devices, config.num_devices // hosts
    each, found = size * config.stages, []
    for start in range(0, config.num_devices, each):
        stages: dict[int, tuple[int, ...]] = {}
        for host in range(start // share, (start + each - 1) // share + 1):
            first, end = max(host * share, start) - start, min((host + 1) * share, start + each) - start
            stages[host] = tuple(range(first // size, (end - 1) // size + 1))
        found.append(stages)
    return found


def shared_by_links(config: EngineConfig, hosts: int) -> str:
    """Which two replicas have links between hosts and share one of these; empty if none do.

    Direct links do not serve them: the runtime pairs copies by their number (`links.DirectLink`), and the iterations of
    two replicas come in another order on every host.
    """
    linked: dict[int, int] = {}  # host -> a replica with links to other hosts
    for replica, stages in enumerate(place(config, hosts)):
        for host in stages if config.stages > 1 and len(stages) > 1 else ():
            if host in linked:
                return f"replicas {linked[host]} and {replica} both link stages of host {host} to other hosts"
            linked[host] = replica
    return ""


def facts(
    config: EngineConfig, cluster: ClusterConfig, buckets: Sequence[int], fingerprint: str, files: Sequence[Path]
) -> list[tuple[str, str]]:
    """The (field, value) pairs that must be the same on every host."""
    found = [("hosts", str(cluster.hosts)), ("links", cluster.links)]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "sharding" and value is not None:
            value = _digest(Path(value))
        if field.name not in _OF_THE_HOST:
            found.append((field.name, str(value)))
    found.append(("the version of jaxserve", jaxserve.__version__))
    found += [(f"the version of {name}", metadata.version(name)) for name in _VERSIONS]
    found += [("the model's fingerprint", fingerprint), ("the bucket table", ", ".join(map(str, buckets)))]
    found += [(f"the model's {file.name}", _digest(file)) for file in files]
    return found


def _digest(file: Path) -> str:
    if not file.exists():
        return "no file"
    return f"a file of SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
