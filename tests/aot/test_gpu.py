"""What the compilers for A100 and H200 make of attention; no device is asked for."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.planning import targets
from jaxserve.runner import compiler_options
from pallas_kernels import api, gpu
from pallas_kernels.gpu import cuts, hopper
from pallas_kernels.gpu.layout import Context
from sharding import devices, mesh, specs
from tests.aot import triton_kernels

WHEELS = ("jax_cuda12_plugin", "nvidia.cuda_nvcc")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or not all(map(importlib.util.find_spec, WHEELS)),
        reason="jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 are missing (make test-aot-gpu)",
    ),
]
DEVICES = ("a100-80g:1", "h200:1")
LAYERS, BLOCKS = 3, 1031  # a number of blocks that no other dimension has

# Heads, KV heads, head_dim, dtype of queries, of the pool.
MODELS = [
    (1, 1, 64, "bfloat16", "bfloat16"),
    (7, 7, 128, "bfloat16", "int8"),
    (14, 14, 128, "bfloat16", "bfloat16"),
    (16, 16, 64, "bfloat16", "bfloat16"),
    (32, 32, 128, "bfloat16", "bfloat16"),
    (71, 1, 64, "bfloat16", "bfloat16"),
    (32, 1, 128, "bfloat16", "bfloat16"),
    (48, 1, 128, "bfloat16", "int8"),
    (4, 2, 80, "bfloat16", "bfloat16"),
    (6, 2, 96, "bfloat16", "int8"),
    (3, 3, 256, "bfloat16", "bfloat16"),
    (2, 2, 128, "float32", "float32"),
    (2, 1, 256, "float32", "int8"),
    (4, 2, 16, "bfloat16", "int8"),
    (3, 3, 96, "float32", "bfloat16"),
]
# Of these the registers and instructions are held to ceilings, on every device.
HELD = ((32, 32, 128, "bfloat16", "bfloat16"), (7, 7, 128, "bfloat16", "int8"))
DECODE, MIXED = (8, 8), (512, 32)  # tokens, chunks


def on_one(device: str) -> tuple[jax.sharding.Mesh, Callable[..., jax.ShapeDtypeStruct]]:
    """The mesh of one device, and a function that makes abstract arrays there of sizes and a dtype."""
    one = mesh.make_meshes({"tensor": 1}, 1, devices=targets.devices_of(devices.parse(device)))[0][0]
    everywhere = jax.sharding.NamedSharding(one, specs.default("bloom").resolve((), (), one))

    def abstract(sizes: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=everywhere)

    return one, abstract


@pytest.mark.parametrize("size", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("device", "heads", "kv_heads", "dim", "dtype", "pool"),
    # Some on both devices, the others on one of them unless all combinations are asked for.
    [
        pytest.param(device, *model, marks=pytest.mark.weekly if model not in HELD and (i + j) % 2 else ())
        for i, model in enumerate(MODELS)
        for j, device in enumerate(DEVICES)
    ],
)
def test_kernels_fit_and_the_pool_is_never_copied(
    device, heads, kv_heads, dim, dtype, pool, size, tmp_path, monkeypatch, tell, hold
) -> None:
    """Those in Triton; prompts on Hopper have another, which is compiled below."""
    monkeypatch.setattr(hopper, "serves", lambda *_: False)
    bucket, chunks = size
    one, abstract = on_one(device)
    shape = api.AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=jnp.dtype(dtype),
        pool_dtype=jnp.dtype(pool),
        alibi=heads != 7,
        device_kind=one.devices.flat[0].device_kind,
    )
    assert gpu.BACKEND.supports(shape) is None
    shape = shape.with_blocks(gpu.BACKEND.default_block_size(shape), 2048)

    def step(q, k, v, pool, batch):
        meta = gpu.BACKEND.prepare(batch, shape)
        slopes = np.ones(heads, np.float32) if shape.alibi else None
        for layer in range(LAYERS):
            first = layer * BLOCKS
            q, pool = gpu.BACKEND.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=0.1, first_block=first)
        return q, pool

    held = jax.tree.map(lambda leaf: abstract(leaf.shape, leaf.dtype), gpu.BACKEND.pool(shape, LAYERS * BLOCKS))
    batch = api.AttentionBatch(
        *map(abstract, ((chunks + 1,), (chunks,), (chunks, shape.max_blocks), (bucket,), (bucket,)))
    )
    q, k = (abstract((bucket, n, dim), shape.dtype) for n in (heads, kv_heads))
    with triton_kernels.compiled() as made, targets.lowering(one):
        lowered = jax.jit(step, donate_argnums=3).lower(q, k, k, held, batch)
    program = lowered.compile(compiler_options.of("gpu", absent=True))

    memory, leaves = program.memory_analysis(), jax.tree.leaves(held)
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert memory.temp_size_in_bytes < 2**28
    pools = tuple(f"[{','.join(map(str, leaf.shape))}]" for leaf in leaves)
    text = program.as_text()
    makers = {op for shape, op in re.findall(r"= (\S+) ([a-z][\w-]*)\(", text) if shape.endswith(pools)}
    assert makers <= {"parameter", "get-tuple-element", "bitcast", "custom-call"}
    # Prompts, decodes, and their parts combined.
    splits = [cuts.decode_split(chunks, shape), *([cuts.prompt_split(bucket, shape)] if size == MIXED else [])]
    combined = sum(split.most_parts > 1 for split in splits)
    wanted = {"write": 1, "tile": 1 + (size == MIXED), "combine": combined}
    assert text.count(triton_kernels.TARGET) == LAYERS * sum(wanted.values())
    found = triton_kernels.assembled(made, tmp_path)
    assert {kernel.name.partition("_")[0] for kernel in found} == {name for name, count in wanted.items() if count}
    tilings = {"tile_kernel": cuts.decode_tiling(shape), "tile_kernel__1": cuts.prompt_tiling(shape, bucket)}
    for kernel in found:
        resident = kernel.resident(targets._CHIPS[devices.parse(device).device.name].shared)
        tell(
            "kernels for GPUs (shared memory and spilled registers in bytes)",
            device=device,
            heads=f"{heads}/{kv_heads} x {dim}",
            queries=dtype,
            pool=pool,
            tokens=bucket,
            kernel=kernel.name,
            registers=kernel.registers,
            spilled=kernel.spilled,
            reloads=kernel.reloads,
            tile=kernel.tile,
            shared=kernel.shared,
            resident=resident,
            mma=kernel.tensor_cores,
            copies=kernel.copies,
        )
        assert (kernel.tile > 0) == ("tile" in kernel.name)
        assert (kernel.tf32 > 0) == ("tile" in kernel.name and "float32" in (dtype, pool))
        if "tile" in kernel.name:  # a grid is one wave
            assert resident >= tilings[kernel.name].resident
        if dim < 64:  # it only has to compile
            continue
        # Keys and values of later tiles arrive while one is computed.
        assert (kernel.copies > 0) == ("tile" in kernel.name)
        # What a part begins and ends with; in loops over tiles nothing, or 3% where keys are widened from int8.
        assert kernel.spilled <= (0 if "tile" not in kernel.name else 512 if "int8" in pool else 32)
        assert kernel.reloads <= (32 if "int8" in pool else 0)
        assert kernel.byte_loads == 0
    if (heads, kv_heads, dim, dtype, pool) in HELD:
        for kernel in found:
            name = re.sub(r"_kernel", "", kernel.name)
            figures = {"registers": kernel.registers, "bytes spilled": kernel.spilled}
            if kernel.tile:
                figures["instructions a tile"] = kernel.tile
            hold(f"{device}, {name} of {bucket} tokens{' in int8' * (pool == 'int8')}", figures)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "alibi"),
    [(32, 32, 128, 64, True), (32, 8, 128, 32, False), (16, 16, 64, 64, True), (7, 1, 128, 128, False)],
)
def test_prompts_have_a_kernel_for_hopper(heads, kv_heads, dim, block, alibi, capfd, monkeypatch, tell) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    bucket, chunks = MIXED
    shape = api.AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=np.dtype(jnp.bfloat16),
        pool_dtype=np.dtype(jnp.bfloat16),
        alibi=alibi,
        device_kind="NVIDIA H200",
    ).with_blocks(block, 2048)
    one, abstract = on_one("h200:1")

    def prompts(q, pool, tables, first_block, items, out):
        context = Context(pool, tables, first_block, jnp.ones(heads) if alibi else None, None)
        return hopper.attend(q, context, items, out, shape, 0.1, interpret=False)

    pool = jax.tree.map(lambda leaf: abstract(leaf.shape, leaf.dtype), gpu.BACKEND.pool(shape, BLOCKS))
    q = abstract((bucket, heads, dim), shape.dtype)
    numbers = map(abstract, ((chunks, shape.max_blocks), (1,), (bucket // hopper.QUERIES + chunks, 4)))
    with targets.lowering(one):
        lowered = jax.jit(prompts, donate_argnums=5).lower(q, pool, *numbers, q)
    program = lowered.compile(compiler_options.of("gpu", absent=True))
    said = capfd.readouterr()
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", said.out + said.err)))
    tell(
        "the kernel for prompts on Hopper (spilled registers in bytes)",
        heads=f"{heads}/{kv_heads} x {dim}",
        alibi=alibi,
        blocks=block,
        spilled=spilled,
    )
    assert spilled <= 16
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == q.size * q.dtype.itemsize
    assert memory.temp_size_in_bytes < 1024
