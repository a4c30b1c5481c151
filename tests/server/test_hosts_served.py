"""`jaxserve serve` on two hosts, as callers and operators meet it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import jax.numpy as jnp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve import models, weights
from jaxserve.cluster.failure import ExitCode
from server import cli
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.jaxserve.cluster.processes import ROOT, WAIT_SECONDS, free_ports

DEADLINE = 20.0
FLAGS = (
    "--hosts 2 --stages 2 --buckets 4 --max-rows 2 --slots 40000 --max-context 20000 --block-size 16 --no-scoring "
    f"--port 0 --http-port off --step-deadline {DEADLINE} --compilation-cache off"
)


@pytest.fixture
def model(tmp_path) -> Path:
    entries = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 2}
    config = models.parse_config(entries)
    weights.write_hf(tmp_path / "model", config, models.build(config).init(0, jnp.float32))
    return tmp_path / "model"


@pytest.fixture
def hosts(model, tmp_path, request) -> Iterator[list[subprocess.Popen[str]]]:
    """Two of them; a parameter has more flags."""
    coordinator, started = free_ports(), []
    flags = [
        *FLAGS.split(),
        *getattr(request, "param", "").split(),
        "--model",
        str(model),
        "--coordinator",
        coordinator,
        "--flight-folder",
        str(tmp_path),
    ]
    for host in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", "--host-id", str(host), *flags],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        )
        started.append(process)
    yield started
    for process in started:
        process.kill()
        process.wait(WAIT_SECONDS)
        assert process.stderr is not None
        process.stderr.close()


def port_of(process: subprocess.Popen[str]) -> str:
    """Where host 0 listens, once it does."""
    told = ""
    assert process.stderr is not None
    for line in process.stderr:
        told += line
        if ready := re.search(r"ready on (127\.0\.0\.1:\d+)", line):
            return ready[1]
    raise AssertionError(told)


def test_a_caller_of_hosts_of_which_one_dies_is_told_which(hosts, tmp_path) -> None:
    with grpc.insecure_channel(port_of(hosts[0])) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        request = GenerateRequest(prompt_token_ids={"ids": [5, 6, 7]}, max_tokens=19_000, ignore_eos=True)
        stream = InferenceStub(channel).GenerateStream(request, timeout=WAIT_SECONDS)
        next(stream)
        hosts[1].kill()
        since = time.monotonic()
        with pytest.raises(grpc.RpcError) as told:
            for _ in stream:
                pass
        assert time.monotonic() - since < DEADLINE + 5
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        assert re.search(r"host 1, stage 1, iteration \d+: its control stream ended", told.value.details())
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert hosts[0].wait(WAIT_SECONDS) == ExitCode.LOST
    assert len(list(tmp_path.glob("*.flight"))) == 1


def engine_process_of(process: subprocess.Popen[str]) -> int:
    """The process that a supervisor has started."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if int(path.read_text().rpartition(")")[2].split()[1]) == process.pid
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("hosts", ["--supervise"], indirect=True)
def test_a_supervised_group_comes_back(hosts) -> None:
    with grpc.insecure_channel(port_of(hosts[0])) as channel:
        generate = InferenceStub(channel).Generate
        request = GenerateRequest(prompt_token_ids={"ids": [5, 6, 7]}, max_tokens=8, ignore_eos=True, temperature=0)
        before = generate(request, timeout=WAIT_SECONDS).token_ids
        dead, told, after = engine_process_of(hosts[1]), [], None
        os.kill(dead, signal.SIGKILL)
        while after is None:  # what had begun is told, what comes while nobody serves waits
            try:
                after = generate(request, timeout=WAIT_SECONDS).token_ids
            except grpc.RpcError as error:
                told.append(error)
        assert all(error.code() is grpc.StatusCode.UNAVAILABLE and "host 1" in error.details() for error in told)
        assert after == before
        assert engine_process_of(hosts[1]) != dead
    hosts[0].send_signal(signal.SIGTERM)
    assert [host.wait(WAIT_SECONDS) for host in hosts] == [0, 0]


def test_hosts_end_when_host_0_is_asked_to(hosts, tmp_path) -> None:
    port_of(hosts[0])
    hosts[1].send_signal(signal.SIGTERM)  # which is not what ends them
    hosts[0].send_signal(signal.SIGUSR2)
    assert hosts[0].stderr is not None
    assert any(".flight; `jaxserve replay`" in line for line in hosts[0].stderr)
    hosts[0].send_signal(signal.SIGTERM)
    assert [host.wait(WAIT_SECONDS) for host in hosts] == [0, 0]
    assert len(list(tmp_path.glob("*.flight"))) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hosts 2", "--hosts 2 needs --host-id and --coordinator"),
        ("--hosts 0", "0 is no number of hosts"),
        ("--host-id 1", "--host-id needs --hosts"),
        ("--hosts 2 --host-id 2 --coordinator a:9000", "host-id is 2; with 2 hosts it must be from 0 to 1"),
        ("--hosts 2 --host-id 1 --coordinator a", "coordinator is 'a'; it must be HOST:PORT of host 0"),
        ("--hosts 2 --host-id 1 --coordinator a:9000", "is 1 devices, which 2 hosts cannot share evenly"),
        ("--hosts 2 --host-id 1 --coordinator a:9000 --hosts-key k", "--hosts-cert, --hosts-key and --hosts-ca go"),
        ("--hosts auto", "give --hosts, --host-id and --coordinator"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(flags, told, capfd) -> None:
    command = ["serve", "--port", "0", *flags.split()]
    if flags == "--hosts 0":  # which the parser itself refuses
        with pytest.raises(SystemExit):
            cli.main(command)
    else:
        assert cli.main(command) == 2
    assert told in capfd.readouterr().err
