"""What flags of `jaxserve serve` do, seen from outside. `tests.server.mutate_flags` tests these tests."""

import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import zmq

from benchmarks.free_ports import free_ports
from server.proto.jaxserve.v1.inference_pb2 import GenerateRequest, GetLoadRequest
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.commands.serve_process import HOST, collector, run_cli, running
from tests.server.test_kv_events_zmq import TOPIC, Subscriber

STALL_SECONDS, DRAIN_SECONDS = 0.6, 0.5
KEY = {"authorization": "Bearer our-own-key"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and more than one loopback address")


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


@pytest.mark.processes
@linux
def test_every_serve_flag_takes_effect(checkpoint: Path, certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[us]\nkeys = ["our-own-key"]\noperator = true\n')
    (tmp_path / "serve.toml").write_text("max-rows = 3")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}{{ bos_token }}{% if tools %}?{% endif %}")
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "tokenizer_config.json").write_text('{"bos_token": "!"}')
    log, profile, cache = tmp_path / "requests.jsonl", tmp_path / "profile", tmp_path / "cache"
    port, http_port, metrics_port, events_port, replay_port = free_ports(5)
    flags = (
        f"--model {model} --config {tmp_path}/serve.toml --host {HOST} --port {port} --http-port {http_port} "
        f"--tls-cert {certificates}/server.pem --tls-key {certificates}/server.key "
        f"--tls-client-ca {certificates}/ca.pem --api-keys {tmp_path}/keys.toml --stall-seconds {STALL_SECONDS} "
        f"--drain-seconds {DRAIN_SECONDS} --supervise --request-log {log} --log-prompts --metrics-port {metrics_port} "
        f"--profile {profile} --buckets 16 --slots 32768 --max-context 16384 --compilation-cache {cache} --no-scoring "
        f"--served-model-name first second --max-queued-requests 77 --chat-template {tmp_path}/chat.jinja "
        "--allowed-origins https://a.example --tool-parser pythonic "
        f"--kv-events tcp://*:{events_port} --kv-events-replay tcp://*:{replay_port} --kv-events-topic {TOPIC.decode()}"
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

        # Events of the prefix cache
        reader = Subscriber(zmq, f"tcp://{HOST}:{events_port}", f"tcp://{HOST}:{replay_port}")
        stack.callback(reader.close)
        assert client.post("/v1/completions", headers=KEY, json=body | {"prompt": "abc" * 200}).status_code == 200
        server.until(reader.replay)

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
