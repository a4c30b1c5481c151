"""A router that others wrote, in front of two servers: smg, in an environment of its own."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from benchmarks.free_ports import free_ports
from tests.clients.run import environment
from tests.server.commands.serve_process import HOST, running

SMG = "smg==1.13.0"
FLAGS = (
    "--kv-events grpc --max-context 512 --slots 4096 --block-size 16 --buckets 16,256 --served-model-name tiny "
    f"--host {HOST} --model"
)
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(sys.platform != "linux", reason="needs more than one loopback address"),
]


class Router:
    """smg, which reads the prefix caches of its workers from their KV events."""

    def __init__(self, python: Path, workers: list[str]) -> None:
        port, metrics_port = free_ports(2)
        self.url, self.log = f"http://{HOST}:{port}", ""
        flags = (
            f"launch --host {HOST} --port {port} --prometheus-host {HOST} --prometheus-port {metrics_port} "
            f"--policy cache_aware --log-level debug --worker-urls {' '.join(f'grpc://{each}' for each in workers)}"
        )
        self.process = subprocess.Popen(
            [python.with_name("smg"), *flags.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += re.sub(r"\x1b\[[0-9;]*m", "", line)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launch() -> Iterator[Callable[[list[str]], Router]]:
    """Starts a router in front of workers' gRPC addresses."""
    python, routers = environment("smg", [SMG]), []

    def start(workers: list[str]) -> Router:
        routers.append(Router(python, workers))
        return routers[-1]

    yield start
    for router in routers:
        router.stop()


def ask(url: str, prompt: str) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_smg_follows_the_prefix_caches_of_two_servers(checkpoint: Path, launch: Callable[..., Router]) -> None:
    """It is started before they are ready, and finds prompts that it never saw where they are cached."""
    ports, http_ports = free_ports(2), free_ports(2)
    flags = [
        [*FLAGS.split(), str(checkpoint), "--port", str(port), "--http-port", str(http_port)]
        for port, http_port in zip(ports, http_ports, strict=True)
    ]
    with running("server.commands.cli serve", *flags[0]) as one, running("server.commands.cli serve", *flags[1]) as two:
        router = launch([f"{HOST}:{port}" for port in ports])
        for server in (one, two):
            server.until_told("ready on")
        one.until(lambda: len(re.findall("KV event stream connected", router.log)) == 2)
        one.until(lambda: "Successfully registered tokenizer" in router.log)
        assert [each["id"] for each in httpx.get(f"{router.url}/v1/models").json()["data"]] == ["tiny"]
        chance = random.Random(0)
        prompts = ["".join(chance.choices("abcdefgh", k=100)) for _ in range(12)]
        answers = [ask(f"http://{HOST}:{chance.choice(http_ports)}", prompt) for prompt in prompts]
        # The router hears of a prompt's blocks some time after its answer: of the first six, while six more are served.
        for prompt, direct in zip(prompts[:6], answers, strict=False):
            answer = ask(router.url, prompt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
            assert answer["choices"][0]["text"] == direct["choices"][0]["text"]
