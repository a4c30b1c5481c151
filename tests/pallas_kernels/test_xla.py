"""What the compiled program of the plain-JAX backend does with the pool: nothing but the writes asked for."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api
from pallas_kernels.xla import attention

MANY_BLOCKS = 2048  # their scales alone take more than what a step needs beside the pool
LAYERS, BLOCKS, BLOCK, WINDOW = 3, 96, 16, 37  # blocks of the window: a number no other dimension has
BACKEND = api.load("xla")


def step_arguments(pool_dtype, *, n_blocks=BLOCKS, max_blocks=WINDOW, bucket=24, n_chunks=8):
    """A step of three layers, and abstract arguments (queries, pools, batch)."""
    shape = api.AttentionShape(
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        dtype=jnp.dtype("float32" if pool_dtype == "int8" else pool_dtype),
        pool_dtype=jnp.dtype(pool_dtype),
        alibi=True,
        block_size=BLOCK,
        max_blocks=max_blocks,
    )
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)

    def step(x, pools, batch):
        meta = BACKEND.prepare(batch, shape)
        written = []
        for pool in pools:
            x, pool = BACKEND.attend(x, x * 2, x + 1, pool, meta, shape, slopes=slopes, scale=0.2)
            written.append(pool)
        return x, written

    def int32(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    batch = api.AttentionBatch(
        int32(n_chunks + 1), int32(n_chunks), int32(n_chunks, max_blocks), int32(bucket), int32(bucket)
    )
    x = jax.ShapeDtypeStruct((bucket, 4, 32), shape.dtype)
    return step, x, [BACKEND.pool(shape, n_blocks) for _ in range(LAYERS)], batch


def compiled(pool_dtype, **kw):
    step, *arguments = step_arguments(pool_dtype, **kw)
    return jax.jit(step, donate_argnums=1).lower(*arguments).compile(), arguments[1]


def opcodes(program) -> Counter:
    """How often each instruction occurs, by opcode and by the shape it makes with the number of blocks left out."""
    lines = re.findall(r"= (\S+) ([a-z][\w-]*)\(", program.as_text())
    return Counter((re.sub(r"\[\d+,4,", "[blocks,4,", shape), opcode) for shape, opcode in lines)


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("pool_dtype", ["int8", "float32", "bfloat16"])
def test_a_donated_pool_is_never_copied(pool_dtype):
    program, pools = compiled(pool_dtype, n_blocks=MANY_BLOCKS)
    leaves = jax.tree.leaves(pools)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes)
    dims = [f"[{','.join(map(str, leaf.shape))}]" for leaf in leaves]
    made = {
        op for shape, op in re.findall(r"= (\S+) ([a-z][\w-]*)\(", program.as_text()) if any(d in shape for d in dims)
    }
    # Fusions of this shape are updates in place: the bound on temporaries allows nothing else.
    assert made <= {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "dynamic-update-slice", "fusion"}


def test_an_int8_pool_takes_a_quarter_of_float32_and_its_scales():
    (bytes_of_one,), (of_float32,) = (
        {sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)) for pool in step_arguments(dtype)[2]}
        for dtype in ("int8", "float32")
    )
    assert bytes_of_one == of_float32 // 4 + 2 * 4 * BLOCKS * 4 * BLOCK  # keys' and values' scales, one a slot and head


@pytest.mark.parametrize("pool_dtype", ["float32", "int8"])
def test_a_donated_pool_stays_where_it_is(pool_dtype):
    step, x, pools, batch = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
        step_arguments(pool_dtype),
    )
    batch = batch._replace(query_offsets=jnp.minimum(jnp.arange(9) ** 2, 24), kv_lens=jnp.full(8, 100, jnp.int32))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)]
    _, pools = jax.jit(step, donate_argnums=1)(x, pools, batch)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)] == before


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("pool_dtype", ["float32", "int8"])
def test_cost_does_not_depend_on_the_size_of_the_pool(pool_dtype):
    small, _ = compiled(pool_dtype)
    large, _ = compiled(pool_dtype, n_blocks=50 * BLOCKS)
    assert opcodes(small) == opcodes(large)
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("pool_dtype", ["float32", "int8"])
def test_no_value_is_as_long_as_the_window(pool_dtype):
    """Keys, scores and the like are made block by block; the window occurs in tables only."""
    program, _ = compiled(pool_dtype)
    floats = set(re.findall(r"(?:f32|bf16|f16|u16|s8)\[([\d,]+)\]", program.as_text()))
    assert not [dims for dims in floats if {WINDOW, WINDOW * BLOCK} & set(map(int, dims.split(",")))]


@pytest.mark.usefixtures("optimized")
def test_a_bucket_of_one_token_holds_no_prompt_loop():
    one, _ = compiled("float32", bucket=1, n_chunks=1)
    two, _ = compiled("float32", bucket=2, n_chunks=1)
    assert " dot(" not in one.as_text()
    assert len(one.as_text()) < 0.8 * len(two.as_text())


def test_cost_follows_the_window(harness, monkeypatch):
    """The loops count their steps as they run: a row of 400 tokens takes no more than its window does."""
    steps = []

    def counted(window, chunks):
        h = harness("xla", heads=1, dim=8, windows=(window,), max_blocks=64, n_blocks=80, bucket=512)
        rows = {"long": h.add_row(), "short": h.add_row()}
        h.step([(rows["long"], 400), (rows["short"], 20)])
        jax.effects_barrier()
        steps.clear()
        h.check([(rows[name], length) for name, length in chunks])
        jax.effects_barrier()
        return len(steps)

    def capped(scores, shape):
        jax.debug.callback(lambda: steps.append(1))
        return scores

    monkeypatch.setattr(attention, "_soft_capped", capped)
    for chunks in ([("long", 1), ("short", 1)], [("long", 10)]):
        assert counted(None, chunks) >= 4
        assert counted(8, chunks) == 1


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "int8"])
def test_the_same_code_lowers_for_every_platform(pool_dtype):
    step, *arguments = step_arguments(pool_dtype)
    platforms = ("cpu", "cuda", "tpu")
    assert jax.export.export(jax.jit(step, donate_argnums=1), platforms=platforms)(*arguments).platforms == platforms


@pytest.mark.parametrize(("dim", "pool"), [(5, "float32"), (8, "int8"), (20, "bfloat16")])
def test_serves_heads_of_any_size(harness, dim, pool):
    h = harness("xla", dim=dim, pool=pool)
    a, b = h.add_row(), h.add_row()
    h.check([(a, 9), (b, 12)])
    h.check([(a, 1), (b, 5)])
