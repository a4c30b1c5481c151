"""What is the GPU backend's own: parts of contexts, lists of tiles, refusals. The rest is in the conformance suite."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.gpu import GpuBackend, cuts, triton_call

SHAPE = AttentionShape(
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    dtype=np.dtype(jnp.bfloat16),
    pool_dtype=np.dtype(jnp.bfloat16),
    alibi=True,
    block_size=32,
    max_blocks=64,
)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.interpret
def test_parts_of_a_context_are_put_together(harness, heads, kv_heads):
    """More parts than some rows have tiles; rows of one tile, of several, and of none."""
    h = harness("gpu", heads=heads, kv_heads=kv_heads, block=16, max_blocks=64, n_blocks=80, most_chunks=4, bucket=4)
    assert cuts.decode_split(4, h.shape) == (4, 8)
    long = harness("gpu", heads=heads, kv_heads=kv_heads, block=16, max_blocks=64, n_blocks=80, bucket=512)
    a, b = long.add_row(), long.add_row()
    long.check([(a, 500)])
    long.check([(b, 3), (a, 400)])
    h.rows, h.pool, h.free = long.rows, long.pool, long.free
    c = h.add_row()
    h.check([(a, 1), (b, 1), (c, 1)])
    h.check([(c, 3), (a, 1)])  # tokens of a chunk that go alone


@pytest.mark.parametrize(
    ("windows", "sinks", "soft_cap", "pool"),
    [((None,), False, None, "float32"), ((None, 300), True, None, "int8"), ((1100,), False, 3.0, "bfloat16")],
)
@pytest.mark.interpret
def test_parts_of_prompts_are_put_together(harness, windows, sinks, soft_cap, pool):
    """Tiles of several queries, of fewer than the longest, and of none, with contexts of many parts and of one."""
    sizes = {"heads": 2, "kv_heads": 1, "block": 64, "max_blocks": 24, "n_blocks": 60, "most_chunks": 4}
    kinds = {"windows": windows, "sinks": sinks, "soft_cap": soft_cap, "pool": pool, "alibi": not sinks}
    h = harness("gpu", bucket=64, **sizes, **kinds)
    assert max(cuts.prompt_split(64, h.shape, window).most_parts for window in windows) >= 2
    long = harness("gpu", bucket=1024, **sizes, **kinds)
    a, b, c = long.add_row(), long.add_row(), long.add_row()
    long.check([(a, 900), (b, 90)])
    long.check([(a, 300)])
    h.rows, h.pool, h.free = long.rows, long.pool, long.free
    h.check([(b, 1), (a, 40), (c, 9)])
    h.check([(a, 33), (c, 1), (b, 2)])


@pytest.mark.interpret
def test_one_query_of_many_heads_fills_a_tile(harness):
    """71 heads to a KV head, as Falcon-7B has: a prompt tile of 128 rows holds one query."""
    sizes = {"block": 16, "max_blocks": 8, "n_blocks": 24, "bucket": 32}
    h = harness("gpu", heads=71, kv_heads=1, dtype="bfloat16", pool="bfloat16", **sizes)
    assert cuts.prompt_tiling(h.shape, 32).rows == 128
    a, b = h.add_row(), h.add_row()
    h.check([(a, 20), (b, 1)])
    h.check([(a, 1), (b, 30)])


prepare = jax.jit(GpuBackend().prepare, static_argnums=1)


def tiles_of(lengths: list[int], kv_lens: list[int], bucket: int) -> list[tuple[int, ...]]:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = AttentionBatch(
        *map(jnp.asarray, (offsets, np.int32(kv_lens), np.zeros((len(lengths), 64), np.int32))),
        jnp.zeros(bucket, jnp.int32),
        jnp.zeros(bucket, jnp.int32),
    )
    items = prepare(batch, SHAPE).prompts
    assert items is not None
    return [tuple(item) for item in items.tolist() if item[1]]


def test_longer_chunks_become_tiles_and_decodes_do_not():
    assert cuts.prompt_tiling(SHAPE, 512).rows == 128
    found = tiles_of([1, 300, 1, 128, 0], [9, 400, 5, 128, 0], 512)
    # First flat token, tokens, position of the last, chunk; the last chunk's first.
    assert found == [(302, 128, 127, 3), (257, 44, 399, 1), (129, 128, 355, 1), (1, 128, 227, 1)]
    assert tiles_of([1, 1, 0], [4, 4, 0], 8) == []


def test_a_full_bucket_holds_all_its_tiles():
    assert len(tiles_of([130] * 3 + [122], [130] * 3 + [122], 512)) == 7
    assert len(tiles_of([2] * 32, [2] * 32, 64)) == 32


def test_a_bucket_of_no_more_tokens_than_rows_has_no_tiles():
    batch = AttentionBatch(*(jnp.zeros(n, jnp.int32) for n in ((9,), (8,), (8, 64), (8,), (8,))))
    assert prepare(batch, SHAPE).prompts is None


def test_refusals():
    for change, words in (
        ({"head_dim": 320}, "head_dim 320; it serves up to 256"),
        ({"num_heads": 160, "num_kv_heads": 1}, "160 query heads of bfloat16 to a KV head; it serves up to 128"),
        ({"num_heads": 96, "num_kv_heads": 1, "dtype": np.dtype(np.float32)}, "it serves up to 64"),
        ({"dtype": np.dtype(np.float16)}, "queries of float16"),
        ({"pool_dtype": np.dtype(np.uint8)}, "pool of uint8"),
        ({"pool_dtype": np.dtype(np.int8), "head_dim": 7}, "head_dim 7 with an int8 pool"),
    ):
        assert words in (GpuBackend().supports(dataclasses.replace(SHAPE, **change)) or "")


def test_what_the_kernels_need_is_told(monkeypatch):
    a100, l4 = (dataclasses.replace(SHAPE, device_kind=f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "L4"))
    assert GpuBackend().supports(l4) == "device 'NVIDIA L4'; it serves A100, H100 and H200"
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert GpuBackend().supports(a100) is None  # for a plan
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "its kernels need jax 0.11" in (GpuBackend().supports(a100) or "")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert GpuBackend().supports(a100) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert GpuBackend().supports(a100) == "no Triton (pip install triton)"


@pytest.mark.parametrize(
    ("lens", "kv_heads"),
    [
        ([128] * 31 + [32768], 8),
        ([128] * 31 + [8192], 8),
        ([128] * 31 + [8192], 32),
        ([128] * 7 + [16384], 8),
        ([64, 200, 500, 900, 1500, 2500, 4000, 7000] * 4, 8),
        ([32768], 8),
        ([2048] * 32, 8),
    ],
)
def test_no_program_waits_for_a_long_row(lens, kv_heads):
    """The tiles of the busiest program of an H200, in parts as the kernel divides them."""
    shape = dataclasses.replace(SHAPE, num_heads=32, num_kv_heads=kv_heads, head_dim=128, block_size=64, max_blocks=512)
    tiling, split = cuts.decode_tiling(shape), cuts.decode_split(len(lens), shape)
    tiles = -(-np.array(lens) // tiling.slots)
    parts = np.minimum(-(-tiles // split.part), split.most_parts)
    work = np.concatenate([np.full(kv_heads * n, -(-t // n)) for t, n in zip(tiles, parts, strict=True)])
    n_programs = triton_call.processors("NVIDIA H200") * tiling.resident
    busiest = max(work[i::n_programs].sum() for i in range(n_programs))
    mean = (tiles * kv_heads).sum() / min(n_programs, len(work))
    assert busiest <= 2 * mean


def test_each_tile_is_computed_by_one_program(harness, monkeypatch):
    """The five programs of the interpreter divide the tiles of two rows and two KV heads."""
    from pallas_kernels.gpu import kernels  # which imports Triton

    computed, step = [], kernels._step
    monkeypatch.setattr(kernels, "_step", lambda i, *rest: computed.append(int(i)) or step(i, *rest))
    sizes = {"block": 16, "max_blocks": 64, "n_blocks": 80, "most_chunks": 2, "bucket": 2}
    h = harness("gpu", heads=2, kv_heads=2, dtype="bfloat16", pool="bfloat16", **sizes)
    assert cuts.decode_tiling(h.shape).resident == 5
    a, b = h.add_row(), h.add_row()
    h.check([(a, 1), (b, 1)])
    assert computed == [0] * 4
