from __future__ import annotations

from functools import partial
from unittest.mock import patch

import jax.numpy as jnp
import pytest

from benchmarks.device import gpu_tune, kernels, products
from pallas_kernels import gpu
from pallas_kernels.gpu import cuts, grouped, int4


@pytest.mark.bench
@pytest.mark.parametrize(("kind", "lines"), [("tiles", 1), ("prompts", 2), ("ragged", 2), ("int4", 2), ("experts", 2)])
def test_a_rehearsal_times_each_kind(kind, lines, capsys):
    gpu_tune.main(["--small", "--only", kind])
    *told, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{kind}: ")
    assert len(told) == lines
    assert all(line.endswith("B/s") and " ms, " in line for line in told), told


def test_decodes_are_timed_by_the_tilings_told(capsys, monkeypatch):
    def time_case(case, _):
        shape = case.shape(gpu.BACKEND)
        seen.append((*cuts.decode_tiling(shape), shape.block_size))
        if len(seen) == 2:
            raise RuntimeError("out of shared memory\nand more")
        return 1.0

    seen = []
    monkeypatch.setattr(kernels, "time_case", time_case)
    monkeypatch.setattr(kernels, "backend_of", lambda _: gpu.BACKEND)
    monkeypatch.setattr(gpu_tune, "TILES", {kernels.SMALL_CASES[0]: "16x128x8x2x2 16x32x4x4x4"})
    gpu_tune.tiles(small=False)
    assert seen == [(16, 128, 8, 2, 2, 128), (16, 32, 4, 4, 4, 64)]
    first, second = capsys.readouterr().out.splitlines()
    assert "Tiling(rows=16, slots=128, warps=8, stages=2, resident=2): 1.0000 ms" in first
    assert second.endswith("failed: out of shared memory")


@pytest.mark.parametrize(
    ("case", "module", "name"),
    [(products.SMALL_CASES[0], int4, "int4_tiling"), (products.SMALL_CASES[3], grouped, "runs_tiling")],
)
def test_products_take_each_tiling_and_are_checked(case, module, name, capsys, monkeypatch):
    def multiply(self, *operands):
        tiling = getattr(module, name)()
        if tiling == "unknown":
            raise RuntimeError("no such tiling")
        return multiplied(self, *operands) * (2 if tiling == "wrong" else 1)

    multiplied = type(case).multiply
    monkeypatch.setattr(type(case), "multiply", multiply)
    monkeypatch.setattr(products, "_BYTES_AT_ONCE", 1)
    gpu_tune.product(case, ["wrong", "right", "unknown", "wrong"], partial(patch.object, module, name))
    found = [line.split(": ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    assert [each.startswith("failed: wrong by ") for each in found] == [True, False, False, True]
    assert " ms, " in found[1]
    assert found[2] == "failed: no such tiling"


def test_what_is_in_use_is_among_the_candidates():
    for case, sizes in gpu_tune.TILES.items():
        assert cuts.decode_tiling(case.shape(gpu.BACKEND)) in gpu_tune.read(cuts.Tiling, sizes)
    assert cuts._DECODE_PART in gpu_tune.DECODE_PARTS
    assert cuts._PROMPT_PART in gpu_tune.PROMPT_PARTS
    for case, sizes in zip(products.CASES, [*gpu_tune.INT4, *gpu_tune.EXPERTS], strict=True):
        if isinstance(case, products.Int4Case):
            used = int4.int4_tiling(case.rows, case.group, jnp.dtype(jnp.bfloat16))
        else:
            used = grouped.runs_tiling(case.rows, case.experts, jnp.bfloat16)
        assert used in gpu_tune.read(type(used), sizes)


def test_a_machine_without_a_gpu_is_told(capsys):
    with pytest.raises(SystemExit):
        gpu_tune.main([])
    assert "the kernels do not run here: " in capsys.readouterr().err
