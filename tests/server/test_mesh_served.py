"""`jaxserve serve` on a mesh of several axes, over virtual devices of a CPU."""

import re
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.server.commands.serve_process import running

SMALL = "--buckets 8 --max-rows 2 --slots 512 --max-context 64 --no-scoring --port 0 --http-port 0"
RULES = 'axes = {vocab = ["x", "y"], ffn = ["y", "x"], heads = "x"}\npad.vocab = true\n'
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.mark.processes
def test_a_mesh_of_several_axes_answers_as_one_device(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    asked = {"prompt": "It was a", "max_tokens": 16, "temperature": 0, "logprobs": 1}
    answers = []
    for layout in ([], ["--mesh", "x=2,y=2", "--sharding", str(tmp_path / "rules.toml")]):
        with running("server.commands.cli serve", *SMALL.split(), *layout, variables=DEVICES) as server:
            url = server.until(lambda: re.search(r"http://\S+(?=/v1)", server.log))[0]
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            answers.append(answer.json()["choices"][0])
            assert (", 4 for each layer" in server.log) == bool(layout)
            assert server.stop() == 0
    one, mesh = answers
    assert one["text"] == mesh["text"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(mesh["logprobs"]["token_logprobs"], abs=1e-4)
