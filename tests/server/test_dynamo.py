"""Dynamo's selection service, in an environment of its own, follows the KV events of two servers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from benchmarks.free_ports import free_ports
from tests.clients.run import FOLDER, environment
from tests.server.commands.serve_process import HOST, running

DYNAMO = "ai-dynamo-runtime==1.6.1"
BLOCK_SIZE = 16
FLAGS = f"--max-context 512 --slots 4096 --block-size {BLOCK_SIZE} --buckets 16,256 --host {HOST} --model"


@pytest.mark.clients
@pytest.mark.skipif(sys.platform != "linux", reason="needs more than one loopback address")
def test_dynamo_selects_the_server_that_has_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    http_ports, events, replays = free_ports(2), free_ports(2), free_ports(2)
    flags = [
        f"{FLAGS} {checkpoint} --port 0 --http-port {http_ports[i]} --kv-events tcp://*:{events[i]} "
        f"--kv-events-replay tcp://*:{replays[i]}".split()
        for i in range(2)
    ]
    endpoints = [f"tcp://{HOST}:{port}" for i in range(2) for port in (events[i], replays[i])]
    command = [environment("dynamo", [DYNAMO]), FOLDER / "dynamo_selector.py", *endpoints, str(BLOCK_SIZE)]
    with (
        (tmp_path / "dynamo.log").open("w") as log,
        running("server.commands.cli serve", *flags[0]) as one,
        running("server.commands.cli serve", *flags[1]) as two,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as dynamo,
    ):
        assert dynamo.stdin is not None
        assert dynamo.stdout is not None

        def scores(tokens: list[int]) -> Any:
            dynamo.stdin.write(json.dumps(tokens) + "\n")
            dynamo.stdin.flush()
            selected, overlap = json.loads(dynamo.stdout.readline())
            blocks = {worker["worker_id"]: worker["device_blocks"] for worker in overlap["workers"]}
            return {"selected": selected["worker_id"], "blocks": blocks}

        for server in (one, two):
            server.until_told("ready on")
        assert json.loads(dynamo.stdout.readline()) == "subscribed"
        for number, prompt in ((1, "abc" * 40), (0, "xyz" * 40), (1, "uvw" * 40)):
            url = f"http://{HOST}:{http_ports[number]}"
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60)
            assert answer.status_code == 200
            tokens = httpx.post(f"{url}/tokenize", json={"prompt": prompt}, timeout=60).json()["tokens"]
            blocks = {number: len(tokens) // BLOCK_SIZE, 1 - number: 0}
            one.until(lambda tokens=tokens, blocks=blocks: scores(tokens)["blocks"] == blocks)
            assert scores(tokens)["selected"] == number
        dynamo.stdin.close()
    assert "Gap detected" not in (tmp_path / "dynamo.log").read_text()
