"""Every flag of `jaxserve serve` arrives where it takes effect. `tests.server.mutate_flags` tests these tests."""

import asyncio
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ENGINE_PARAMS, EngineConfig
from jaxserve.multihost.config import ClusterConfig
from jaxserve.profiler import Profiler
from server import lifecycle
from server.commands import cli, hosts, serve
from server.engine_process.supervisor import RestartPolicy
from server.serve_settings import ServeSettings
from tests.server.commands.serve_process import HOST, run_cli
from tests.server.fake_engine import FakeEngine

# A flag for every engine setting, with a value that is not its default, and others that it needs.
ENGINE_FLAGS: dict[str, tuple[str, Any, str]] = {
    "dtype": ("--dtype bfloat16", "bfloat16", ""),
    "quantize": ("--quantize int8", "int8", ""),
    "kv_cache_dtype": ("--kv-cache-dtype int8", "int8", ""),
    "max_rows": ("--max-rows 3", 3, ""),
    "slots": ("--slots 640", 640, ""),
    "block_size": ("--block-size 16", 16, ""),
    "slot_policy": ("--slot-policy reserve", "reserve", ""),
    "buckets": ("--buckets 8,64", (8, 64), ""),
    "token_budget": ("--token-budget 32", 32, ""),
    "target_tpot": ("--target-tpot 80ms", 0.08, ""),
    "order": ("--order fcfs", "fcfs", ""),
    "target_ttft": ("--target-ttft 3s", 3.0, ""),
    "prefix_cache": ("--prefix-cache off", False, ""),
    "host_cache": ("--host-cache 64GiB", 64 << 30, ""),
    "max_context": ("--max-context 100", 100, ""),
    "max_queued_requests": ("--max-queued-requests 5", 5, ""),
    "max_queued_tokens": ("--max-queued-tokens 600", 600, ""),
    "max_queue_seconds": ("--max-queue-seconds 9s", 9.0, ""),
    "scheduler": ("--scheduler request", "request", ""),
    "deterministic": ("--deterministic", True, ""),
    "speculate": ("--speculate ngram", "ngram", ""),
    "speculate_tokens": ("--speculate-tokens 3", 3, "--speculate ngram"),
    "generation_config": ("--generation-config off", "off", ""),
    "scoring": ("--no-scoring", False, ""),
    "attention": ("--attention xla", "xla", ""),
    "tensor": ("--tensor 4", 4, ""),
    "mesh": ("--mesh data=2,tensor=2", "data=2,tensor=2", ""),
    "stages": ("--stages 2", 2, ""),
    "replicas": ("--replicas 3", 3, ""),
    "in_flight": ("--in-flight 1", 1, ""),
    "layers_per_stage": ("--layers-per-stage 1,3", (1, 3), "--stages 2"),
    "sharding": ("--sharding /dev/null", "/dev/null", ""),
    "compilation_cache": ("--compilation-cache off", None, ""),
}
HOSTS_FLAGS = (
    "--hosts 2 --host-id {host} --coordinator 10.0.0.1:9000 --join-timeout 20 --step-deadline 7 "
    "--links bridge --flight-seconds 9 --flight-folder flights --hosts-cert {certificates}/server.pem "
    "--hosts-key {certificates}/server.key --hosts-ca {certificates}/ca.pem "
    "--hosts-secret {certificates}/ca.pem --tensor 2"
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and more than one loopback address")


def settings_of(flags: str) -> ServeSettings:
    args = cli.parser().parse_args(["serve", *flags.split()])
    return serve.from_flags(args)


@pytest.mark.parametrize("name", ENGINE_PARAMS)
def test_engine_flag(name: str) -> None:
    flag, value, needed = ENGINE_FLAGS[name]
    assert getattr(EngineConfig(), name) != value
    chosen = settings_of(f"{flag} {needed}")
    assert getattr(chosen.engine, name) == value
    assert getattr(lifecycle.engine_job(chosen).config, name) == value or name.startswith("max_queued")


def test_hosts_flags(certificates: Path) -> None:
    chosen = settings_of(HOSTS_FLAGS.format(host=1, certificates=certificates))
    cluster = chosen.cluster
    assert cluster is not None
    secrets = cluster.secrets
    assert secrets is not None
    assert (secrets.certificate, secrets.key, secrets.authority) == tuple(
        (certificates / name).read_bytes() for name in ("server.pem", "server.key", "ca.pem")
    )
    assert cluster == ClusterConfig(
        hosts=2,
        host=1,
        coordinator="10.0.0.1:9000",
        join_timeout=20,
        step_deadline=7,
        links="bridge",
        record_seconds=9,
        record_folder=Path("flights"),
        secrets=secrets,
        shared_secret=(certificates / "ca.pem").read_bytes().strip(),
    )


def test_what_the_engine_process_is_told(certificates: Path, tmp_path: Path) -> None:
    flags = HOSTS_FLAGS.format(host=0, certificates=certificates)
    chosen = settings_of(f"{flags} --model {tmp_path} --profile {tmp_path} --max-rows 3 --log-level error")
    job = lifecycle.engine_job(chosen)
    assert job.log_level == "error"
    assert (job.model, job.profile, job.config.max_rows) == (str(tmp_path), str(tmp_path), 3)
    assert job.cluster is not None
    assert job.cluster == chosen.cluster


@pytest.mark.parametrize("front", ["process", "thread"])
def test_a_worker_follows_host_0(
    front: str, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    async def follow_in_own_process(*given: Any) -> int:
        told.extend(given)
        return 5

    def follow(*given: Any) -> int:
        told.extend(given)
        return 6

    monkeypatch.setattr(hosts, "follow_in_own_process", follow_in_own_process)
    monkeypatch.setattr(hosts, "follow", follow)
    flags = [*HOSTS_FLAGS.format(host=1, certificates=certificates).split(), "--model", str(tmp_path), "--front", front]
    process = front == "process"
    # A worker reads no keys and no certificates of the server.
    flags += ["--api-keys", "/no/such/file", "--profile", str(tmp_path), *(["--supervise"] if process else [])]
    assert cli.main(["serve", *flags]) == (5 if process else 6)
    model, config, cluster = told[:3]
    assert (model, config.tensor, cluster.coordinator) == (tmp_path, 2, "10.0.0.1:9000")
    assert told[3:] == [*([RestartPolicy()] if process else []), tmp_path]


def test_front_thread_runs_the_engine_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def start_engine(*given: Any) -> Any:
        told.extend(given)
        return FakeEngine(tokenizer=None)

    async def serve_in_process(chosen: ServeSettings, _: Any, engine: Any, profiler: Profiler) -> None:
        profiler.start()
        told.append(chosen.drain_seconds)

    monkeypatch.setattr(serve, "start_engine", start_engine)
    monkeypatch.setattr(lifecycle, "serve_in_process", serve_in_process)
    flags = f"--front thread --model {tmp_path} --profile {tmp_path} --max-rows 3 --drain-seconds 5 --port 0"
    assert cli.main(["serve", "--http-port", "off", *flags.split()]) == 0
    model, config, cluster, *others = told
    assert (model, config.max_rows, cluster, others) == (tmp_path, 3, None, [5])
    assert list(tmp_path.rglob("*.xplane.pb"))


@linux
@pytest.mark.parametrize("flag", ["--port", "--http-port", "--metrics-port"])
def test_a_taken_port_is_reported_at_once(
    flag: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def serve_engine_process(*_: Any) -> int:
        return 0

    monkeypatch.setattr(lifecycle, "serve_engine_process", serve_engine_process)
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--http-port": "off", flag: str(port)}
        given = [text for each in ports.items() for text in each]
        assert cli.main(["serve", "--host", HOST, *given]) == 2
    assert f"cannot listen on {HOST}:{port}: Address already in use" in capfd.readouterr().err


def test_garbage_collections_leave_out_a_servers_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        chosen = settings_of(f"--model {tmp_path} --port 0")
        lifecycle.ServerLifecycle(chosen, lambda *_, **__: None, FakeEngine(tokenizer=None)).greet()

    gc.unfreeze()  # what is frozen in all tests
    asyncio.run(scenario())
    assert gc.get_freeze_count() > 10_000


def test_print_config(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("max-rows = 3")
    done = run_cli("--print-config", "--config", str(tmp_path / "serve.toml"), "--port", "1234")
    assert done.returncode == 0
    assert "max-rows = 3" in done.stdout
    assert "port = 1234  # flag\n" in done.stdout
