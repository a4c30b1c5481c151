"""`jaxserve serve --hosts auto`, started by the programs of clusters: it serves, and ends when they say so."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.jaxserve.multihost.processes import ROOT, WAIT_SECONDS
from tests.server import served_group, slurm

SERVE = [sys.executable, "-m", "server.commands.cli", "serve", "--hosts", "auto"]
FLAGS = [
    "--stages",
    "2",
    "--buckets",
    "4,16",
    "--max-rows",
    "2",
    "--slots",
    "400",
    "--no-scoring",
    "--port",
    "0",
    "--http-port",
    "off",
]


@contextlib.contextmanager
def served(launcher: list[str], folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Two hosts that a program starts: where they serve, and what they have written. They end with 0."""
    log = folder / "hosts.log"
    environment = os.environ | environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with log.open("w") as err:
        process = subprocess.Popen([*launcher, *SERVE, *FLAGS], cwd=folder, env=environment, stderr=err, stdout=err)
    try:
        ready = served_group.until(
            lambda: process.poll() is not None or re.search(r"ready on (127\.0\.0\.1:\d+)", log.read_text()),
            served_group.START_SECONDS,
        )
        assert ready is not True, log.read_text()
        yield ready[1], log.read_text
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()
    finally:
        process.terminate()  # a launcher that is killed leaves its hosts behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_SECONDS)
        process.kill()
        process.wait(WAIT_SECONDS)


def answer(address: str) -> list[int]:
    with grpc.insecure_channel(address) as channel:
        request = GenerateRequest(prompt="It was", max_tokens=5, ignore_eos=True, temperature=0)
        return list(InferenceStub(channel).Generate(request, timeout=WAIT_SECONDS).token_ids)


@pytest.mark.processes
def test_tasks_of_slurm_are_hosts(tmp_path) -> None:
    with slurm.cluster(tmp_path) as environment:
        launcher = ["srun", "--ntasks=2", "--overcommit", "--kill-on-bad-exit"]
        with served(launcher, tmp_path, environment) as (address, log):
            assert len(answer(address)) == 5
            for host in range(2):
                assert f"host {host} of 2, with host 0 at 127.0.0.1:61471, from the variables of Slurm" in log()
            subprocess.run(["scancel", "--signal=TERM", "1"], env=os.environ | environment, check=True)


@pytest.mark.processes
def test_ranks_of_open_mpi_are_hosts(tmp_path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("Open MPI is not installed: no mpirun.openmpi (apt-get install openmpi-bin)")
    launcher = ["mpirun.openmpi", "--oversubscribe", "-n", "2", *["--allow-run-as-root"] * (os.getuid() == 0)]
    with served(launcher, tmp_path, {}) as (address, log):
        assert len(answer(address)) == 5
        places = re.findall(
            r"host (\d) of 2, with host 0 at (127\.0\.0\.1:6\d+), from the variables of Open MPI", log()
        )
        assert sorted(host for host, _ in places) == ["0", "1"]
        assert len({where for _, where in places}) == 1
        os.kill(front_of_rank_0(tmp_path), signal.SIGTERM)


def front_of_rank_0(folder: Path) -> int:
    """The process that was started as host 0 in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_here = (process / "cwd").resolve() == folder and b"server.commands.cli" in (
                process / "cmdline"
            ).read_bytes()
            if is_here and b"OMPI_COMM_WORLD_RANK=0\0" in (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError("host 0 is not there")
