"""Times attention kernels and whole steps on this device, as shares of its ceilings.

    python -m pallas_kernels.bench [--small] [--out DIR]

The ceilings come first: the bandwidth of a copy and the rate of a bfloat16 matmul, both measured. Every kernel is
checked against the oracle before it is timed. The steps and the sampler are the engine's (benchmarks.roofline); a
separate process times them, before this one takes the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api, oracle
from pallas_kernels.api import AttentionBatch, AttentionShape, Backend

SAMPLES = 7
# Targets on an H200 as shares of the measured ceilings (of bandwidth from 32 rows x 2,048 tokens on).
DECODE_TARGET, PREFILL_TARGET, STEP_TARGET = 0.85, 0.60, 0.85
_BYTES_AT_ONCE = 2**32  # keys and values of several layers, so that no layer's are in a cache
_MOST_LAYERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One timed kernel call: each row adds `new` tokens to a context.

    Attributes:
      context: tokens of a row after they are added.
    """

    rows: int
    context: int
    new: int = 1
    heads: int = 32
    head_dim: int = 128
    pool_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        what = f"prefill {self.new}" if self.new > 1 else f"decode {self.rows} x {self.context}"
        return f"{what}, {self.heads} heads of {self.head_dim}, {self.pool_dtype}"

    def shape(self, backend: Backend) -> AttentionShape:
        shape = AttentionShape(
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            dtype=np.dtype(jnp.bfloat16),
            pool_dtype=jnp.dtype(self.pool_dtype),
            alibi=True,
        )
        return shape.with_blocks(backend.default_block_size(shape), self.context)

    @property
    def nbytes(self) -> int:
        """Keys and values that must be read, in bytes."""
        scale = 4 if self.pool_dtype == "int8" else 0
        width = self.head_dim * jnp.dtype(self.pool_dtype).itemsize + scale
        return 2 * self.rows * self.context * self.heads * width

    @property
    def flops(self) -> int:
        """Operations of both products, for the pairs of query and key that causality leaves."""
        pairs = self.rows * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)
        return 4 * self.heads * self.head_dim * pairs


CASES = [
    *[KernelCase(rows=rows, context=context) for rows in (1, 8, 32, 128) for context in (512, 2048, 8192)],
    KernelCase(rows=32, context=2048, pool_dtype="int8"),
    KernelCase(rows=32, context=2048, heads=16, head_dim=64),
    *[KernelCase(rows=1, context=n, new=n) for n in (1024, 2048, 4096, 8192)],
]
WRITE_CASE = KernelCase(rows=128, context=1)  # hardly anything to read
SMALL_CASES = [
    KernelCase(rows=2, context=64, heads=2, head_dim=64),
    KernelCase(rows=1, context=48, new=48, heads=2, head_dim=64),
]
SMALL_WRITE_CASE = KernelCase(rows=4, context=1, heads=2, head_dim=64)


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Median seconds of a call, over several runs of `calls` calls in a row; warm."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)][-1])
        samples.append((time.perf_counter() - started) / calls)
    return statistics.median(samples)


def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second, read and written together."""
    x = jnp.zeros(nbytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds(lambda: copy(x), 4)


def matmul_rate(size: int) -> float:
    """Operations per second of a square bfloat16 matmul of random numbers, summed in float32."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.bfloat16))
    return 2 * size**3 / seconds(lambda: multiply(a, b), 4)


def make_batch(case: KernelCase, shape: AttentionShape) -> AttentionBatch:
    """All rows at their context, with blocks in random order."""
    rows, tokens = case.rows, case.rows * case.new
    blocks = np.random.default_rng(0).permutation(rows * shape.max_blocks).astype(np.int32)
    flat = np.arange(tokens, dtype=np.int32)
    return AttentionBatch(
        query_offsets=jnp.arange(rows + 1, dtype=jnp.int32) * case.new,
        kv_lens=jnp.full(rows, case.context, jnp.int32),
        block_tables=jnp.asarray(blocks.reshape(rows, shape.max_blocks)),
        token_chunk=jnp.asarray(flat // case.new),
        positions=jnp.asarray(case.context - case.new + flat % case.new),
    )


def time_case(case: KernelCase, backend: Backend) -> float:
    """Milliseconds of one layer."""
    shape = case.shape(backend)
    layers = max(1, min(_MOST_LAYERS, _BYTES_AT_ONCE // case.nbytes))
    n_blocks = case.rows * shape.max_blocks
    batch = make_batch(case, shape)
    slopes = np.ones(shape.num_heads, np.float32)
    x = jnp.ones((case.rows * case.new, case.heads, case.head_dim), shape.dtype)

    def run(x, pool, batch):
        meta = backend.prepare(batch, shape)
        for layer in range(layers):
            first = layer * n_blocks
            x, pool = backend.attend(x, x, x, pool, meta, shape, slopes=slopes, scale=0.1, first_block=first)
        return x, pool

    step = jax.jit(run, donate_argnums=1)
    state = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), backend.pool(shape, layers * n_blocks))]

    def call() -> jax.Array:
        out, state[0] = step(x, state[0], batch)
        return out

    return 1e3 * seconds(call, 4) / layers


def check(case: KernelCase, backend: Backend) -> float:
    """The largest difference from the oracle, over a prompt and then a decode of each row."""
    shape, rng = case.shape(backend), np.random.default_rng(1)
    rows, first = case.rows, case.context - 1
    pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), backend.pool(shape, rows * shape.max_blocks))
    slopes = (2.0 ** -np.arange(1, shape.num_heads + 1)).astype(np.float32)
    keys, values, worst = [], [], 0.0
    for context, new in ((first, first), (first + 1, 1)) if first else ((1, 1),):
        now = dataclasses.replace(case, context=context, new=new)
        q, k, v = (
            jnp.asarray(rng.standard_normal((rows * new, case.heads, case.head_dim)), shape.dtype) for _ in range(3)
        )

        @jax.jit
        def run(q, k, v, pool, batch):
            meta = backend.prepare(batch, shape)
            return backend.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=case.head_dim**-0.5)

        out, pool = run(q, k, v, pool, make_batch(now, shape))
        queries, keys_now, values_now = (np.split(np.asarray(x, np.float64), rows) for x in (q, k, v))
        keys = keys_now if not keys else [np.concatenate(each) for each in zip(keys, keys_now, strict=True)]
        values = values_now if not values else [np.concatenate(each) for each in zip(values, values_now, strict=True)]
        right = oracle.ragged_attention(queries, keys, values, slopes=slopes, scale=case.head_dim**-0.5)
        difference = np.abs(np.concatenate(right) - np.asarray(out, np.float64))
        worst = max(worst, float(np.nan_to_num(difference, nan=math.inf).max()))
    return worst


def checked(cases: Sequence[KernelCase], backend: Backend) -> float:
    """Check small versions of cases. ValueError if one differs by more than int8 rounding."""
    worst = 0.0
    for case in {dataclasses.replace(case, rows=3, context=150, new=1) for case in cases}:
        off = check(case, backend)
        if off > (0.1 if case.pool_dtype == "int8" else 0.03):
            raise ValueError(f"{case.name}: differs from the oracle by {off:.3g}; nothing was timed")
        worst = max(worst, off)
    return worst


def engine_steps(small: bool) -> dict[str, Any]:
    """Run benchmarks.roofline in a separate process."""
    command = [sys.executable, "-m", "benchmarks.roofline", *(["--small"] if small else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines of a table."""
    bandwidth, rate = result["copy bytes/s"], result["matmul flop/s"]
    told = [
        f"{result['device']}, {result['date']}, jax {result['jax']}, attention by {result['backend']}",
        f"copy {bandwidth / 1e9:.0f} GB/s, bfloat16 matmul {rate / 1e12:.1f} TFLOP/s",
        f"largest difference from the oracle {result['largest difference']:.2g}",
        "",
        f"{'kernel':46} {'ms':>9} {'of bandwidth':>13} {'of matmul':>10} {'target':>7}",
    ]
    for kernel in result["kernels"]:
        wanted = f"{kernel['target']:.0%}" if kernel["target"] else ""
        shares = f"{kernel['of bandwidth']:13.1%} {kernel['of matmul']:10.1%}"
        told.append(f"{kernel['name']:46} {kernel['ms']:9.4f} {shares} {wanted:>7}")
    theirs = result["transformers"]
    told += [
        "",
        f"{'step':46} {'ms':>9} {'floor':>9} {'reached':>8} {'target':>7} {'transformers':>13} {'continuous':>11}",
    ]
    for step in result["steps"]:
        wanted = f"{step['target']:.0%}" if step["target"] else ""
        beside = ""
        if not isinstance(theirs, str):
            continuous = theirs["continuous ms"].get(step["name"])
            beside = f" {theirs['ms'][step['name']]:13.3f}" + (f" {continuous:11.3f}" if continuous else "")
        shares = f"{step['floor ms']:9.3f} {step['reached']:8.1%} {wanted:>7}"
        told.append(f"{step['name']:46} {step['ms']:9.3f} {shares}{beside}")
    told += ["", *(f"{each['name']:46} {each['ms']:9.3f} ms" for each in result["choice of tokens"])]
    return [*told, f"transformers: {theirs if isinstance(theirs, str) else theirs['version']}"]


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the share of its ceiling that each kernel and step reaches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [(each["name"], max(each["of bandwidth"], each["of matmul"]), each["target"]) for each in result["kernels"]]
    bars += [(each["name"], each["reached"], each["target"]) for each in result["steps"]]
    figure = Figure(figsize=(9, 1 + 0.24 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.barh([name for name, _, _ in bars], [share for _, share, _ in bars])
    for place, (_, _, target) in enumerate(bars):
        if target:
            axis.plot([target, target], [place - 0.4, place + 0.4], color="black")
    axis.invert_yaxis()
    axis.set_xlabel("share of the measured ceiling (black: target on an H200)")
    axis.tick_params(axis="y", labelsize=7)
    axis.set_title(f"{result['device']}, {result['date']}", fontsize=9)
    figure.savefig(path, dpi=130)


def measure(small: bool) -> dict[str, Any]:
    """Measure everything, the steps first."""
    found = engine_steps(small)
    platform = jax.default_backend()
    cases = [*(SMALL_CASES if small else CASES), SMALL_WRITE_CASE if small else WRITE_CASE]
    backend = api.select("auto", cases[0].shape(api.load("xla")), platform).backend
    bandwidth, rate = copy_bandwidth(2**22 if small else 2**30), matmul_rate(256 if small else 8192)
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "jaxserve": importlib.metadata.version("jaxserve"),
        "backend": backend.name,
        "copy bytes/s": bandwidth,
        "matmul flop/s": rate,
        "largest difference": checked(cases, backend),
        "kernels": [],
    }
    for case in cases:
        ms = time_case(case, backend)
        name = f"write {case.rows} tokens (attention to one slot each)" if case.context == 1 else case.name
        prefill = case.new > 1
        large = case.rows >= 32 and case.context >= 2048 and not prefill
        result["kernels"].append(
            {
                "name": name,
                "ms": ms,
                "of bandwidth": 1e3 * case.nbytes / ms / bandwidth,
                "of matmul": 1e3 * case.flops / ms / rate,
                "target": DECODE_TARGET if large else PREFILL_TARGET if case.new == 4096 else None,
            }
        )
    result["steps"] = [
        {
            "name": step["name"],
            "ms": step["ms"],
            "floor ms": (floor := 1e3 * max(step["nbytes"] / bandwidth, step["flops"] / rate)),
            "reached": floor / step["ms"],
            "target": PREFILL_TARGET if step["prefill"] else STEP_TARGET if step["wanted"] else None,
        }
        for step in found["steps"]
    ]
    return result | {name: found[name] for name in ("choice of tokens", "transformers")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description="Times attention kernels and whole steps."
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    started = time.perf_counter()
    result = measure(args.small)
    print("\n".join(lines(result)))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, args.out / "kernels.png")
    print(f"written: {args.out / 'kernels.json'} and kernels.png, in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
