"""Times candidate tilings of the GPU kernels on this GPU and prints a line for each as it goes.

python -m benchmarks.device.gpu_tune [--only tiles prompts ragged int4 experts] [--small]

The best belong in `cuts.py`, `int4.py` and `grouped.py` of `pallas_kernels/gpu`. Needs JAX, flax, numpy and Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from benchmarks.device import absent

absent.stand_in()  # before the engine is imported

from benchmarks.device import kernels, products  # noqa: E402
from benchmarks.device.kernels import KernelCase  # noqa: E402
from pallas_kernels import gpu  # noqa: E402
from pallas_kernels.gpu import cuts, grouped, int4, triton_call  # noqa: E402

# Sizes in the order of cuts.Tiling, Int4Tiling and RunsTiling.
TILES = {
    KernelCase(rows=32, context=2048, kv_heads=8): (
        "16x64x4x3x4 16x64x4x3x5 16x64x4x3x3 16x64x4x4x3 16x64x4x2x5 16x64x8x3x2 16x32x4x4x5 16x128x4x3x2 16x128x8x2x2"
    ),
    KernelCase(rows=32, context=2048, pool_dtype="int8"): (
        "16x64x4x3x4 16x64x4x3x3 16x64x4x3x5 16x128x4x2x3 16x128x8x3x1 16x64x8x3x2 16x64x4x4x4 16x32x4x4x5 16x32x2x4x8"
    ),
    KernelCase(rows=32, context=2048, heads=16, kv_heads=16, head_dim=64): (
        "16x64x4x3x5 16x64x4x3x4 16x64x4x3x6 16x64x4x4x5 16x64x2x3x8 16x128x4x3x3 16x128x4x4x3 16x64x4x5x5"
    ),
    KernelCase(rows=32, context=2048): "16x64x4x3x4 16x64x4x3x5 16x64x4x4x3 16x128x4x2x2",
    KernelCase(rows=32, context=2048, dtype="float32", pool_dtype="float32"): (
        "16x32x8x2x1 16x32x4x2x2 16x32x4x3x2 16x64x4x2x2 16x64x8x2x1 16x16x4x3x3 16x32x4x4x2 16x32x2x3x4"
    ),
}
# Slots of parts, as cuts._DECODE_PART and _PROMPT_PART.
DECODE_PARTS = [(2, 128, 1024), (1, 128, 512), (4, 128, 2048), (1, 64, 256), (8, 256, 4096)]
PROMPT_PARTS = [(32, 512, 4096), (16, 256, 2048), (64, 1024, 8192)]
PROMPTS = [  # of fewer tiles than a GPU has processors
    KernelCase(rows=1, context=8192, new=32, kv_heads=8),
    KernelCase(rows=1, context=8192, new=256, kv_heads=8),
    KernelCase(rows=1, context=2048, new=128),
    KernelCase(rows=1, context=8192, new=128, heads=16, kv_heads=16, head_dim=64),
]
RAGGED = [  # contexts of rows that decode together, and KV heads
    *(([128] * 31 + [32768], 8), ([128] * 31 + [8192], 8), ([128] * 31 + [8192], 32), ([128] * 7 + [16384], 8)),
    *(([2048] * 32, 8), ([1055] * 32, 8), ([64, 200, 500, 900, 1500, 2500, 4000, 7000] * 4, 8), ([32768], 8)),
]
INT4 = [  # of products.CASES[:3]
    "8x64x128x4x4x512 8x64x128x4x4x1024 8x64x128x4x5x700 8x64x256x4x4x512 8x64x256x4x3x512 8x128x128x4x4x512 "
    "8x128x128x8x4x512 8x32x128x2x5x1024 16x64x128x4x4x172 16x64x128x4x4x512 16x64x256x4x3x512 16x128x128x8x4x512",
    "32x64x128x4x4x512 32x64x128x4x4x256 32x64x128x4x3x512 32x64x256x4x3x256 32x64x64x4x5x512 32x128x128x4x4x256 "
    "32x128x128x8x4x256 32x32x128x4x4x512 16x64x128x4x4x512 32x64x128x4x5x128 32x128x256x8x3x128 32x64x128x4x4x384",
    "128x128x128x8x3x128 128x128x128x8x2x128 128x128x128x8x3x64 128x128x64x8x4x128 128x64x128x4x3x128 "
    "128x64x128x4x3x256 64x128x128x8x3x256 64x128x128x4x3x256 64x64x128x4x4x512 256x64x128x4x2x128 "
    "256x128x64x8x3x128 128x128x128x4x3x128 256x64x64x8x4x128 64x128x64x4x4x256",
]
EXPERTS = [  # of products.CASES[3:]
    "16x64x128x4x4 16x64x64x4x4 16x64x128x4x3 16x64x256x4x3 16x128x64x4x4 8x64x128x4x4 16x32x128x4x4 16x64x128x4x5",
    "16x64x128x4x4 16x64x64x4x4 16x64x128x4x3 16x64x256x4x3",
    "128x128x64x8x3 128x128x64x8x4 128x128x64x4x3 128x256x64x8x3 128x256x64x8x4 256x128x64x8x3 128x128x128x8x2",
]


def read(kind: Callable[..., Any], sizes: str) -> list[Any]:
    """The tilings of a table's line."""
    return [kind(*map(int, each.split("x"))) for each in sizes.split()]


def tell(case: str, candidate: object, measure: Callable[[], tuple[float, float, float]]) -> None:
    """Prints milliseconds, and the rate of what takes an H200 longer: bytes or operations; or why there are none."""
    try:
        ms, nbytes, flops = measure()
        rate = f"{flops / ms / 1e9:.1f} TFLOP/s" if flops > 187 * nbytes else f"{nbytes / ms / 1e6:.1f} GB/s"
        print(f"{case}: {candidate}: {ms:.4f} ms, {rate}", flush=True)
    except Exception as problem:  # others may fit, or compile
        print(f"{case}: {candidate}: failed: {str(problem or repr(problem)).strip().splitlines()[0][:120]}", flush=True)


def attention(case: KernelCase, lens: Sequence[int] = ()) -> tuple[float, float, float]:
    """Milliseconds, bytes and operations of a layer, for rows of one context or of several."""
    jax.clear_caches()  # tilings are read when a program is traced
    backend = kernels.backend_of(case)
    if not lens:
        return kernels.time_case(case, backend), case.nbytes, case.flops
    shape, kv_lens = case.shape(backend), np.array(lens, np.int32)
    columns = -(-kv_lens // shape.block_size)
    tables = np.zeros((case.rows, shape.max_blocks), np.int32)
    tables[np.arange(shape.max_blocks) < columns[:, None]] = np.random.default_rng(0).permutation(columns.sum())
    some = {"kv_lens": kv_lens, "positions": kv_lens - 1, "block_tables": tables}
    batch = kernels.make_batch(case, shape)._replace(**jax.device_put(some))
    share = sum(lens) / (case.rows * case.context)
    return kernels.time_case(case, backend, batch), share * case.nbytes, share * case.flops


def tiles(*, small: bool) -> None:
    for case, sizes in ({kernels.SMALL_CASES[1]: "16x64x4x3x4"} if small else TILES).items():
        for tiling in read(cuts.Tiling, sizes):
            chosen = patch.object(cuts, "decode_tiling", lambda _, tiling=tiling: tiling)
            block = patch.object(gpu.GpuBackend, "default_block_size", lambda *_, slots=tiling.slots: max(64, slots))
            with chosen, block:  # a block holds a tile
                tell(case.name, tiling, partial(attention, case))


def prompts(*, small: bool) -> None:
    for case in kernels.SMALL_CASES[2:3] if small else PROMPTS:
        for part in PROMPT_PARTS[: 2 if small else None]:
            with patch.object(cuts, "_PROMPT_PART", part):
                tell(f"{case.name}, context {case.context}", f"parts {part}", partial(attention, case))


def ragged(*, small: bool) -> None:
    for lens, kv_heads in [([5, 100], 8)] if small else RAGGED:
        case = KernelCase(rows=len(lens), context=max(lens), kv_heads=kv_heads)
        rows = f"decode {case.rows} rows of {sum(lens)} in all, {max(lens)} the longest, 32 heads over {kv_heads}"
        for part in DECODE_PARTS[: 2 if small else None]:
            with patch.object(cuts, "_DECODE_PART", part):
                tell(rows, f"parts {part}", partial(attention, case, lens))


def int4_products(*, small: bool) -> None:
    table = ["8x64x128x4x4x512 8x64x128x4x4x1"] if small else INT4
    for case, sizes in zip(products.SMALL_CASES[:1] if small else products.CASES[:3], table, strict=True):
        product(case, read(int4.Int4Tiling, sizes), partial(patch.object, int4, "int4_tiling"))


def expert_products(*, small: bool) -> None:
    table = ["16x64x128x4x4 16x64x64x4x4"] if small else EXPERTS
    for case, sizes in zip(products.SMALL_CASES[3:] if small else products.CASES[3:], table, strict=True):
        product(case, read(grouped.RunsTiling, sizes), partial(patch.object, grouped, "runs_tiling"))


def product(case: products.ProductCase, tilings: Sequence[Any], chosen: Callable[..., Any]) -> None:
    """Times a product by each tiling; the first that works is held to NumPy, the others to that one."""
    x, matrices, *more = products.operands(case)
    right: list[np.ndarray] = []

    def lowered(tiling: Any) -> Any:
        jax.clear_caches()
        with chosen(lambda *_: tiling):
            return jax.jit(products.in_turn(case.multiply)).lower(x, matrices, *more)

    def measure(compiled: Any) -> tuple[float, float, float]:
        if isinstance(compiled, Exception):
            raise compiled
        run = partial(compiled, x, matrices, *more)
        y = np.asarray(run()[0], np.float64)
        off = products.largest(y - right[0]) if right else case.difference(y, np.asarray(x, np.float64), matrices[0])
        if off > products.TOLERANCE:
            raise ValueError(f"wrong by {off:.3g}")
        if not right:
            right.append(y)
        return 1e3 * kernels.seconds(run, 4) / len(matrices), products.nbytes(case), products.flops(case)

    made = [_attempt(lowered, tiling) for tiling in tilings]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda each: each if isinstance(each, Exception) else _attempt(each.compile), made))
    for tiling, compiled in zip(tilings, made, strict=True):
        tell(case.name, tiling, partial(measure, compiled))


def _attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except Exception as problem:
        return problem


KINDS = {"tiles": tiles, "prompts": prompts, "ragged": ragged, "int4": int4_products, "experts": expert_products}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.gpu_tune", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of candidates (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny shapes, by what serves here, to see that it runs")
    asked = parser.parse_args(arguments)
    kind = jax.devices()[0].device_kind
    if not asked.small and (triton_call.capability(kind) is None or triton_call.missing()):
        parser.error(f"the kernels do not run here: {triton_call.missing() or kind}")
    for what in asked.only:
        started = time.perf_counter()
        KINDS[what](small=asked.small)
        print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
