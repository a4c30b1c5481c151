"""Random ragged batches over a poisoned pool, and what the oracle says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import oracle
from pallas_kernels.api import AttentionBatch, AttentionShape, Backend
from tests.pallas_kernels.subjects import SUBJECTS, backend

# Relative and absolute, by dtype of queries and outputs, whatever the pool holds: the oracle is given keys and values
# as the pool rounds them. Outputs are averages of values of order one. What is left in float32 is the rounding of
# scores, which weights inherit; in bfloat16 that of weights and of the result, 2^-8 each.
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(jnp.bfloat16): 2e-2}
_INT8 = np.dtype(np.int8)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `int8.quantize` makes of x, without rounding to integers: (values, scales) of float32."""
    scales = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    return x / np.where(scales > 0, scales, 1), scales


def as_held(x: np.ndarray, pool_dtype: np.dtype) -> np.ndarray:
    """Keys or values as a pool of a dtype holds them, float64."""
    if pool_dtype == _INT8:
        values, scales = rounded(x.astype(np.float32))
        return np.round(values).astype(np.float64) * scales
    return x.astype(pool_dtype).astype(np.float64)


def clear_of_ties(x: np.ndarray) -> np.ndarray:
    """x with zeros where two right divisions may round to different integers."""
    values, _ = rounded(x.astype(np.float32))
    return np.where(np.abs(np.abs(values) % 1 - 0.5) < 1e-3, 0, x).astype(x.dtype)


def poisoned(backend: Backend, shape: AttentionShape, n_blocks: int, large: Sequence[int]):
    """A pool as it may be found: NaN, which is what bits all set mean in every float type.

    The blocks in `large` hold the largest finite bfloat16 and as large numbers in float32: bytes of 0x7F.
    """

    def leaf(like: jax.ShapeDtypeStruct) -> jax.Array:
        held = np.full((*like.shape[:-1], like.shape[-1] * np.dtype(like.dtype).itemsize), 0xFF, np.uint8)
        held[list(large)] = 0x7F
        return jnp.asarray(held.view(like.dtype))

    return jax.tree.map(leaf, backend.pool(shape, n_blocks))


@partial(jax.jit, static_argnums=(0, 1, 2, 10, 11), donate_argnums=(6,))
def run(backend, shape, layer_blocks, q, k, v, pool, batch, slopes, sinks, scale, decodes_only):
    """One iteration of a layer for each of the shape's windows: [T, layers, N, D] and the pool of each part."""
    found = []
    for part, held in enumerate(pool):
        meta = backend.prepare(batch, shape, decodes_only=decodes_only, part=part)
        sink = None if sinks is None else sinks if part == 0 else jnp.full_like(sinks, -1e30)
        outputs = []
        for layer, window in enumerate(shape.windows):
            options = {"slopes": slopes, "scale": scale, "window": window, "sinks": sink}
            out, held = backend.attend(q, k, v, held, meta, shape, **options, first_block=layer * layer_blocks)
            outputs.append(out)
        found.append((jax.tree.map(lambda *each: jnp.stack(each, axis=1), *outputs), held))
    outputs, pool = zip(*found, strict=True)
    if shape.slot_parts == 1:
        return outputs[0], pool
    weights = jax.nn.softmax(jnp.stack([each.lse for each in outputs]), axis=0)  # [parts, T, layers, N]
    shares = [weight[..., None] * each.out for weight, each in zip(weights, outputs, strict=True)]
    return jnp.sum(jnp.stack(shares), axis=0).astype(q.dtype), pool


@dataclass
class Row:
    """A row's blocks and every key and value it was given, as the pool rounds them.

    The first `freed` blocks are no longer its own: they are behind the windows of all layers.
    """

    blocks: list[int]
    freed: int = 0
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)


class Harness:
    """Rows that share one pool; `step` runs chunks of them and returns outputs next to the oracle's.

    There is a layer for each of the shape's windows, and all are given the same queries, keys and values. Where every
    layer has a window, blocks behind the largest are freed: other rows may take them, and tables name any block there.
    """

    def __init__(
        self,
        backend: Backend,
        shape: AttentionShape,
        *,
        n_blocks: int,
        bucket: int,
        most_chunks: int,
        seed: int,
        slopes: np.ndarray | None = None,
        scale: float | None = None,
    ):
        self.backend, self.shape, self.n_blocks, self.seed = backend, shape, n_blocks, seed
        self.bucket, self.most_chunks = bucket, most_chunks
        self.rng = np.random.default_rng(seed)
        self.slopes = slopes
        # Some sinks outweigh all keys, and some none.
        self.sinks = self.rng.uniform(-2, 8, shape.num_heads).astype(shape.dtype) if shape.sinks else None
        self.scale = shape.head_dim**-0.5 if scale is None else scale
        windows = [window for window in shape.windows if window is not None]
        self.reach = max(windows) if len(windows) == len(shape.windows) else None
        # The last block of a layer belongs to nobody and stays NaN: tables point there wherever nothing may be read.
        # The one before holds large numbers if blocks are freed.
        self.large = [n_blocks - 2] if self.reach else []
        self.free = list(self.rng.permutation(n_blocks - 1 - len(self.large)))
        layers = len(shape.windows)
        large = [layer * n_blocks + block for layer in range(layers) for block in self.large]
        self.pool = tuple(poisoned(backend, shape, layers * n_blocks, large) for _ in range(shape.slot_parts))
        self.rows: list[Row] = []

    def add_row(self, *, like: int | None = None, shared_blocks: int = 0) -> int:
        """A new row; its first `shared_blocks` blocks and their tokens are those of row `like`."""
        row = Row(blocks=[])
        if like is not None:
            tokens = shared_blocks * self.shape.block_size
            other = self.rows[like]
            assert not other.freed
            row = Row(other.blocks[:shared_blocks], keys=other.keys[:tokens], values=other.values[:tokens])
        self.rows.append(row)
        return len(self.rows) - 1

    def draw(self, heads: int, tokens: int) -> np.ndarray:
        return self.rng.standard_normal((tokens, heads, self.shape.head_dim)).astype(np.float32)

    def batch(self, chunks: Sequence[tuple[int, int]]) -> AttentionBatch:
        """Chunks are (row, length); frees and allocates blocks as the rows grow, does not touch their tokens."""
        shape = self.shape
        offsets = np.zeros(self.most_chunks + 1, np.int32)
        kv_lens = np.zeros(self.most_chunks, np.int32)
        tables = np.full((self.most_chunks, shape.max_blocks), self.n_blocks - 1, np.int32)
        token_chunk = np.full(self.bucket, self.most_chunks - 1, np.int32)
        positions = np.zeros(self.bucket, np.int32)
        for c, (r, length) in enumerate(chunks):
            row = self.rows[r]
            start = len(row.keys)
            behind = self.free_behind(row, start)
            tables[c, : len(behind)] = behind
            while len(row.blocks) * shape.block_size < start + length:
                row.blocks.append(self.free.pop())
            offsets[c + 1 :] += length
            kv_lens[c] = start + length
            tables[c, row.freed : len(row.blocks)] = row.blocks[row.freed :]
            token_chunk[offsets[c] : offsets[c + 1]] = c
            positions[offsets[c] : offsets[c + 1]] = start + np.arange(length)
        return AttentionBatch(*map(jnp.asarray, (offsets, kv_lens, tables, token_chunk, positions)))

    def free_behind(self, row: Row, start: int) -> np.ndarray:
        """Frees the row's blocks that no layer reads for tokens from `start` on; returns what tables hold there."""
        if self.reach is not None:
            while (row.freed + 1) * self.shape.block_size <= start + 1 - self.reach:
                self.free.append(row.blocks[row.freed])
                row.freed += 1
        anything = np.array(row.blocks[: row.freed])
        other = self.rng.integers(3, size=row.freed)
        return np.where(other == 0, anything, np.where(other == 1, self.n_blocks - 1, self.n_blocks - 2))

    def step(
        self,
        chunks: Sequence[tuple[int, int]],
        qkv: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        *,
        decodes_only: bool = False,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Runs the chunks; returns (outputs, oracle's outputs) per chunk, each [length, layers, N, D].

        Padding is NaN going in, zeros coming out.

        Args:
          decodes_only: whether the program is the one for chunks of length 1 only.
        """
        shape = self.shape
        used = sum(length for _, length in chunks)
        if qkv is None:
            heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            qkv = tuple(self.draw(n, used) for n in heads)  # type: ignore[assignment]
        batch = self.batch(chunks)
        q, k, v = (x.astype(shape.dtype) for x in qkv)
        if shape.pool_dtype == _INT8:
            k, v = clear_of_ties(k), clear_of_ties(v)
        padded = [np.pad(x, ((0, self.bucket - used), (0, 0), (0, 0)), constant_values=np.nan) for x in (q, k, v)]
        arrays = (*map(jnp.asarray, padded), self.pool, batch, self.slopes, self.sinks)
        out, self.pool = run(self.backend, shape, self.n_blocks, *arrays, self.scale, decodes_only)
        assert out.dtype == shape.dtype
        stored_k, stored_v = as_held(k, shape.pool_dtype), as_held(v, shape.pool_dtype)
        q64, out = q.astype(np.float64), np.asarray(out, np.float64)
        np.testing.assert_array_equal(out[used:], 0, err_msg=f"padding; {self.again}")
        outputs, queries, keys, values, at = [], [], [], [], 0
        for r, length in chunks:
            row = self.rows[r]
            row.keys.extend(stored_k[at : at + length])
            row.values.extend(stored_v[at : at + length])
            queries.append(q64[at : at + length])
            outputs.append(out[at : at + length])
            keys.append(np.stack(row.keys))
            values.append(np.stack(row.values))
            at += length
        self.given = queries, keys, values
        return outputs, self.oracle(*self.given)

    def oracle(self, queries: list[np.ndarray], keys: list[np.ndarray], values: list[np.ndarray]) -> list[np.ndarray]:
        """What the oracle makes of chunks, each [length, layers, N, D]."""
        options = {"slopes": self.slopes, "sinks": self.sinks, "scale": self.scale, "soft_cap": self.shape.soft_cap}
        layers = [
            oracle.ragged_attention(queries, keys, values, **options, window=window) for window in self.shape.windows
        ]
        return [np.stack(outputs, axis=1) for outputs in zip(*layers, strict=True)]

    def check(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Runs the chunks and holds each output to the oracle's."""
        for (r, length), out, expected in zip(chunks, *self.step(chunks), strict=True):
            self.compare(out, expected, f"row {r}, {length} new of {len(self.rows[r].keys)}")

    def check_mixed_iterations(self) -> None:
        """Checks chunked prefill, decodes and both together, block edges included."""
        size = self.shape.block_size
        a, b, c, d = (self.add_row() for _ in range(4))
        # a ends before an edge (there is none before blocks of one), b on it, c after it.
        self.check([(a, max(size - 1, 1)), (b, size), (c, 4 * size + 1)])
        self.check([(a, 1), (b, 1), (c, 1)])
        # A decode onto a block's first slot, a chunk in mid-row, the bucket nearly full.
        self.check([(a, 1), (c, 1), (b, 2 * size + 4), (d, 5 * size + 1)])
        self.check([(b, 1), (a, 1), (d, 1), (c, 4 * size - 2)])

    def compare(self, out: np.ndarray, expected: np.ndarray, what: str) -> None:
        tolerance = TOLERANCE[self.shape.dtype]
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance, err_msg=f"{what}; {self.again}")

    @property
    def again(self) -> str:
        return f"{self.shape}; the same inputs again: --seed {self.seed}"


def alibi_slopes(heads: int) -> np.ndarray:
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


# Windows of the layers by name, for a block size.
WINDOWS = {
    "none": lambda block: (None,),
    "one token": lambda block: (1,),
    "within a block": lambda block: (block // 2 + 1,),
    "a block": lambda block: (block,),
    "blocks": lambda block: (2 * block + 3,),
    "two sizes": lambda block: (3 * block, block // 4),
    "alternating": lambda block: (None, 16),
    "beyond the context": lambda block: (10**6,),
}


@pytest.fixture(scope="module", autouse=True)
def _numbers_to_the_interpreter() -> Iterator[None]:
    """The interpreter of TPU kernels gets NumPy arrays: jax would make device arrays of each argument of each step,
    which the interpreter makes numbers of again, half of its time."""

    def called(*args: np.ndarray, callback: Callable[..., Any], **_: Any) -> list[np.ndarray]:
        return [np.asarray(each) for each in callback(*(np.array(arg) for arg in args))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax._src.callback.io_callback_impl", called)
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh for every test and run, unless one was asked for."""
    asked = request.config.getoption("--seed")
    return int.from_bytes(os.urandom(4)) if asked is None else asked


@pytest.fixture
def harness(seed):
    """Makes a `Harness` of a small model on a subject, or on any other backend."""

    def make(
        subject: str | Backend,
        *,
        heads=4,
        kv_heads=None,
        dim=64,
        block=None,
        dtype="float32",
        pool=None,
        alibi=True,
        windows=(None,),
        soft_cap=None,
        sinks=False,
        max_blocks=16,
        device="",
        parts=1,
        **kw,
    ):
        if block is None:
            block = parts * (SUBJECTS[subject].block_sizes[0] if isinstance(subject, str) else 8)
        if isinstance(windows, str):
            windows = WINDOWS[windows](block)
        shape = AttentionShape(
            num_heads=heads,
            num_kv_heads=kv_heads or heads,
            head_dim=dim,
            block_size=block,
            slot_parts=parts,
            max_blocks=max_blocks,
            dtype=jnp.dtype(dtype),
            pool_dtype=jnp.dtype(pool or dtype),
            alibi=alibi,
            windows=windows,
            soft_cap=soft_cap,
            sinks=sinks,
            device_kind=device,
        )
        served = backend(subject) if isinstance(subject, str) else subject
        assert served.supports(shape) is None
        kw = {"n_blocks": 64, "bucket": 8 * block, "most_chunks": 8, "seed": seed} | kw
        return Harness(served, shape, slopes=alibi_slopes(heads) if alibi else None, **kw)

    return make
