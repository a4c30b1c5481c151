"""The timed kernels: what they count as read and computed, and that what is wrong is not timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.device import kernels, products, records
from pallas_kernels.xla import XlaBackend

RECORDS = Path("benchmarks/results/2026-11-26-h200.jsonl")


class Unscaled(XlaBackend):
    """Forgets the scale."""

    def attend(self, *args, scale, **kw):
        return super().attend(*args, scale=1.0, **kw)


@pytest.mark.bench
def test_what_is_wrong_is_not_timed():
    with pytest.raises(ValueError, match=r"differs from the oracle by .*; nothing was timed"):
        kernels.checked(kernels.SMALL_CASES[0], Unscaled())


def test_bytes_and_operations_of_a_case():
    decode = kernels.KernelCase(rows=2, context=10, heads=3, kv_heads=3, head_dim=64)
    assert (decode.nbytes, decode.flops) == (2 * 2 * 10 * 3 * 64 * 2, 4 * 2 * 10 * 3 * 64)
    grouped = kernels.KernelCase(rows=2, context=10, heads=6, kv_heads=3, head_dim=64)
    assert (grouped.nbytes, grouped.flops) == (decode.nbytes, 2 * decode.flops)
    eight = kernels.KernelCase(rows=2, context=10, heads=3, kv_heads=3, head_dim=64, pool_dtype="int8")
    assert eight.nbytes == 2 * 2 * 10 * 3 * (64 + 4)
    prefill = kernels.KernelCase(rows=1, context=4, new=4, heads=1, kv_heads=1, head_dim=64)
    assert prefill.flops == 4 * 10 * 64


def test_names_tell_cases_apart():
    for small in (False, True):
        names = [name for module in (kernels, products) for name, _ in module.cases("kernels", small=small)]
        assert len(set(names)) == len(names)
    names = {record["name"] for record in records.read(RECORDS) if record["job"] == "kernels"}
    assert names < {name for name, _ in kernels.cases("kernels", small=False)}


def test_float32_cases_have_their_dtype_and_tolerance():
    exact = [case for case in kernels.CASES if "float32" in case.name]
    assert [case.new for case in exact] == [1, 4096]
    for case in exact:
        shape = case.shape(XlaBackend())
        assert shape.dtype == shape.pool_dtype == np.float32
        assert case.tolerance < 1e-3 < kernels.CASES[0].tolerance
