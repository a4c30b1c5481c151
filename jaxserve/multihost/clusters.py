"""A process's place among hosts, from its cluster's environment (`--hosts auto`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

_PORT = 8482  # jax's own; TPUs use 8471 and 8476 themselves
_FIRST_PORT, _PORTS = 61_440, 4_095  # above Linux's ephemeral ports
_THIS_MACHINE = "127.0.0.1"
_DETECTION_SECONDS = 60  # most seconds for jax to find the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process's place in a group.

    Attributes:
      cluster: what told it, such as "Slurm".
      hosts / host: processes of the group, and this one's number.
      coordinator: HOST:PORT of host 0; None where the cluster does not tell it.
      local_rank / local_size: this process among those of the group on its machine, and their number.
    """

    cluster: str
    hosts: int
    host: int
    coordinator: str | None
    local_rank: int = 0
    local_size: int = 1

    def local_devices(self, each: int, environment: Mapping[str, str]) -> tuple[int, ...] | None:
        """This machine's devices for this process, which needs `each`; None for all it sees."""
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        if self.local_size == 1 or (chosen is not None and len(chosen.split(",")) == each):
            return None
        return tuple(range(self.local_rank * each, (self.local_rank + 1) * each))


class _Variables:
    """Variables of a recognised cluster; ValueError names one that is missing or wrong."""

    def __init__(self, cluster: str, environment: Mapping[str, str], hint: str) -> None:
        self._cluster, self._environment, self._hint = cluster, environment, hint

    def get(self, name: str) -> str | None:
        return self._environment.get(name)

    def text(self, name: str) -> str:
        value = self._environment.get(name)
        if not value:
            raise ValueError(f"hosts is auto, and this looks like {self._cluster}, but {name} is not set: {self._hint}")
        return value

    def number(self, name: str, least: int = 0) -> int:
        value = self.text(name)
        if not value.isdecimal() or int(value) < least:
            raise ValueError(f"hosts is auto, and {name} is {value!r}; it must be a whole number, at least {least}")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How one kind of cluster tells a process its place.

    Attributes:
      name: for messages.
      marks: the variables that it is recognised by.
      read: computes the place.
      hint: what to do where a variable is missing.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[str, _Variables], Place]
    hint: str


def _leader_worker_set(name: str, variables: _Variables) -> Place:
    return Place(
        cluster=name,
        hosts=variables.number("LWS_GROUP_SIZE", 1),
        host=variables.number("LWS_WORKER_INDEX"),
        coordinator=f"{variables.text('LWS_LEADER_ADDRESS')}:{_PORT}",
    )


def _tpu_slice(name: str, variables: _Variables) -> Place:
    """The slice's hosts are listed in order; of several slices, each takes the next numbers."""
    names = variables.text("TPU_WORKER_HOSTNAMES").split(",")
    slices, this, first = 1, 0, names[0]
    if variables.get("MEGASCALE_NUM_SLICES"):
        slices, this = variables.number("MEGASCALE_NUM_SLICES", 1), variables.number("MEGASCALE_SLICE_ID")
        first = variables.text("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    return Place(
        cluster=name,
        hosts=len(names) * slices,
        host=variables.number("TPU_WORKER_ID") + this * len(names),
        coordinator=f"{first.strip()}:{_PORT}",
    )


def _open_mpi(name: str, variables: _Variables) -> Place:
    """Host 0 is taken to run where mpirun does, which version 4 tells and version 5 does not."""
    hosts, local_size = variables.number("OMPI_COMM_WORLD_SIZE", 1), variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    mpirun = re.match(r"(\d+)\.\d+;tcp6?://(\[[^\],]+|[^,:;]+)", variables.get("OMPI_MCA_orte_hnp_uri") or "")
    port = _free_port(int(mpirun[1]) >> 12) if mpirun else _PORT  # the lower 12 bits are the same for every job
    address = None if mpirun is None else mpirun[2] + "]" * mpirun[2].startswith("[")
    if hosts == local_size:
        address = _THIS_MACHINE
    return Place(
        cluster=name,
        hosts=hosts,
        host=variables.number("OMPI_COMM_WORLD_RANK"),
        coordinator=None if address is None else f"{address}:{port}",
        local_rank=variables.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
    )


def _hydra(name: str, variables: _Variables) -> Place:
    hosts, local_size = variables.number("PMI_SIZE", 1), variables.number("MPI_LOCALNRANKS", 1)
    return Place(
        cluster=name,
        hosts=hosts,
        host=variables.number("PMI_RANK"),
        coordinator=f"{_THIS_MACHINE}:{_PORT}" if hosts == local_size else None,
        local_rank=variables.number("MPI_LOCALRANKID"),
        local_size=local_size,
    )


def _slurm(name: str, variables: _Variables) -> Place:
    """Variables of the job step: those of the job are in a batch script too, which runs once."""
    each = _tasks_of_nodes(variables.text("SLURM_STEP_TASKS_PER_NODE"))
    node = variables.number("SLURM_NODEID")
    port = _free_port(variables.number("SLURM_JOB_ID") * 31 + variables.number("SLURM_STEP_ID"))
    nodes = variables.text("SLURM_STEP_NODELIST")
    return Place(
        cluster=name,
        hosts=variables.number("SLURM_STEP_NUM_TASKS", 1),
        host=variables.number("SLURM_PROCID"),
        coordinator=f"{_THIS_MACHINE if len(each) == 1 else _first_node(nodes)}:{port}",
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=each[node] if node < len(each) else 1,
    )


def _free_port(number: int) -> int:
    """A port that few others take, the same on every host."""
    return _FIRST_PORT + number % _PORTS


def _first_node(nodes: str) -> str:
    """The first of Slurm's node list, such as node007 of node[007-009,012],other[1-2]."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _tasks_of_nodes(text: str) -> list[int]:
    """Slurm's tasks of each node: 2(x3),1 is [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(chain.from_iterable([int(tasks)] * int(times or 1) for tasks, times in found))


# The first that is recognised counts. A program that starts others below Slurm (mpirun) comes before Slurm, whose
# variables are those of that program there.
CLUSTERS = (
    Cluster(
        name="a LeaderWorkerSet",
        marks=("LWS_GROUP_SIZE",),
        read=_leader_worker_set,
        hint="its controller sets it in every container",
    ),
    Cluster(
        name="a TPU slice of GKE",
        marks=("TPU_WORKER_HOSTNAMES",),
        read=_tpu_slice,
        hint="GKE sets it in containers that ask for google.com/tpu, in pods with a headless service",
    ),
    Cluster(
        name="Open MPI",
        marks=("OMPI_COMM_WORLD_SIZE",),
        read=_open_mpi,
        hint="mpirun sets it",
    ),
    Cluster(
        name="MPICH or Intel MPI",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        read=_hydra,
        hint="mpirun sets it",
    ),
    Cluster(
        name="Slurm",
        marks=("SLURM_JOB_ID",),
        read=_slurm,
        hint="start each host as a task of srun",
    ),
)


def find(environment: Mapping[str, str]) -> Place:
    """This process's place, as its cluster tells it; where none is recognised, as jax finds it.

    Raises:
      ValueError: no cluster is recognised, or one of its variables is missing or wrong.
    """
    for cluster in CLUSTERS:
        if all(name in environment for name in cluster.marks):
            return cluster.read(cluster.name, _Variables(cluster.name, environment, cluster.hint))
    return _of_jax()


def _of_jax() -> Place:
    """As jax finds it by calls: virtual machines with TPUs, and indexed Jobs of Kubernetes."""
    # No public function of jax detects without connecting, and a worker must first hear from host 0 by our own channel.
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, hosts, host, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, _DETECTION_SECONDS
        )
    except Exception as problem:  # detection may raise anything
        raise ValueError(f"hosts is auto, and jax cannot detect the environment: {problem}") from problem
    if coordinator is None or hosts is None or host is None:
        names = ", ".join(cluster.name for cluster in CLUSTERS)
        raise ValueError(
            f"hosts is auto, and neither this program ({names}) nor jax (virtual machines with TPUs, Kubernetes "
            "with the kubernetes package) recognises the environment; give --hosts, --host-id and --coordinator"
        )
    return Place(cluster="jax", hosts=hosts, host=host, coordinator=coordinator)
