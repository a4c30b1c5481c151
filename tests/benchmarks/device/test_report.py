"""Tables and plots of recorded figures."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.device import __main__ as command
from benchmarks.device import report
from benchmarks.device.models import CHOICE

AT = {"at": "2026-11-25T12:00:00+00:00"}
RECORDS = [
    {"job": "kernels", "name": "device", "device": "NVIDIA H200", "jax": "0.11.2"},
    {"job": "kernels", "name": "copy", "bytes/s": 4e12},
    {"job": "kernels", "name": "matmul", "flop/s": 8e14},
    {
        "job": "kernels",
        "name": "decode 32 x 2048, 32 heads of 128, bfloat16",
        "backend": "gpu",
        "difference": 0.004,
        "nbytes": 1_000_000_000,
        "flops": 10,
        "ms": 0.5,
    },
    {
        "job": "kernels",
        "name": "decode 32 x 2048, 32 heads of 128, float32 queries, float32",
        "backend": "gpu",
        "difference": 4e-6,
        "nbytes": 2_000_000_000,
        "flops": 10,
        "ms": 1.0,
    },
    {
        "job": "kernels",
        "name": "int4 product, 8 rows",
        "backend": "gpu",
        "difference": 0.001,
        "nbytes": 40_000_000,
        "flops": 10,
        "ms": 0.02,
        "xla_ms": 0.1,
    },
    {"job": "kernels", "name": "prefill 1024, 32 heads", "failed": "nothing for 150 s"},
    {"job": "bloom-7b1", "name": "bloom-7b1 start", "seconds": 61.0},
    {"job": "bloom-7b1", "name": "bloom-7b1 decode 8 rows at 512", "nbytes": 10, "flops": 8 * 10**12, "ms": 20.0},
    {"job": CHOICE, "name": "sorting", "ms": 1.0},
    {"job": "transformers", "name": "t: a", "peer": "t", "ms": {"bloom-7b1 decode 8 rows at 512": 30.0}},
    {"job": "transformers", "name": "t: b", "peer": "t", "ms": {"another": 1.0}},
]


def test_shares_are_of_the_measured_ceilings():
    told = report.tables([record | AT for record in RECORDS])
    assert told[0].startswith("NVIDIA H200, 2026-11-25, jax 0.11.2. A copy moves 4,000 GB/s")
    assert "| decode 32 x 2048, 32 heads of 128, bfloat16 | gpu | 0.5000 | 0.2500 | 50% | 90% | 0.004 |" in told
    assert (
        "| decode 32 x 2048, 32 heads of 128, float32 queries, float32 | gpu | 1.0000 | 0.5000 | 50% |  | 4e-06 |"
        in told
    )
    assert "| int4 product, 8 rows | gpu | 0.0200 | 0.0100 | 50% |  | 0.001 | 0.1000 |" in told
    assert "| step | ms | floor ms | reached | target | t |" in told
    assert "| bloom-7b1 decode 8 rows at 512 | 20.0000 | 10.0000 | 50% | 85% | 30.000 |" in told
    assert "| sorting | 1.000 |" in told
    assert told[-1] == "* prefill 1024, 32 heads: nothing for 150 s"


def test_files_are_written_and_missing_ceilings_are_named(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record | AT) + "\n" for record in RECORDS))
    assert command.main(["report", "--records", str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "device.png").stat().st_size > 0
    assert "NVIDIA H200" in (tmp_path / "device.md").read_text()
    assert command.main(["report", "--records", str(tmp_path / "none")]) == 2
    assert "no record of device, copy, matmul: run" in capsys.readouterr().out


def test_tables_are_written_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert report.write([record | AT for record in RECORDS], tmp_path) == 0
    assert "no plot, because matplotlib" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["device.md"]


def test_without_an_output_folder_tables_are_printed(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record | AT) + "\n" for record in RECORDS))
    assert command.main(["report", "--records", str(path)]) == 0
    assert "| kernel | backend |" in capsys.readouterr().out


@pytest.mark.bench
def test_commands_from_start_to_report(tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    for name in ("kernels", "steps"):
        assert command.main([name, "--small", "--records", str(path)]) == 0
    assert command.main(["report", "--records", str(path)]) == 0
    assert "tiny decode 3 rows at 10" in capfd.readouterr().out
