"""`jaxserve serve` on two hosts, as operators meet it; what becomes of callers when one fails is in
test_host_failures.py."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import grpc
import jax.numpy as jnp
import pytest

from benchmarks.free_ports import free_ports
from jaxserve import models, weights
from jaxserve.config import EngineConfig
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.worker import MasterConnection
from server.commands import cli
from server.commands import hosts as hosts_module
from server.commands.console import UserError
from server.engine_process.supervisor import Supervisor
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, Grammar, StartProfileRequest, StopProfileRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.fixtures.texts import printable_tokenizer
from tests.jaxserve.multihost.processes import ROOT, WAIT_SECONDS, free_address
from tests.server import served_group

FLAGS = (
    "--hosts 2 --stages 2 --buckets 4 --max-rows 2 --slots 400 --max-context 200 --block-size 16 --no-scoring --port 0 "
    "--http-port off --step-deadline 20 --compilation-cache off"
)


@pytest.fixture
def model(tmp_path) -> Path:
    entries = {"model_type": "bloom", "vocab_size": 97, "hidden_size": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 2}
    config = models.parse_config(entries)
    weights.write_hf(tmp_path / "model", config, models.build(config).init(0, jnp.float32))
    (tmp_path / "model" / "tokenizer.json").write_text(printable_tokenizer().to_json())
    return tmp_path / "model"


@pytest.fixture
def hosts(model, tmp_path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two of them."""
    started: list[subprocess.Popen[str]] = []
    flags = [*FLAGS.split(), "--model", str(model), "--coordinator", free_address(), "--flight-folder", str(tmp_path)]
    for host in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "server.commands.cli", "serve", "--host-id", str(host), *flags],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
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


@pytest.mark.processes
@pytest.mark.smoke
def test_hosts_end_when_host_0_is_asked_to(hosts, tmp_path) -> None:
    port_of(hosts[0])
    hosts[1].send_signal(signal.SIGTERM)  # which is not what ends them
    hosts[0].send_signal(signal.SIGUSR2)
    assert hosts[0].stderr is not None
    assert any(".flight; `jaxserve replay`" in line for line in hosts[0].stderr)
    hosts[0].send_signal(signal.SIGTERM)
    assert [host.wait(WAIT_SECONDS) for host in hosts] == [0, 0]
    assert len(list(tmp_path.glob("*.flight"))) == 1


@pytest.mark.processes
def test_a_text_is_held_to_its_grammar(hosts) -> None:
    """The tokens are chosen on host 1, which has to know the grammar."""
    with grpc.insecure_channel(port_of(hosts[0])) as channel:
        stub = InferenceStub(channel)

        def generate(pattern: str) -> str:
            request = GenerateRequest(prompt="Well,", max_tokens=30, temperature=1.0, grammar=Grammar(regex=pattern))
            return stub.Generate(request, timeout=WAIT_SECONDS).text

        assert re.fullmatch("(yes|no){3}", generate("(yes|no){3}"))
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") as refused:
            generate("(a")
        assert "grammar: cannot be compiled: unclosed group" in str(refused.value)
        assert re.fullmatch("[ab]{5}", generate("[ab]{5}"))


@pytest.mark.processes
def test_replicas_are_served_and_named_when_their_host_is_lost(tmp_path) -> None:
    """One on each host: both take calls of both protocols, and all callers are told which host is lost."""
    http = str(free_ports(1)[0])
    flags = f"--stages 1 --replicas 2 --http-port {http} --compilation-cache {tmp_path / 'programs'}"
    with served_group.group(tmp_path, flags.split()) as it:
        it.until_told(0, "ready on ")
        with grpc.insecure_channel(it.address) as channel:
            stub = InferenceStub(channel)
            long = GenerateRequest(prompt="It was", max_tokens=4900, ignore_eos=True, temperature=0)
            streams = [stub.GenerateStream(long, timeout=3600.0) for _ in range(2)]
            first = [next(stream).token_ids[0] for stream in streams]  # a replica serves one row at a time
            assert first[0] == first[1]
            body = json.dumps({"prompt": "It was", "max_tokens": 3, "temperature": 0}).encode()
            call = urllib.request.Request(f"http://127.0.0.1:{http}/v1/completions", body)
            call.add_header("Content-Type", "application/json")
            for stream in streams:
                stream.cancel()
            with urllib.request.urlopen(call, timeout=WAIT_SECONDS) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            lost = it.engine(1)
            streams = [stub.GenerateStream(long, timeout=3600.0) for _ in range(2)]  # answered in a few seconds
            for stream in streams:
                next(stream)
            os.kill(lost, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(grpc.RpcError, match="UNAVAILABLE") as error:
                    for _ in stream:
                        pass
                assert re.search(
                    r"host 1, replica 1, stage 0, iteration \d+: its control stream ended", str(error.value)
                )
        assert {re.sub(r".*-(replica-\d)$", r"\1", file.stem) for file in tmp_path.glob("*.flight")} >= {"replica-0"}


def listening_at(port: int) -> str:
    """The IPv4 address at which a port is open, in the notation of /proc/net/tcp."""
    tables = [Path(f"/proc/net/tcp{version}").read_text().splitlines()[1:] for version in ("", "6")]
    sockets = [line.split()[1:4] for table in tables for line in table]
    (address,) = {
        own.partition(":")[0][-8:] for own, _, state in sockets if own.endswith(f":{port:04X}") and state == "0A"
    }
    return address


@pytest.mark.processes
def test_strangers_are_counted_and_named(tmp_path) -> None:
    """They change nothing for those who are served; jax's own service has no port to connect to."""
    secret, coordinator, metrics = tmp_path / "secret", free_address(), free_address()
    secret.write_text("a secret of 24 bytes or so\n")
    flags, of_host = ["--hosts-secret", str(secret)], [["--metrics-port", metrics.rpartition(":")[2]], []]

    def counted() -> float:
        with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
            found = re.search(r"^jaxserve_strangers_total(?:{.*})? (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    with served_group.group(tmp_path, flags, coordinator=coordinator, of_host=of_host) as it:
        it.until_told(0, "ready on ")
        assert listening_at(int(coordinator.rpartition(":")[2])) == "0100007F"  # 127.0.0.1 alone
        with grpc.insecure_channel(it.address) as channel:
            stub = InferenceStub(channel)
            place = ClusterConfig(hosts=2, host=1, coordinator=coordinator)
            stranger = MasterConnection(place, [("hosts", "2")], tell=lambda _: None)
            with pytest.raises(ValueError, match="has another secret"):
                stranger.join()
            request = GenerateRequest(prompt="It was", max_tokens=4900, ignore_eos=True)
            stream = stub.GenerateStream(request, timeout=3600.0)  # a call with little time may be refused
            next(stream)
            it.until_told(0, "is no host of this group: dropped, 1 connections so far")
            served_group.until(lambda: counted() == 1)
            program = "import jax, sys; jax.distributed.initialize(sys.argv[1], 2, 1, initialization_timeout=3)"
            assert subprocess.run([sys.executable, "-c", program, coordinator], capture_output=True).returncode
            stream.cancel()
            request = GenerateRequest(prompt="It was", max_tokens=3, ignore_eos=True)
            again = stub.Generate(request, timeout=3600.0)  # the cancelled call may still be ahead of it
            assert len(again.token_ids) == 3
        it.fronts[0].send_signal(signal.SIGTERM)
        assert it.codes() == [0, 0]


@pytest.mark.processes
def test_every_host_is_profiled(tmp_path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    with served_group.group(tmp_path, of_host=[("--profile", str(folder)) for folder in folders]) as it:
        it.until_told(0, "ready on ")
        with grpc.insecure_channel(it.address) as channel:
            stub = InferenceStub(channel)
            for _ in range(2):
                stub.StartProfile(StartProfileRequest())
                stub.Generate(GenerateRequest(prompt="It was", max_tokens=3))
                stub.StopProfile(StopProfileRequest())
                for folder in folders:
                    served_group.until(lambda: written(folder)).unlink()  # noqa: B023
            stub.StartProfile(StartProfileRequest())
        it.fronts[0].send_signal(signal.SIGTERM)
        assert it.codes() == [0, 0]
    assert all(written(folder) for folder in folders)


def written(folder: Path) -> Path | None:
    """The capture in a folder."""
    return next(folder.rglob("*.xplane.pb"), None)


@pytest.mark.parametrize("behind", [False, True])
def test_a_worker_that_is_asked_twice_ends_at_once(behind, monkeypatch, capfd) -> None:
    """Its host 0 may never come."""

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert "waiting for host 0 to end the hosts (again to end at once)" in capfd.readouterr().err
        signal.raise_signal(signal.SIGTERM)

    async def interrupted_behind(supervisor: Supervisor) -> None:
        signal.raise_signal(signal.SIGTERM)
        await supervisor._closed.wait()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(hosts_module.os, "_exit", end)
    monkeypatch.setattr("jaxserve.multihost.startup.follow", interrupted)
    monkeypatch.setattr(Supervisor, "run", interrupted_behind)
    config = EngineConfig(tensor=2)
    cluster = ClusterConfig(hosts=2, host=1, coordinator="127.0.0.1:9000")

    def work() -> None:
        if behind:
            asyncio.run(hosts_module.follow_in_own_process(Path(), config, cluster, None))
        else:
            hosts_module.follow(Path(), config, cluster)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            work()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 128 + signal.SIGTERM


def test_the_secret_is_in_a_file_or_in_the_environment(tmp_path, monkeypatch, capsys) -> None:
    file, place = tmp_path / "secret", "--hosts 2 --host-id 1 --coordinator a:9000 --tensor 2"
    file.write_text("a secret in the file\n")

    def secret(flags: str) -> bytes | None:
        cluster = hosts_module.from_flags(cli.parser().parse_args(["serve", *flags.split()]))
        return None if cluster is None else cluster.shared_secret

    monkeypatch.setenv("JAXSERVE_HOSTS_SECRET_VALUE", "a secret in a variable\n")
    assert secret(place) == b"a secret in a variable"
    assert secret(f"{place} --hosts-secret {file}") == b"a secret in the file"
    with pytest.raises(UserError, match="JAXSERVE_HOSTS_SECRET_VALUE needs --hosts"):
        secret("")
    assert cli.main(["serve", *place.split(), "--print-config"]) == 0
    assert "a secret in a variable" not in capsys.readouterr().out
    monkeypatch.setenv("JAXSERVE_HOSTS_SECRET_VALUE", "short")
    with pytest.raises(UserError, match="it needs 16"):
        secret(place)
    monkeypatch.delenv("JAXSERVE_HOSTS_SECRET_VALUE")
    monkeypatch.setenv("JAXSERVE_HOSTS_SECRET", str(file))
    assert secret(place) == b"a secret in the file"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hosts 2", "--hosts 2 needs --host-id and --coordinator"),
        ("--hosts 0", "'0' is neither auto nor a number of hosts"),
        ("--hosts two", "'two' is neither auto nor a number of hosts"),
        ("--host-id 1", "--host-id needs --hosts"),
        ("--links bridge", "--links needs --hosts"),
        ("--flight-seconds 5", "--flight-seconds needs --hosts"),
        ("--join-timeout 5", "--join-timeout needs --hosts"),
        ("--speculate-tokens 3", "speculate_tokens is 3, which does nothing without speculate"),
        ("--hosts 2 --host-id 2 --coordinator a:9000", "host-id is 2; with 2 hosts it must be from 0 to 1"),
        ("--hosts 2 --host-id 1 --coordinator a", "coordinator is 'a'; it must be HOST:PORT of host 0"),
        ("--hosts 2 --host-id 1 --coordinator a:9000", "is 1 devices, which 2 hosts cannot share evenly"),
        ("--hosts 2 --host-id 1 --coordinator a:9000 --hosts-key k", "--hosts-cert, --hosts-key and --hosts-ca go"),
        ("--hosts 2 --host-id 1 --coordinator a:9000 --tensor 2", "give every host the same --hosts-secret"),
        ("--hosts 2 --host-id 1 --coordinator a:9000 --hosts-secret none", "--hosts-secret none: No such file"),
        ("--hosts-secret pyproject.toml", "--hosts-secret needs --hosts"),
        ("--hosts auto", "give --hosts, --host-id and --coordinator"),
        ("--hosts auto --host-id 1", "--host-id and --hosts auto: auto takes the number of each host from its cluster"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(flags, told, capfd) -> None:
    command = ["serve", "--port", "0", *flags.split()]
    if flags in ("--hosts 0", "--hosts two"):  # which the parser itself refuses
        with pytest.raises(SystemExit):
            cli.main(command)
    else:
        assert cli.main(command) == 2
    assert told in capfd.readouterr().err
