"""A process's place among several hosts, read from the variables that each kind of cluster sets."""

from collections.abc import Callable

import pytest

from jaxserve.multihost.clusters import CLUSTERS, find
from jaxserve.multihost.config import ClusterConfig
from server.commands import cli, hosts
from server.commands.console import UserError

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "jaxserve-0.jaxserve.default"}
TPU = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc,t-2.svc", "TPU_WORKER_ID": "2", "TPU_PROCESS_PORT": "8476"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a-0.svc:8080"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "844562432.0;tcp://10.96.0.1,10.148.0.1:49909;tcp6://[fd00::2]:53341",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[003-004,010],other",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_PROCID": "7",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",  # of the job, of which this step has a part
}
ONE_NODE = {"SLURM_STEP_NODELIST": "vm", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
# Whatever a program inherits from what started the program that started it.
BELOW_SLURM = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("environment", "count", "host", "coordinator", "local"),
    [
        (LWS, 4, 3, "jaxserve-0.jaxserve.default:8482", (0, 1)),
        (TPU, 3, 2, "t-0.svc:8482", (0, 1)),
        (TPU | SLICES, 6, 5, "a-0.svc:8482", (0, 1)),
        (TPU | LWS, 4, 3, "jaxserve-0.jaxserve.default:8482", (0, 1)),
        (OPEN_MPI, 4, 3, f"10.96.0.1:{61440 + 844562432 // 4096 % 4095}", (1, 2)),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,fd00::2]:9"},
            4,
            3,
            "[fe80::b9b]:61441",
            (1, 2),
        ),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}, 4, 3, None, (1, 2)),  # version 5
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, 3, "127.0.0.1:62882", (1, 4)),
        (OPEN_MPI | BELOW_SLURM, 4, 3, "10.96.0.1:62882", (1, 2)),
        (HYDRA, 2, 1, "127.0.0.1:8482", (1, 2)),
        (HYDRA | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"} | BELOW_SLURM, 2, 1, None, (0, 1)),
        (SLURM, 8, 7, f"node003:{61440 + 217}", (1, 2)),
        (SLURM | {"SLURM_STEP_ID": "1"}, 8, 7, f"node003:{61440 + 218}", (1, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1,4]n[07-08]x"}, 8, 7, f"rack1n07x:{61440 + 217}", (1, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b,c,d"}, 8, 7, f"a:{61440 + 217}", (1, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1"}, 8, 7, f"node003:{61440 + 217}", (1, 1)),
        (SLURM | ONE_NODE | {"SLURM_NODEID": "0"}, 2, 7, f"127.0.0.1:{61440 + 217}", (1, 2)),
        (SLURM | {"PMI_RANK": "7", "PMI_SIZE": "8"}, 8, 7, f"node003:{61440 + 217}", (1, 2)),  # srun --mpi=pmi2
    ],
)
def test_a_place_is_what_the_cluster_tells(environment, count, host, coordinator, local) -> None:
    place = find(environment)
    assert (place.hosts, place.host, place.coordinator) == (count, host, coordinator)
    assert (place.local_rank, place.local_size) == local


@pytest.mark.parametrize("job", [4095, 2046, 2047, 2**32 - 3])
def test_every_job_has_a_port(job: int) -> None:
    place = find(SLURM | {"SLURM_JOB_ID": str(job)})
    assert place.coordinator is not None
    assert 61440 <= int(place.coordinator.rpartition(":")[2]) < 65535


def test_processes_of_one_machine_share_its_devices() -> None:
    place = find(SLURM)
    assert place.local_devices(4, {}) == (4, 5, 6, 7)
    assert place.local_devices(4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}) == (4, 5, 6, 7)
    assert place.local_devices(4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) is None  # Slurm has chosen them
    assert find(LWS).local_devices(4, {}) is None


@pytest.mark.parametrize(
    ("cluster", "environment"),
    [
        ("a LeaderWorkerSet", LWS),
        ("a TPU slice of GKE", TPU),
        ("Open MPI", OPEN_MPI),
        ("MPICH or Intel MPI", HYDRA),
        ("Slurm", SLURM),
    ],
)
def test_what_is_missing_or_wrong_is_named(cluster, environment) -> None:
    (known,) = [each for each in CLUSTERS if each.name == cluster]
    read = [name for name in environment if name not in ("TPU_PROCESS_PORT", "SLURM_NTASKS", "OMPI_MCA_orte_hnp_uri")]
    for name in read:
        if name not in known.marks:
            with pytest.raises(ValueError, match=f"looks like {cluster}, but {name} is not set: {known.hint[:20]}"):
                find({each: value for each, value in environment.items() if each != name})
        with pytest.raises(ValueError, match=f"{name} is not set"):
            find(environment | {name: ""})
        if environment[name].isdecimal():
            for wrong in ("-1", "x", "1.5"):
                with pytest.raises(ValueError, match=f"{name} is '{wrong}'; it must be a whole number"):
                    find(environment | {name: wrong})


def test_an_unknown_environment_is_told() -> None:
    with pytest.raises(ValueError, match=r"Open MPI, MPICH or Intel MPI, Slurm.* give --hosts, --host-id and"):
        find({})


@pytest.fixture
def under_slurm(monkeypatch) -> Callable[..., ClusterConfig | None]:
    """What `serve --hosts auto` makes of its flags as a task of Slurm: `under_slurm("--tensor 8", SLURM_...="1")`."""
    for name, value in (SLURM | ONE_NODE | {"SLURM_PROCID": "1", "SLURM_NODEID": "0"}).items():
        monkeypatch.setenv(name, value)

    def from_flags(flags: str = "--stages 2", **variables: str) -> ClusterConfig | None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return hosts.from_flags(cli.parser().parse_args(["serve", "--hosts", "auto", *flags.split()]))

    return from_flags


def test_the_flags_of_a_task(under_slurm) -> None:
    cluster = under_slurm("--tensor 2 --stages 2")
    assert (cluster.hosts, cluster.host, cluster.coordinator) == (2, 1, f"127.0.0.1:{61440 + 217}")
    assert cluster.local_devices == (2, 3)
    assert under_slurm("--stages 2 --coordinator localhost:9000").coordinator == "localhost:9000"
    assert under_slurm(SLURM_STEP_NUM_TASKS="1") is None
    with pytest.raises(UserError, match="Open MPI does not tell where host 0 is; give --coordinator"):
        under_slurm(**OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""})
