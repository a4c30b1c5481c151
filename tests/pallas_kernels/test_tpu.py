"""The TPU kernels in an interpreter that knows of copies and semaphores: free of races, also between cores; and proof
that the interpreter would tell. The conformance suite runs them where copies come late; tests/aot compiles them."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import api, int8
from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.tpu import TpuBackend, cuts, decodes, head_groups, prompts, writes
from pallas_kernels.tpu.chips import chip
from pallas_kernels.tpu.cuts import Cut
from pallas_kernels.tpu.layout import heads_of_tile, joint_heads, lanes_of

# A copy takes place when it is waited for, or as soon as it starts and under the eye of a detector of races; what
# nobody wrote is NaN.
LATE = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
WATCHED = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True, uninitialized_memory="nan")
RACE = "RACE DETECTED"


def mixed(h) -> bool:
    """Whether iterations of prompts, of decodes and of both are as the oracle has them: rows of one unit and of
    several, chunks that begin and end inside tiles and blocks, an empty iteration."""
    a, b, c = (h.add_row() for _ in range(3))
    long = 3 * h.shape.block_size
    right = True
    for chunks in ([(a, 5), (b, long + 1), (c, 1)], [(a, 1), (b, 1), (c, 7)], [], [(c, 1), (b, 1), (a, 1)]):
        for out, expected in zip(*h.step(chunks), strict=True):
            bound = 2e-2 if h.shape.dtype == jnp.bfloat16 else 2e-5
            right &= bool(np.allclose(out, expected, rtol=bound, atol=bound))
    return right


def small(block: int) -> Cut:
    """Two units of two blocks and small tiles: every loop turns."""
    return Cut(
        units=2, unit_slots=2 * block, tile=32, tile_slots=2 * block, part_rows=16, part_slots=block, joint_parts=2
    )


@pytest.mark.interpret
def test_no_races(harness, capfd):
    """Nor between the two cores of a chip that share the work."""
    block = 8
    backend = TpuBackend(cut=small(block), interpret=replace(WATCHED, num_cores_or_threads=2))
    h = harness(backend, heads=2, dim=64, block=block, bucket=6 * block)
    h.shape = replace(h.shape, device_kind="TPU v4")
    assert chip(h.shape).cores == 2
    assert mixed(h)
    assert RACE not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "sharing", "joint"),
    [
        (6, 2, 64, 2, 2),  # a tile holds the last query head of a KV head and the first of the next
        *(
            pytest.param(*sizes, marks=pytest.mark.interpret)
            for sizes in [
                (4, 1, 64, 2, 1),
                (2, 2, 64, 2, 2),
                (4, 4, 32, 4, 4),
                (8, 4, 32, 4, 2),
                (3, 3, 64, 1, 1),  # one would be left over
                (4, 2, 80, 1, 1),
                (2, 1, 256, 1, 1),
            ]
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.interpret)])
def test_heads_that_share_a_lane_tile(harness, heads, kv_heads, dim, sharing, joint, dtype):
    backend, sizes = TpuBackend(cut=small(16), interpret=LATE), {"block": 16, "bucket": 6 * 16}
    h = harness(backend, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, **sizes)
    assert heads_of_tile(h.shape) == sharing
    assert joint_heads(h.shape) == joint
    assert mixed(h)


def test_lanes_past_the_heads_are_zeros(harness):
    """In the slots that prompts and decodes wrote; nobody wrote the others, which are NaN or very large."""
    h = harness(TpuBackend(cut=small(16), interpret=LATE), heads=2, kv_heads=1, dim=64, block=16, bucket=6 * 16)
    row = h.add_row()
    for length in (20, 1):
        h.check([(row, length)])
    kv = np.asarray(jax.tree.leaves(h.pool)[0])
    written = np.abs(kv[..., :64]).max(-1) < 1e3
    assert written.sum() >= 2 * 21  # and values after the last one, which decodes clear
    np.testing.assert_array_equal(kv[..., 64:][written], 0)


# The second core's rows begin at row 2, 13 or 15: rows 15 and 16 are in one step of it.
@pytest.mark.parametrize(("rows", "interpret"), [(5, LATE), (28, LATE), (32, LATE), (32, WATCHED)])
@pytest.mark.interpret
def test_tokens_and_results_of_decodes_take_several_copies(harness, rows, interpret, capfd):
    """Each row gets its own token and result, also where a core's rows begin inside a copy."""
    backend = TpuBackend(cut=small(8), interpret=replace(interpret, num_cores_or_threads=2))
    h = harness(backend, heads=2, dim=64, block=8, bucket=rows, most_chunks=rows, n_blocks=3 * rows, max_blocks=4)
    h.shape = replace(h.shape, device_kind="TPU v4")
    added = [h.add_row() for _ in range(rows)]
    for lengths in ([1] * rows, [1] * rows):
        h.check(list(zip(added, lengths, strict=True)))
    assert RACE not in capfd.readouterr().out


@pytest.mark.interpret
def test_sums_by_product(harness):
    """Weights are added up by the product with the values, on the device where that costs nothing."""
    block = 16
    backend = TpuBackend(cut=small(block), interpret=LATE)
    sizes = {"heads": 2, "dim": 64, "block": block, "bucket": 6 * block, "windows": (None, 3 * block)}
    h = harness(backend, dtype="bfloat16", device="TPU v6 lite", sinks=True, **sizes)
    assert cuts.sums_by_product(h.shape)
    assert not cuts.sums_by_product(replace(h.shape, pool_dtype=np.dtype("int8")))
    assert not cuts.sums_by_product(replace(h.shape, device_kind="TPU7x"))
    assert mixed(h)


@pytest.mark.interpret
def test_copies_of_scales_are_waited_for(harness, capfd):
    """The interpreter says at a kernel's end if a semaphore counts bytes that nobody waited for."""
    sizes = {"heads": 2, "dim": 64, "block": 32, "bucket": 6 * 32, "pool": "int8"}
    assert mixed(harness(TpuBackend(cut=small(32), interpret=LATE), dtype="bfloat16", **sizes))
    told = "".join(capfd.readouterr())
    assert "non-zero count" not in told


class Unwaited:
    """A copy that nobody waits for."""

    def __init__(self, copy):
        self.start = copy.start

    def wait(self):
        pass


@pytest.mark.parametrize("interpret", [LATE, WATCHED], ids=["late", "watched"])
@pytest.mark.interpret
def test_a_missing_wait_is_caught(harness, monkeypatch, capfd, interpret):
    """The canary: a kernel whose blocks nobody waits for gives NaN where copies come late, and a race where they are
    watched."""
    make, block, dim = pltpu.make_async_copy, 8, 16

    def broken(source, target, sem):
        copy = make(source, target, sem)
        return Unwaited(copy) if len(target.shape) == 3 and target.shape[::2] == (2, 128) else copy

    h = harness(TpuBackend(cut=small(block), interpret=interpret), heads=1, dim=dim, block=block, bucket=4 * block)
    monkeypatch.setattr(pltpu, "make_async_copy", broken)
    right = mixed(h)
    if interpret is LATE:
        assert not right
    else:
        assert RACE in capfd.readouterr().out


def test_tables_that_scalar_memory_cannot_hold_are_refused():
    wide = AttentionShape(
        num_heads=32,
        num_kv_heads=32,
        head_dim=256,
        dtype=np.dtype("float32"),
        pool_dtype=np.dtype("float32"),
        alibi=True,
        max_rows=512,
    )
    backend = TpuBackend()
    shape = wide.with_blocks(backend.default_block_size(wide), 32768)
    assert "block tables of 512 rows x 1024 blocks" in (backend.supports(shape) or "")
    assert backend.supports(replace(shape, max_rows=128)) is None
    assert api.select("auto", shape, "tpu").backend.name == "xla"
    with pytest.raises(ValueError, match="scalar memory holds 960 KiB of them, not 2048"):
        api.select("tpu", shape, "tpu")


@pytest.mark.parametrize(("decodes_only", "kernels"), [(False, ["write", "decodes", "prompts"]), (True, ["decodes"])])
def test_kernels_of_a_program(decodes_only, kernels):
    shape = AttentionShape(
        num_heads=2, num_kv_heads=2, head_dim=128, dtype=np.dtype("float32"), pool_dtype=np.dtype("float32"), alibi=True
    ).with_blocks(16, 64)
    backend = TpuBackend()

    def step(q, pool, batch, slopes):
        meta = backend.prepare(batch, shape, decodes_only=decodes_only)
        return backend.attend(q, q, q, pool, meta, shape, slopes=slopes, scale=0.1)

    batch = AttentionBatch(*(jax.ShapeDtypeStruct(n, jnp.int32) for n in ((5,), (4,), (4, 4), (8,), (8,))))
    q, slopes = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((8, 2, 128), (2,)))
    text = jax.jit(step).trace(q, backend.pool(shape, 8), batch, slopes).lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r'kernel_name = "attention_(\w+)"', text) == kernels


def test_the_heads_of_a_token_are_rounded_as_quantize_does():
    shape = AttentionShape(
        num_heads=5,
        num_kv_heads=5,
        head_dim=80,
        dtype=np.dtype(jnp.bfloat16),
        pool_dtype=np.dtype(np.int8),
        alibi=False,
    )
    heads = np.random.default_rng(0).standard_normal((5, 80)).astype(np.float32)
    heads[1], heads[2, 7], heads[3, 9] = 0, np.nan, -np.inf
    values, scales = head_groups.rounded(jnp.pad(heads.reshape(1, -1), ((0, 0), (0, lanes_of(shape) - 400))), shape)
    expected, expected_scales = int8.quantize(jnp.asarray(heads))
    np.testing.assert_array_equal(scales[:5, 0], expected_scales)
    whole = np.isfinite(expected_scales)
    np.testing.assert_array_equal(np.asarray(values)[0, :400].reshape(5, 80)[whole], expected[whole])


def test_cores_share_the_units_of_decodes():
    """Rows in their order, and none of a prompt; each core is told how many units its rows have."""
    lengths = np.array([300, 900, 64, 65, 100, 7, 40])  # the last but one is a prompt
    queries = np.array([1, 1, 1, 1, 1, 4, 1])
    shape = AttentionShape(
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
        dtype=jnp.dtype("bfloat16"),
        pool_dtype=jnp.dtype("bfloat16"),
        alibi=False,
        device_kind="TPU v4",
    ).with_blocks(16, 1024)
    token_chunk = np.repeat(np.arange(7), queries)
    batch = AttentionBatch(
        query_offsets=jnp.asarray(np.concatenate([[0], queries.cumsum()]), jnp.int32),
        kv_lens=jnp.asarray(lengths, jnp.int32),
        block_tables=jnp.zeros((7, shape.max_blocks), jnp.int32),
        token_chunk=jnp.asarray(token_chunk, jnp.int32),
        positions=jnp.asarray(lengths[token_chunk] - 1, jnp.int32),
    )
    (bounds,) = TpuBackend(cut=small(16)).prepare(batch, shape).decode_bounds
    units = -(-lengths[:5] // 32)
    begin, middle, end, *counts = np.asarray(bounds).tolist()
    assert (begin, end) == (0, 5)
    assert 2 * units[:middle].sum() < units.sum() <= 2 * units[: middle + 1].sum()
    assert counts == [units[:middle].sum(), units[middle:].sum()]


@pytest.mark.parametrize("kernel", [decodes._DecodeKernel, prompts._PromptKernel, writes._WriteKernel])
def test_kernels_can_be_referenced_weakly(kernel):
    """JAX 0.11 does so."""
    assert "__weakref__" in dir(kernel)
