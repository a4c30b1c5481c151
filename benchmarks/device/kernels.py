"""Times attention kernels on this device, and the ceilings that they are held to.

The ceilings are the bandwidth of a copy and the rate of a bfloat16 matmul, both measured. Every kernel is checked
against the oracle before it is timed; all inputs are random, since numbers that are all alike take less power.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.records import Case
from pallas_kernels import api, oracle
from pallas_kernels.api import AttentionBatch, AttentionShape, Backend

SAMPLES = 7
_BYTES_AT_ONCE = 2**32  # keys and values of several layers, so that no layer's are in a cache
_MOST_LAYERS = 12
_RANDOM_BLOCKS = 4096


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
    kv_heads: int = 32
    head_dim: int = 128
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        what = f"prefill {self.new}" if self.new > 1 else f"decode {self.rows} x {self.context}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads} over {self.kv_heads}"
        queries = "" if self.dtype == "bfloat16" else f", {self.dtype} queries"
        return f"{what}, {heads} heads of {self.head_dim}{queries}, {self.pool_dtype}"

    @property
    def alibi(self) -> bool:
        """As in BLOOM; decoders with grouped heads rotate instead."""
        return self.heads == self.kv_heads

    @property
    def slopes(self) -> np.ndarray | None:
        """ALiBi's slopes, float32[heads]."""
        return (2.0 ** -np.linspace(0.5, 8, self.heads)).astype(np.float32) if self.alibi else None

    def shape(self, backend: Backend) -> AttentionShape:
        shape = AttentionShape(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(self.dtype),
            pool_dtype=jnp.dtype(self.pool_dtype),
            alibi=self.alibi,
            device_kind=jax.devices()[0].device_kind,
        )
        return shape.with_blocks(backend.default_block_size(shape), self.context)

    @property
    def nbytes(self) -> int:
        """Keys and values that must be read, in bytes."""
        scale = 4 if self.pool_dtype == "int8" else 0
        width = self.head_dim * jnp.dtype(self.pool_dtype).itemsize + scale
        return 2 * self.rows * self.context * self.kv_heads * width

    @property
    def flops(self) -> int:
        """Operations of both products, for the pairs of query and key that causality leaves."""
        pairs = self.rows * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)
        return 4 * self.heads * self.head_dim * pairs

    @property
    def tolerance(self) -> float:
        """The largest difference from the oracle that is rounding."""
        if self.dtype == self.pool_dtype == "float32":
            return 1e-4  # products of single TF32 numbers differ by more
        return 0.1 if self.pool_dtype == "int8" else 0.03


_ROWS, _CONTEXTS, _PROMPTS = (1, 8, 32, 128), (512, 2048, 8192), (1024, 2048, 4096, 8192)
_FLASHINFER = ((32, 4096), (8, 32768))  # rows and contexts for which FlashInfer's times are published (docs/kernels.md)
CASES = [  # in the order of what is asked first
    *[KernelCase(rows=rows, context=context) for rows in _ROWS for context in _CONTEXTS],
    *[KernelCase(rows=1, context=n, new=n) for n in _PROMPTS],
    *[KernelCase(rows=rows, context=context, kv_heads=8) for rows in _ROWS for context in _CONTEXTS],
    *[KernelCase(rows=1, context=n, new=n, kv_heads=8) for n in _PROMPTS],
    *[KernelCase(rows=rows, context=context, kv_heads=heads) for heads in (32, 8) for rows, context in _FLASHINFER],
    KernelCase(rows=32, context=2048, pool_dtype="int8"),
    KernelCase(rows=32, context=2048, heads=16, kv_heads=16, head_dim=64),
    KernelCase(rows=128, context=1),  # hardly anything to read: the time of a write
    KernelCase(rows=32, context=2048, dtype="float32", pool_dtype="float32"),
    KernelCase(rows=1, context=4096, new=4096, dtype="float32", pool_dtype="float32"),
]
SMALL_CASES = [
    KernelCase(rows=2, context=64, heads=2, kv_heads=2, head_dim=64),
    KernelCase(rows=2, context=64, heads=4, kv_heads=2, head_dim=64),
    KernelCase(rows=1, context=48, new=48, heads=2, kv_heads=2, head_dim=64),
    KernelCase(rows=4, context=1, heads=2, kv_heads=2, head_dim=64),
    KernelCase(rows=2, context=64, heads=2, kv_heads=2, head_dim=64, dtype="float32", pool_dtype="float32"),
    KernelCase(rows=1, context=48, new=48, heads=2, kv_heads=2, head_dim=64, dtype="float32", pool_dtype="float32"),
]


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


def time_case(case: KernelCase, backend: Backend, batch: AttentionBatch | None = None) -> float:
    """Milliseconds of one layer.

    Args:
      batch: in place of `make_batch`; no row has more tokens than the case's context.
    """
    shape = case.shape(backend)
    batch = make_batch(case, shape) if batch is None else batch
    n_blocks = int(batch.block_tables.max()) + 1
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backend.pool(shape, n_blocks)))
    layers = max(1, min(_MOST_LAYERS, _BYTES_AT_ONCE // nbytes))
    tokens, scale = case.rows * case.new, case.head_dim**-0.5
    q = jax.random.normal(jax.random.key(0), (tokens, case.heads, case.head_dim), shape.dtype)
    k, v = (jax.random.normal(jax.random.key(i), (tokens, case.kv_heads, case.head_dim), shape.dtype) for i in (1, 2))

    def run(q: Any, k, v, pool, batch):
        meta = backend.prepare(batch, shape)
        for layer in range(layers):
            first = layer * n_blocks
            q, pool = backend.attend(q, k, v, pool, meta, shape, slopes=case.slopes, scale=scale, first_block=first)
        return q, pool

    step = jax.jit(run, donate_argnums=3)
    state = [random_pool(backend.pool(shape, layers * n_blocks))]

    def call() -> jax.Array:
        out, state[0] = step(q, k, v, state[0], batch)
        return out

    return 1e3 * seconds(call, 4) / layers


def random_pool(leaves: Any) -> Any:
    """A pool of random keys and values, made on the device. They repeat after some thousand blocks."""

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        dims = (min(leaf.shape[0], _RANDOM_BLOCKS), *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            some = jax.random.randint(jax.random.key(3), dims, -127, 128, leaf.dtype)
        else:
            some = jax.random.normal(jax.random.key(4), dims, leaf.dtype)
        return jnp.resize(some, leaf.shape)

    return jax.jit(lambda: jax.tree.map(filled, leaves))()


def check(case: KernelCase, backend: Backend) -> float:
    """The largest difference from the oracle, over a prompt and then a decode of each row."""
    shape, rng = case.shape(backend), np.random.default_rng(1)
    rows, first = case.rows, case.context - 1
    pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), backend.pool(shape, rows * shape.max_blocks))
    slopes = case.slopes
    keys, values, worst = [], [], 0.0
    for context, new in ((first, first), (first + 1, 1)) if first else ((1, 1),):
        now = dataclasses.replace(case, context=context, new=new)
        q, k, v = (
            jnp.asarray(rng.standard_normal((rows * new, heads, case.head_dim)), shape.dtype)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
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


def measure(case: KernelCase) -> dict[str, Any]:
    """Checks a small version of a case against the oracle, then times the case.

    Raises:
      ValueError: it differs by more than the rounding of its dtypes.
    """
    backend = backend_of(case)
    # Prompts of as many tokens as take the kernel that is timed.
    off = checked(dataclasses.replace(case, rows=3, context=150 if case.new == 1 else 400, new=1), backend)
    found = {"backend": backend.name, "difference": off, "nbytes": case.nbytes, "flops": case.flops}
    return found | {"ms": time_case(case, backend)}


def backend_of(case: KernelCase) -> Backend:
    """The backend that serves a case on this device."""
    return api.select("auto", case.shape(api.load("xla")), jax.default_backend()).backend


@cache
def checked(case: KernelCase, backend: Backend) -> float:
    """The largest difference from the oracle; ValueError if it is more than rounding."""
    off = check(case, backend)
    if off > case.tolerance:
        raise ValueError(f"{case.name}: differs from the oracle by {off:.3g}; nothing was timed")
    return off


def device() -> dict[str, Any]:
    """What the figures were measured on."""
    one = jax.devices()[0]
    return {"device": one.device_kind, "platform": one.platform, "jax": jax.__version__}


def cases(job: str, *, small: bool) -> Iterator[Case]:
    """The ceilings, then every attention kernel."""
    yield "device", device
    yield "copy", lambda: {"bytes/s": copy_bandwidth(2**22 if small else 2**33)}
    yield "matmul", lambda: {"flop/s": matmul_rate(256 if small else 8192)}
    for case in SMALL_CASES if small else CASES:
        yield case.name, partial(measure, case)
