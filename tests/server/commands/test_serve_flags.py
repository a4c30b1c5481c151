"""Every flag of `jaxserve serve` arrives where it takes effect. `tests.server.mutate_flags` tests these tests."""

import asyncio
import contextlib
import gc
import http.server
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from jaxserve.config import ENGINE_PARAMS, EngineConfig
from jaxserve.multihost.config import ClusterConfig
from jaxserve.profiler import Profiler
from server import lifecycle
from server.commands import cli, hosts, serve
from server.engine_process.supervisor import RestartPolicy
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.serve_settings import ServeSettings
from tests.server.fake_engine import WAIT_SECONDS, FakeEngine

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.2"  # not the default
STALL_SECONDS, DRAIN_SECONDS = 0.6, 0.5
KEY = {"authorization": "Bearer our-own-key"}
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
    "--hosts 2 --host-id {host} --coordinator 10.0.0.1:9000 --control-port 9100 --join-timeout 20 --step-deadline 7 "
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
        control_port=9100,
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
    assert (model, config.tensor, cluster.control_port) == (tmp_path, 2, 9100)
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


def test_a_ready_server_leaves_its_start_out_of_garbage_collections(tmp_path: Path) -> None:
    async def scenario() -> None:
        chosen = settings_of(f"--model {tmp_path} --port 0")
        lifecycle.ServerLifecycle(chosen, lambda *_, **__: None, FakeEngine(tokenizer=None)).greet()

    assert gc.get_freeze_count() == 0
    try:
        asyncio.run(scenario())
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def run_cli(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.commands.cli", "serve", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_print_config(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("max-rows = 3")
    done = run_cli("--print-config", "--config", str(tmp_path / "serve.toml"), "--port", "1234")
    assert done.returncode == 0
    assert "max-rows = 3" in done.stdout
    assert "port = 1234  # flag\n" in done.stdout


class Server:
    """`jaxserve serve` in a process of its own.

    Args:
      program: module to run, with its own arguments.
      variables: added to the environment.
    """

    def __init__(self, program: str, *flags: str, variables: dict[str, str] | None = None) -> None:
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program.split(), *flags],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | (variables or {}),
        )
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._lines.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def until(self, condition: Callable[[], Any]) -> Any:
        """What a condition returns once it is true. Fails if the process ends before that, or after a minute."""
        end = time.monotonic() + 60
        while not (found := condition()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.05)
        return found

    def until_told(self, text: str) -> None:
        self.until(lambda: text in self.log)

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def stop(self) -> int:
        """Sends SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(WAIT_SECONDS)
        return code


@contextlib.contextmanager
def running(program: str, *flags: str, **settings: Any) -> Iterator[Server]:
    it = Server(program, *flags, **settings)
    try:
        yield it
    finally:
        for child in it.children() if it.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        it.process.kill()
        it.process.communicate()


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [str(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server in the place of an OpenTelemetry collector: its URL, and the paths that were posted to."""
    paths: list[str] = []

    class Collect(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collect) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", paths
        finally:
            served.shutdown()
            thread.join()


def test_front_thread_starts_no_process() -> None:
    with running("tests.server.serve_fake", "--port", "0", "--http-port", "off", "--log-level", "debug") as server:
        server.until_told("ready on")
        assert "DEBUG asyncio: Using selector" in server.log
        assert "HTTP" not in server.log
        assert server.children() == []
        assert server.stop() == 0


def test_front_thread_has_the_template_of_a_flag(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    flags = ("--chat-template", str(tmp_path / "chat.jinja"), "--port", "0", "--http-port", "0")
    with running("tests.server.serve_fake", *flags) as server:
        url = server.until(lambda: re.search(r"http://\S+(?=/v1)", server.log))[0]
        body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 6}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "ab!ab!"


@pytest.mark.parametrize("text", [None, "{% if %}", "\xff"])
def test_a_wrong_template_is_told_at_start(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "chat.jinja").write_bytes(text.encode("latin-1"))
    done = run_cli("--chat-template", str(tmp_path / "chat.jinja"), "--port", "0", "--http-port", "off")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "template" in done.stderr or "chat.jinja" in done.stderr


def test_traces_need_opentelemetry(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not installed')")
    flags = ("--traces", "--port", "0", "--http-port", "off")
    with running("server.commands.cli serve", *flags, variables={"PYTHONPATH": str(tmp_path)}) as server:
        assert server.process.wait(60) == 2
        server._reader.join()
        assert "--traces needs OpenTelemetry" in server.log


@linux
def test_every_serve_flag_takes_effect(checkpoint: Path, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[us]\nkeys = ["our-own-key"]\noperator = true\n')
    (tmp_path / "serve.toml").write_text("max-rows = 3")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!{% if tools %}?{% endif %}")
    log, profile, cache = tmp_path / "requests.jsonl", tmp_path / "profile", tmp_path / "cache"
    port, http_port, metrics_port = free_ports(3)
    flags = (
        f"--model {checkpoint} --config {tmp_path}/serve.toml --host {HOST} --port {port} --http-port {http_port} "
        f"--tls-cert {certificates}/server.pem --tls-key {certificates}/server.key "
        f"--tls-client-ca {certificates}/ca.pem --api-keys {tmp_path}/keys.toml --stall-seconds {STALL_SECONDS} "
        f"--drain-seconds {DRAIN_SECONDS} --supervise --request-log {log} --log-prompts --metrics-port {metrics_port} "
        f"--profile {profile} --buckets 16 --slots 32768 --max-context 16384 --compilation-cache {cache} --no-scoring "
        f"--served-model-name first second --max-queued-requests 77 --chat-template {tmp_path}/chat.jinja "
        "--allowed-origins https://a.example --tool-parser pythonic"
    )
    traced = _has_opentelemetry()
    with contextlib.ExitStack() as stack:
        variables, posted = {}, []
        if traced:
            url, posted = stack.enter_context(collector())
            variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
            flags += " --traces"
        server = stack.enter_context(running("server.commands.cli serve", *flags.split(), variables=variables))
        server.until_told("ready on")
        assert f"ready on {HOST}:{port} " in server.log
        (engine_pid,) = server.children()
        client = stack.enter_context(_client(certificates, http_port, "client"))

        # TLS, client certificates, API keys
        with _client(certificates, http_port, None) as stranger, pytest.raises(httpx.HTTPError):
            stranger.get("/v1/models", headers=KEY)
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers=KEY).json()
        assert [model["id"] for model in models["data"]] == ["first", "second"]
        named = {"prompt": "abc", "max_tokens": 1, "model": "second"}
        assert client.post("/v1/completions", headers=KEY, json=named).json()["model"] == "first"
        assert models["data"][0]["max_model_len"] == 16384
        assert client.get("/live", headers=KEY).json()["about"]["max_rows"] == 3
        assert _call_grpc(certificates, port) == (3, 77)

        # Web pages of an allowed origin, and the chat template
        asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            asked = client.options("/v1/completions", headers=asks | {"origin": origin})
            assert asked.status_code == status
            told = client.get("/v1/models", headers=KEY | {"origin": origin}).headers
            assert told.get("access-control-allow-origin") == ("https://a.example" if status == 200 else None)
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
        answer = client.post("/v1/chat/completions", headers=KEY, json=chat).json()
        assert answer["usage"]["prompt_tokens"] == 4
        assert "form of tool calls: pythonic" in server.log
        server.until(lambda: log.read_text().count("\n") == 3)

        # The request log, metrics, compiled programs
        body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", headers=KEY, json=body).status_code == 200
        server.until(lambda: log.read_text().count("\n") == 4)  # lines for the calls above and for this one
        logged = json.loads(log.read_text().splitlines()[-1])
        assert (logged["prompt"], logged["tenant"], logged["completion_tokens"]) == ("abc", "us", 4)
        assert "jaxserve_" in httpx.get(f"http://{HOST}:{metrics_port}/metrics").text
        assert list(cache.rglob("*"))

        # An engine process that hangs is reported after `--stall-seconds`, and restarted with `--supervise`.
        with client.stream("POST", "/v1/completions", headers=KEY, json=_endless()) as stream:
            next(lines := stream.iter_lines())
            os.kill(engine_pid, signal.SIGSTOP)
            stalled = server.until(lambda: re.search(r"no iteration for (\S+) s", server.log))
            assert STALL_SECONDS < float(stalled[1]) < 2.0  # the least without the flag
            server.until_told("the engine is ready again")
            lines.close()
        assert client.post("/v1/completions", headers=KEY, json=body).status_code == 200
        assert server.children() != [engine_pid]

        # Draining, the profile, the traces
        assert client.post("/start_profile", headers=KEY).status_code == 200
        with client.stream("POST", "/v1/completions", headers=KEY, json=_endless()) as stream:
            next(lines := stream.iter_lines())
            assert server.stop() == 0
            lines.close()
        assert f"draining 1 requests, at most {DRAIN_SECONDS:g} s" in server.log
        assert "stopped; 1 requests were cut short" in server.log
        assert list(profile.rglob("*.xplane.pb"))
        if traced:
            assert "/v1/traces" in posted


def _has_opentelemetry() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        assert not os.environ.get("CI")  # where it is installed
        return False
    return True


def _client(certificates: Path, http_port: str, name: str | None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if name is not None:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return httpx.Client(base_url=f"https://{HOST}:{http_port}", verify=context, timeout=60)


def _call_grpc(certificates: Path, port: str) -> tuple[int, int]:
    """Calls with the key and the client's certificate: (tokens generated, most requests that may wait)."""
    names = ("ca.pem", "client.key", "client.pem")
    credentials = grpc.ssl_channel_credentials(*((certificates / name).read_bytes() for name in names))
    with grpc.secure_channel(f"{HOST}:{port}", credentials) as channel:
        stub: Any = InferenceStub(channel)
        request = GenerateRequest(prompt="ab", max_tokens=3, ignore_eos=True)
        metadata = tuple(KEY.items())
        tokens = stub.Generate(request, metadata=metadata, timeout=60).token_ids
        return len(tokens), stub.GetLoad(GetLoadRequest(), metadata=metadata, timeout=60).max_queued_requests


def _endless() -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 16000, "ignore_eos": True, "stream": True}
