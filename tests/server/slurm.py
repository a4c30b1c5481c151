"""A Slurm of its own on this machine: munged, slurmctld and slurmd as the tests' user, with one node."""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.free_ports import free_ports
from tests.jaxserve.multihost.processes import WAIT_SECONDS
from tests.server.served_group import until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "sinfo")  # Debian: slurm-wlm and munge
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
NodeName={node} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Runs it, its files in a folder. Yields the environment in which srun and scancel reach it."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)} (apt-get install slurm-wlm munge)")
    configuration, node = folder / "slurm.conf", socket.gethostname().partition(".")[0]
    environment = {"PATH": path, "SLURM_CONF": str(configuration)}
    controller, daemon = free_ports(2)
    configuration.write_text(
        _CONFIGURATION.format(node=node, controller=controller, daemon=daemon, folder=folder, user=getpass.getuser())
    )
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    munge = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    options = zip(("socket", "pid-file", "log-file", "seed-file"), munge.values(), strict=True)
    daemons = [
        ["munged", "--force", "--foreground", f"--key-file={key}", *(f"--{name}={path}" for name, path in options)],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", node],
    ]
    with contextlib.ExitStack() as stack:
        for command in daemons:
            process = subprocess.Popen(
                command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait, WAIT_SECONDS)
            stack.callback(process.terminate)
            if command[0] == "munged":
                until(munge["socket"].exists)

        def is_idle() -> bool:
            command = ["sinfo", "--noheader", "--format=%t"]
            told = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
            return told.stdout.strip() == "idle"

        until(is_idle)
        yield environment
