"""The server's admission before a simulated engine."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main

MODEL = ["--model", "bloom-560m", "--topology", "a100-40g:1", "--max-rows", "4", "--buckets", "4,16,64"]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_a_bound_on_the_wait_refuses_more_and_makes_fewer_wait(tmp_path, capsys):
    path, told = tmp_path / "azure.csv", {}
    lines = [f"2023-11-16 18:15:{number / 10:09.6f},60,40" for number in range(300)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    for name, more in (("bound", ["--max-queue-seconds", "500ms"]), ("none", [])):
        assert main(["overload", "--trace", str(path), *MODEL, "--speed", "10", *more]) == 0
        told[name] = json.loads(capsys.readouterr().out)
        assert told[name]["requests"] == 300
    assert told["none"]["refused"] == 0
    assert 0 < told["bound"]["refused"] < 300
    assert told["bound"]["ttft_ms"]["p95"] < told["none"]["ttft_ms"]["p95"] / 2
