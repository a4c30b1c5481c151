"""The TPU kernels, and a whole step of BLOOM-176B, compiled for TPUs that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.models.products import Quantized
from jaxserve.planning import compiled, hlo, model_catalog, targets
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.planning.predict import predict
from jaxserve.runner import compiler_options, matmul
from pallas_kernels.api import AttentionBatch, AttentionShape
from pallas_kernels.tpu import BACKEND, cuts
from pallas_kernels.tpu.layout import round_up
from sharding import devices, specs
from tests.aot import bundles

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason=f"libtpu is not installed; pip install 'jax[tpu]=={jax.__version__}' brings it (make test-aot does)",
    ),
]

GENERATIONS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
BLOOM_176B = {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112}
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
# Tokens, rows, context: one of decodes only, a mixed one, one of the most rows and the longest contexts, with prompts.
DECODES, MIXED, LARGE, PROMPTS = (16, 16, 2048), (256, 16, 2048), (512, 512, 32768), (2048, 512, 32768)
# Of which the code is held to ceilings: enough tokens for products of every size.
HELD = (*SHAPES[0], (512, 16, 2048))
CASES = (
    [HELD]
    + [(*shape, MIXED) for shape in SHAPES[1:]]
    + [(*SHAPES[0], DECODES), (*SHAPES[8], LARGE), (*SHAPES[8], PROMPTS)]
)


def compiled_attention(device, shape: AttentionShape, n_tokens: int, rows: int, n_blocks: int):
    place = SingleDeviceSharding(device)

    def like(sizes, dtype=jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    def step(q, k, v, pool, batch, slopes):
        meta = BACKEND.prepare(batch, shape)
        return BACKEND.attend(q, k, v, pool, meta, shape, slopes=slopes, scale=shape.head_dim**-0.5)

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
        for j, generation in enumerate(GENERATIONS)
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
    device = targets.devices_of(devices.parse(GENERATIONS[generation]))[0]
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
    assert memory.temp_size_in_bytes < 14 * new_bytes + 2**20  # queries, keys, values and results, arranged
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


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_step_with_weights_and_pool_in_eight_bits(tell, hold, monkeypatch, topology):
    """They are widened where they are read: in memory there is nothing else."""
    name, config = model_catalog.find("bloom-1b7")
    engine = EngineConfig(tensor=4, buckets=(64,), slots=32768, quantize="int8", kv_cache_dtype="int8")
    deployment = Deployment(
        name=name, config=config, topology=devices.parse(topology), engine=engine, spec=specs.default("bloom")
    )
    plan, texts = predict(deployment), programs_of(monkeypatch)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    held = plan.stages[0].weights + plan.stages[0].pool
    wide = predict(dataclasses.replace(deployment, engine=dataclasses.replace(engine, quantize=None))).stages[0].weights
    tell(
        "bloom-1b7 over 4 devices in eight bits, 64 tokens, compiled without a device",
        devices=topology,
        weights=f"{plan.stages[0].weights / 2**20:.0f} MiB, {wide / 2**20:.0f} in bfloat16",
        total=f"{stage.total / held - 1:+.2%}",
        temporaries=f"{stage.temporaries / 2**20:.1f} MiB",
    )
    assert plan.stages[0].weights < 0.51 * wide
    assert stage.temporaries < 2**26
    assert stage.total <= 1.04 * held
    assert stage.surprises == ()
    hold(f"{topology}, bloom-1b7 in eight bits", figures_of_step(texts[0], config.num_layers))


def programs_of(monkeypatch) -> list[str]:
    """The programs, as text, of what is compiled from now on."""
    texts: list[str] = []
    read = hlo.collectives
    monkeypatch.setattr(hlo, "collectives", lambda text: texts.append(text) or read(text))
    return texts


def figures_of_step(text: str, layers: int) -> dict[str, float]:
    """What a device does in a step beside waiting for memory: operations that it runs, copies, and collectives during
    which it does nothing else. What it fetches ahead, in two operations each and a name for the pieces together, is not
    among the operations."""
    entry = re.sub(r"\n.*ConcatBitcast.*", "", text[text.index("\nENTRY ") :])
    kinds = re.findall(r"^ .* ([a-z][\w-]*)\(", entry, re.MULTILINE)
    waited = "\n".join(line for line in text.splitlines() if "-start(" not in line)
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"}
    free |= {"copy-start", "copy-done", "slice-start", "slice-done"}
    return {
        "operations a layer": round(sum(kind not in free for kind in kinds) / layers, 1),
        "copies a layer": round(sum(kind in ("copy", "transpose") for kind in kinds) / layers, 1),
        "KiB a layer of synchronous collectives": round(
            sum(op.nbytes * op.times for op in hlo.collectives(waited)) / layers / 1024
        ),
    }


@pytest.mark.parametrize(("topology", "quantize"), [("v5e:4x4", None), ("v6e:4x4", None), ("v6e:4x4", "int8")], ids=str)
def test_a_step_of_decodes(tell, hold, topology, quantize):
    """Its own program runs no kernel for prompts, and nothing that arranges what such a kernel reads."""
    deployment = Deployment(
        name="bloom-176b",
        config=models.parse_config(BLOOM_176B | {"n_layer": 8}),
        topology=devices.parse(topology),
        engine=EngineConfig(
            tensor=16,
            dtype="bfloat16",
            quantize=quantize,
            max_rows=16,
            buckets=(16,),
            max_context=2048,
            slots=16 * 2048,
        ),
        spec=specs.default("bloom"),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    assert stage.shape.decode_buckets((16,)) == (16,)
    for decodes_only, kernels in ((False, {"decodes", "prompts", "write"}), (True, {"decodes"})):
        with targets.lowering(stage.mesh):
            lowered = stage.lower_forward(16, 256, decodes_only)
        text = lowered.compile(compiler_options.of("tpu", absent=True)).as_text()
        assert text is not None
        calls = re.findall(r"%attention_(\w+)\.\d+ = .*?\"cost_estimate\":.\"flops\":\"(\d+)\"", text)
        assert {kernel for kernel, _ in calls} == kernels
        assert all((int(flops) > 0) == (kernel != "write") for kernel, flops in calls)
        figures = figures_of_step(text, 8)
        name = ("decodes only" if decodes_only else "any chunks") + (f" in {quantize}" if quantize else "")
        tell("8 layers of BLOOM-176B over 16 devices, 16 tokens of 16 rows", devices=topology, program=name, **figures)
        hold(f"{topology}, 16 tokens of {name}", figures)


@pytest.mark.parametrize(
    ("name", "topology", "pool"),
    [
        ("llama-3-8b", "v5e:2x4", "bfloat16"),
        ("llama-3-8b", "v5e:2x4", "int8"),
        ("llama-3-8b", "v6e:2x4", "bfloat16"),
        ("qwen3-32b", "v6e:2x4", "bfloat16"),
    ],
)
def test_a_step_of_decodes_with_rotated_heads(tell, hold, name, topology, pool):
    """Heads are rotated and laid out for the kernel in a few operations."""
    _, config = model_catalog.find(name)
    sizes = {"max_rows": 16, "buckets": (16,), "max_context": 2048, "slots": 16 * 2048}
    deployment = Deployment(
        name=name,
        config=config,
        topology=devices.parse(topology),
        engine=EngineConfig(tensor=8, dtype="bfloat16", kv_cache_dtype=pool, **sizes),
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(16, 256, True)
    text = lowered.compile(compiler_options.of("tpu", absent=True)).as_text()
    figures = figures_of_step(text or "", config.num_layers)
    tell("whole models over 8 devices, 16 decodes", model=name, devices=topology, pool=pool, **figures)
    assert figures["operations a layer"] < 25
    hold(f"{topology}, 16 decodes of {name} with a pool of {pool}", figures)


@pytest.mark.parametrize(
    "topology", [*(pytest.param(name, marks=pytest.mark.weekly) for name in ("v4:2x2x4", "v5p:2x2x4")), "v6e:4x4"]
)
def test_a_step_of_bloom_176b(tell, hold, monkeypatch, topology):
    """A mixed iteration over 16 devices: two all-reduces a layer and one of the embedding, the logits gathered; nothing
    else moves, and what the program needs beside weights and pool is small."""
    deployment = Deployment(
        name="bloom-176b",
        config=models.parse_config(BLOOM_176B),
        topology=devices.parse(topology),
        engine=EngineConfig(
            tensor=16, dtype="bfloat16", max_rows=16, buckets=(256,), max_context=2048, slots=16 * 2048
        ),
        spec=specs.default("bloom"),
    )
    plan, texts = predict(deployment), programs_of(monkeypatch)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    held = plan.stages[0].weights + plan.stages[0].pool
    tell(
        "BLOOM-176B over 16 devices, 256 tokens of 16 rows, 32,768 slots, compiled without a device",
        devices=topology,
        weights_and_pool=f"{held / 2**30:.2f} GiB",
        total=f"{stage.total / 2**30:.2f} GiB",
        more=f"{stage.total / held - 1:.2%}",
        temporaries=f"{stage.temporaries / 2**20:.1f} MiB",
        **compiled.count_kinds(stage.collectives),
        seconds=f"{stage.seconds:.0f}",
    )
    assert stage.total <= 1.02 * held
    assert stage.temporaries < 256 * 2**20
    assert compiled.count_kinds(stage.collectives) == {"all-reduce": 2 * 70 + 1, "all-gather": 1}
    assert {each.arrays for each in stage.collectives} == {"bf16[256,14336]", "f32[16,15680,16]"}
    assert stage.surprises == ()
    hold(f"{topology}, BLOOM-176B", figures_of_step(texts[0], 70))


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
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
    """What the program has beside its arguments has no space for the wide kernel (of Llama-2-7B)."""
    place = SingleDeviceSharding(targets.devices_of(devices.parse(GENERATIONS[generation]))[0])

    def like(sizes, dtype) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    counts = (outputs,) if group is None else (outputs, inputs // group)
    points = like(counts, jnp.int8) if zeros else None
    matrix = Quantized(like((outputs, inputs), jnp.dtype(held)), like(counts, jnp.bfloat16), points)
    product = partial(matmul.DeviceProducts(native=None), dtype=jnp.bfloat16)
    lowered = jax.jit(product).lower(like((rows, inputs), jnp.bfloat16), matrix)
    memory = lowered.compile(compiler_options.of("tpu", absent=True)).memory_analysis()
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
    # A copy of the narrow one in another order, and of the result, at most; the wide one has twice as many.
    assert memory.temp_size_in_bytes < outputs * inputs
