"""The kernel for prompts on Hopper in Mosaic's interpreter, which came with jax 0.11, and its order of work."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.gpu import GpuBackend, hopper

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel takes jax 0.11 (make test-aot-gpu)"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="beside the kernel are Triton's, in its interpreter, which takes TRITON_INTERPRET=1 (make test-aot-gpu)",
    ),
]
H200 = "NVIDIA H200"
SHAPE = AttentionShape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    dtype=np.dtype(jnp.bfloat16),
    pool_dtype=np.dtype(jnp.bfloat16),
    alibi=True,
    block_size=64,
    max_blocks=64,
    device_kind=H200,
)


@pytest.fixture(scope="module", autouse=True)
def _numbers_to_the_interpreter() -> None:
    """Mosaic's interpreter for GPUs takes jax's arrays."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "alibi"),
    [(2, 2, 64, 16, True), (3, 1, 128, 64, False), (2, 1, 64, 128, True)],
)
def test_prompts_beside_decodes(harness, monkeypatch, heads, kv_heads, dim, block, alibi):
    """Fewer programs than items; warpgroups without queries, tiles of one of them only, and tails of NaN."""
    monkeypatch.setattr(hopper, "_PROCESSORS", 3)
    sizes = {"block": block, "max_blocks": 1024 // block, "n_blocks": 4096 // block, "bucket": 512, "most_chunks": 8}
    kinds = {"dtype": "bfloat16", "alibi": alibi, "device": H200}
    h = harness(GpuBackend(interpret=True), heads=heads, kv_heads=kv_heads, dim=dim, **sizes, **kinds)
    assert hopper.serves(h.shape, h.bucket)
    a, b, c, d = (h.add_row() for _ in range(4))
    h.check([(a, 300), (b, 64), (c, 129), (d, 2)])
    h.check([(a, 1), (d, 1), (b, 200), (c, 256)])


def test_warpgroups_have_the_registers_they_ask_for():
    """A kernel of three is launched with 168 registers a thread, a multiple of 8; more would never come free."""
    launched = 65536 // (3 * 128) // 8 * 8
    assert 3 * launched >= hopper._FEW + 2 * hopper._MANY


def test_the_longest_contexts_come_first():
    lengths, kv_lens, bucket = [1, 300, 1, 128, 0], [9, 400, 5, 128, 0], 512
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    numbers = (offsets, np.int32(kv_lens), np.zeros((len(lengths), 64), np.int32))
    batch = AttentionBatch(*map(jnp.asarray, numbers), jnp.zeros(bucket, jnp.int32), jnp.zeros(bucket, jnp.int32))
    items = GpuBackend().prepare(batch, SHAPE).prompts
    assert items is not None
    found = [tuple(item) for item in items.tolist()]
    # First flat token, tokens, position of the last, chunk.
    assert found[:4] == [(257, 44, 399, 1), (129, 128, 355, 1), (1, 128, 227, 1), (302, 128, 127, 3)]
    assert {count for _, count, _, _ in found[4:]} == {0}


@pytest.mark.parametrize(
    "change",
    [
        {"device_kind": "NVIDIA A100-SXM4-80GB"},
        {"head_dim": 96},
        {"dtype": np.dtype(np.float32)},
        {"pool_dtype": np.dtype(np.int8)},
        {"block_size": 24},
        {"windows": (None, 512)},
        {"soft_cap": 30.0},
        {"sinks": True},
    ],
)
def test_other_shapes_stay_with_triton(change):
    assert hopper.serves(SHAPE, 512)
    assert not hopper.serves(SHAPE, 256)
    assert not hopper.serves(dataclasses.replace(SHAPE, **change), 512)
