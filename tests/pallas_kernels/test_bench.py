"""The kernels' benchmark from its command line to its files, on tiny shapes.

No figure is judged here.
"""

from __future__ import annotations

import json

import pytest

from pallas_kernels import bench
from pallas_kernels.xla import XlaBackend

STEPS = {
    "steps": [{"name": "a step", "ms": 2.0, "nbytes": 10, "flops": 10, "prefill": False, "wanted": True}],
    "choice of tokens": [{"name": "sorting", "ms": 1.0}],
    "transformers": {"version": "transformers 0", "ms": {"a step": 3.0}, "continuous ms": {"a step": 4.0}},
}


@pytest.mark.bench
def test_it_checks_times_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "engine_steps", lambda small: STEPS)
    monkeypatch.setattr(bench, "SAMPLES", 1)
    monkeypatch.setattr(bench, "_MOST_LAYERS", 1)
    assert bench.main(["--small", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "attention by cpu" in told or "attention by xla" in told  # as there is a compiler or none
    assert "a step" in told
    assert "transformers 0" in told
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert [kernel["name"][:7] for kernel in result["kernels"]] == ["decode ", "prefill", "write 4"]
    assert all(kernel["ms"] > 0 for kernel in result["kernels"])
    assert result["steps"][0]["reached"] > 0
    assert (tmp_path / "kernels.png").stat().st_size > 0


class Unscaled(XlaBackend):
    """Forgets the scale."""

    def attend(self, *args, scale, **kw):
        return super().attend(*args, scale=1.0, **kw)


@pytest.mark.bench
def test_what_is_wrong_is_not_timed():
    with pytest.raises(ValueError, match=r"differs from the oracle by .*; nothing was timed"):
        bench.checked(bench.SMALL_CASES[:1], Unscaled())


def test_bytes_and_operations_of_a_case():
    decode = bench.KernelCase(rows=2, context=10, heads=3, head_dim=64)
    assert (decode.nbytes, decode.flops) == (2 * 2 * 10 * 3 * 64 * 2, 4 * 2 * 10 * 3 * 64)
    eight = bench.KernelCase(rows=2, context=10, heads=3, head_dim=64, pool_dtype="int8")
    assert eight.nbytes == 2 * 2 * 10 * 3 * (64 + 4)
    prefill = bench.KernelCase(rows=1, context=4, new=4, heads=1, head_dim=64)
    assert prefill.flops == 4 * 10 * 64
