"""The TPU kernels, compiled for TPUs that are not there."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.device.tpu_tune import shape_of
from jaxserve.models.products import Quantized
from jaxserve.planning import targets
from jaxserve.runner import compiler_options, matmul
from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.tpu import BACKEND, TpuBackend, cuts
from pallas_kernels.tpu.layout import round_up
from sharding import devices
from tests.aot import bundles, tpus

pytestmark = tpus.MARKS

# heads, KV heads, head_dim, queries, pool
SHAPES = [
    (7, 7, 128, "bfloat16", "bfloat16"),
    (7, 7, 128, "bfloat16", "int8"),
    (14, 14, 128, "bfloat16", "bfloat16"),
    (14, 14, 64, "float32", "float32"),
    (16, 16, 64, "bfloat16", "int8"),
    (32, 32, 80, "bfloat16", "bfloat16"),
    (16, 16, 96, "float32", "int8"),
    (32, 32, 96, "float32", "bfloat16"),
    (32, 32, 128, "bfloat16", "bfloat16"),
    (1, 1, 256, "bfloat16", "bfloat16"),
    (32, 32, 256, "float32", "float32"),
    (16, 1, 64, "bfloat16", "bfloat16"),
    (32, 8, 128, "bfloat16", "int8"),
]
# Tokens, rows, context: buckets of one token and of decodes, a mixed one, the most rows and longest contexts, prompts.
ONE, DECODES, MIXED, LARGE = (1, 16, 2048), (16, 16, 2048), (256, 16, 2048), (512, 512, 32768)
PROMPTS = (2048, 512, 32768)
# Of which the code is held to ceilings: enough tokens for products of every size.
HELD = (*SHAPES[0], (512, 16, 2048))
CASES = (
    [HELD]
    + [(*shape, MIXED) for shape in SHAPES[1:]]
    + [(*SHAPES[0], DECODES), (*SHAPES[8], LARGE), (*SHAPES[8], PROMPTS), (*SHAPES[0], ONE), (*SHAPES[11], ONE)]
)


def compiled_attention(
    device, shape: AttentionShape, n_tokens: int, rows: int, n_blocks: int, backend: TpuBackend = BACKEND
):
    place = SingleDeviceSharding(device)

    def like(sizes, dtype=jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    def step(q, k, v, pool, batch, slopes):
        meta = backend.prepare(batch, shape)
        return backend.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=shape.head_dim**-0.5)

    q = like((n_tokens, shape.num_heads, shape.head_dim), shape.dtype)
    k = like((n_tokens, shape.num_kv_heads, shape.head_dim), shape.dtype)
    pool = jax.tree.map(lambda leaf: like(leaf.shape, leaf.dtype), BACKEND.pool(shape, n_blocks))
    batch = AttentionBatch(
        *map(like, ((rows + 1,), (rows,), (rows, shape.max_blocks), (n_tokens,), (n_tokens,))),
    )
    slopes = like((shape.num_heads,), jnp.float32) if shape.alibi else None
    return jax.jit(step, donate_argnums=3).lower(q, k, k, pool, batch, slopes).compile()


@pytest.mark.parametrize(
    ("generation", "heads", "kv_heads", "dim", "dtype", "pool", "bucket"),
    # BLOOM-176B's on every generation, the others on every third one unless all combinations are asked for. The largest
    # take minutes on some.
    [
        pytest.param(
            generation,
            *case,
            marks=pytest.mark.weekly
            if i and ((i + j) % 3 or case[-1] == PROMPTS or (case[-1] == LARGE and generation in ("v4", "v5e")))
            else (),
        )
        for i, case in enumerate(CASES)
        for j, generation in enumerate(tpus.GENERATIONS)
    ],
)
def test_the_kernels_compile(tell, hold, code, generation, heads, kv_heads, dim, dtype, pool, bucket):
    n_tokens, rows, context = bucket
    shape = AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=jnp.dtype(dtype),
        pool_dtype=jnp.dtype(pool),
        alibi=heads % 2 == 1 or dim == 64,
    )
    device = targets.devices_of(devices.parse(tpus.GENERATIONS[generation]))[0]
    shape = dataclasses.replace(shape, max_rows=rows, device_kind=device.device_kind)
    shape = shape.with_blocks(BACKEND.default_block_size(shape), context)
    assert BACKEND.supports(shape) is None
    n_blocks = 64
    started = time.perf_counter()
    program = compiled_attention(device, shape, n_tokens, rows, n_blocks)
    seconds = time.perf_counter() - started
    memory = program.memory_analysis()
    assert memory is not None
    leaves = jax.tree.leaves(BACKEND.pool(shape, n_blocks))
    pool_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    new_bytes = n_tokens * shape.num_heads * round_up(dim, 128) * 4
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < 15 * new_bytes + 2**20  # queries, keys, values and results, arranged
    tell(
        "attention kernels, compiled without a device",
        device=generation,
        heads=heads if heads == kv_heads else f"{heads}/{kv_heads}",
        head_dim=dim,
        queries=dtype,
        pool=pool,
        tokens=n_tokens,
        rows=rows,
        block=shape.block_size,
        temporaries=f"{memory.temp_size_in_bytes / 2**20:.2f} MiB",
        seconds=f"{seconds:.1f}",
    )
    if (heads, kv_heads, dim, dtype, pool, bucket) == HELD:
        decodes, prompts = code_of_decodes(code, shape, n_tokens), code_of_prompts(code, shape, n_tokens)
        for kernel, figures in {"decodes": decodes, "prompts": prompts}.items():
            tell(f"code of the kernel of {kernel}; a bundle is a cycle", device=generation, **figures)
            hold(f"{generation}, kernel of {kernel}", figures)


@pytest.mark.parametrize("key", cuts.TABLE, ids=lambda key: "-".join(map(str, key)).replace(" ", "-"))
def test_sizes_of_the_table_compile(key):
    device = targets.devices_of(devices.parse(tpus.GENERATIONS[key.chip]))[0]
    heads = key.lanes // key.head_dim
    shape = shape_of(heads * key.group, heads, key.head_dim, key.pool_dtype, device.device_kind)
    shape = dataclasses.replace(shape, max_rows=512).with_blocks(shape.block_size, 32768)
    assert cuts.key(shape) == key
    compiled_attention(device, shape, 2048, 512, 64)


def code_of_decodes(code: Path, shape: AttentionShape, n_tokens: int) -> dict[str, float]:
    """Bundles of the decode kernel for a MiB of keys and values, with every branch of a step."""
    cut = cuts.cut(shape, n_tokens)
    mib = cut.units * cut.unit_slots * cuts.slot_bytes(shape) / 2**20
    loop = [block for block in bundles.blocks(code, "attention_decodes") if block.depth]
    return {
        "bundles a MiB": round(sum(block.bundles for block in loop) / mib),
        "spills": sum(block.spills for block in loop),
    }


def code_of_prompts(code: Path, shape: AttentionShape, n_tokens: int) -> dict[str, float]:
    """Bundles of the prompt kernel's products: one part without a mask, one with it, and joint parts, which serve
    nearly all of a long prompt."""
    cut = cuts.cut(shape, n_tokens)
    part = cuts.part_of_tile(shape, cut)
    mflop = 4 * part.rows * part.slots * shape.head_dim / 1e6
    products = [block for block in bundles.blocks(code, "attention_prompts") if block.products]
    alone, masked, joint = sorted(products, key=lambda block: block.bundles)
    return {
        "bundles a MFLOP": round(joint.bundles / cut.joint_parts / mflop, 2),
        "bundles a MFLOP, one part": round(alone.bundles / mflop, 2),
        "bundles a MFLOP, masked": round(masked.bundles / mflop, 2),
        "spills": joint.spills,
    }


@pytest.mark.parametrize("generation", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("rows", [8, 256])
@pytest.mark.parametrize(
    ("held", "outputs", "inputs", "group", "zeros"),
    [
        ("int4", 11008, 4096, 32, False),
        ("int4", 4096, 11008, 128, True),
        ("float8_e4m3fn", 11008, 4096, None, False),
    ],
)
def test_narrow_kernels_are_widened_inside_the_product(generation, rows, held, outputs, inputs, group, zeros, tell):
    """The program makes no array as large as the kernel (of Llama-2-7B), not even in the chip's memory."""
    place = SingleDeviceSharding(targets.devices_of(devices.parse(tpus.GENERATIONS[generation]))[0])

    def like(sizes, dtype) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    counts = (outputs,) if group is None else (outputs, inputs // group)
    points = like(counts, jnp.int8) if zeros else None
    matrix = Quantized(like((outputs, inputs), jnp.dtype(held)), like(counts, jnp.bfloat16), points)
    product = partial(matmul.DeviceProducts(native=None), dtype=jnp.bfloat16)
    lowered = jax.jit(product).lower(like((rows, inputs), jnp.bfloat16), matrix)
    program = lowered.compile(compiler_options.of("tpu", absent=True))
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes < (0.65 if held == "int4" else 1.01) * outputs * inputs + 2**23
    tell(
        "products with narrow kernels for TPUs",
        device=generation,
        rows=rows,
        kernel=f"{held} {outputs} x {inputs}",
        group=group,
        zeros=zeros,
        temporaries=f"{memory.temp_size_in_bytes / 2**20:.1f} MiB",
    )
    assert memory.temp_size_in_bytes < 2**25  # the result in another order, and ones
    assert not tpus.large_arrays(program.as_text() or "", outputs * inputs)
