"""What the compilers for A100 and H200 make of whole steps; no device is asked for."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.iteration import SamplerVariant
from jaxserve.models.schema import NarrowFormat
from jaxserve.planning import compiled, hlo, model_catalog, overlap, targets
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.runner import compiler_options
from jaxserve.runner.lowering import StagePrograms
from pallas_kernels.gpu import hopper
from sharding import devices, specs
from sharding.spec import Rules
from tests.aot import test_gpu, triton_kernels

pytestmark = test_gpu.pytestmark


@pytest.mark.parametrize(
    ("name", "device", "bucket", "int8"),
    [
        ("bloom-560m", "a100-80g:1", 8, False),
        ("bloom-560m", "h200:1", 512, False),
        ("bloom-7b1", "a100-80g:1", 32, False),
        ("bloom-7b1", "h200:1", 32, False),
        ("bloom-7b1", "h200:1", 32, True),
        ("gpt2-xl", "h200:1", 32, False),
        ("llama-3-8b", "h200:1", 8, False),
    ],
)
def test_a_whole_step_is_a_dozen_kernels_a_layer(name, device, bucket, int8, tmp_path, tell, hold) -> None:
    """They are launched together, as one command buffer (CUDA graph), Mosaic's kernel for prompts among them.

    Weights and pool in eight bits are widened where they are read: that takes no memory. New keys and values are
    rounded by three kernels more. Llama's gated layers have one product more.
    """
    rows, config = 32, model_catalog.find(name)[1]
    engine = EngineConfig(
        max_rows=rows,
        buckets=(bucket,),
        max_context=1024,
        slots=rows * 1024,
        quantize="int8" if int8 else None,
        kv_cache_dtype="int8" if int8 else "auto",
    )
    deployment = Deployment(
        name=name,
        config=config,
        topology=devices.parse(device),
        engine=engine,
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    assert stage.shape.backend.name == "gpu"
    text, temporaries, seconds = compile_step(stage, bucket, rows * 1024 // stage.shape.attention.block_size, tmp_path)
    (launched,) = tmp_path.glob("*forward.thunk_sequence_after_thunk_passes.txt")
    assert re.findall(r"^\d+: (\w+)", launched.read_text(), re.MULTILINE) == ["kCommandBuffer"]
    n_prompts = config.num_layers if hopper.serves(stage.shape.attention, bucket) else 0
    assert text.count('custom_call_target="mosaic_gpu_v2"') == n_prompts
    entry = text[text.index("\nENTRY ") :]
    n_kernels = len(re.findall(r" (?:fusion|custom-call|copy|transpose|convert|reduce|dot)\(", entry))
    tell(
        "steps for GPUs",
        model=name,
        weights="int8" if int8 else "bfloat16",
        device=device,
        tokens=bucket,
        layers=config.num_layers,
        kernels=n_kernels,
        temporaries=f"{temporaries / 2**20:.1f} MiB",
        seconds=f"{seconds:.0f}",
    )
    most = 16 if int8 else 15 if config.family == "llama" else 13
    assert n_kernels <= most * config.num_layers + 30
    assert " while(" not in entry
    assert temporaries < 64 * 2**20
    figures = {
        "kernels a layer": round(n_kernels / config.num_layers, 1),
        "copies a layer": round(len(re.findall(r" (?:copy|transpose)\(", entry)) / config.num_layers, 1),
        "KiB of temporaries": temporaries // 1024,
    }
    hold(f"{device}, {name} of {bucket} tokens{' in eight bits' if int8 else ''}", figures)


# Two a layer, and those of the look-up in rows of eight bits with scales.
SUMS = {"all-reduce": 2 * 2 + 2}
BY_TOKENS = {"all-gather": 2 * 2 + 2, "reduce-scatter": 2 * 2 + 2, "all-reduce": 1}
BY_EMBED = {"all-gather": 2 * 2 + 1, "reduce-scatter": 2 * 2 + 1, "all-reduce": 2 * 2 + 1}  # of the norms


def compiled_over_four(
    device: str,
    quantize: str,
    bucket: int,
    mesh: str = "tensor=4",
    stored: NarrowFormat | None = None,
    **changes: Any,
) -> jax.stages.Compiled:
    """Two layers of Llama-3-8B.

    Args:
      stored: the format of its checkpoint.
      changes: those of its spec.
    """
    name, config = model_catalog.find("llama-3-8b")
    deployment = Deployment(
        name=name,
        config=replace(config, num_layers=2, stored=stored),
        topology=devices.parse(f"{device}:4"),
        engine=EngineConfig(
            mesh=mesh, quantize=quantize, max_rows=16, buckets=(bucket,), max_context=2048, slots=16 * 2048
        ),
        spec=replace(specs.default(config.family), **changes),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(bucket, 16 * 2048 // stage.shape.attention.block_size)
    return lowered.compile(compiler_options.of("gpu", absent=True))


@pytest.mark.parametrize(
    ("device", "quantize", "kernel", "activations", "collectives"),
    [
        ("a100-80g", "int4", "int4", {}, SUMS),
        ("h200", "int4", "int4", {}, SUMS),
        ("h200", "int4 with zero points", "int4", {}, SUMS),
        ("h200", "int4 with zero points", "int4", {"embed": "tensor"}, BY_EMBED),
        ("a100-80g", "float8", "runs", {}, SUMS),
        ("h200", "int4", "int4", {"tokens": "tensor"}, BY_TOKENS),
        ("h200", "int4", "int4", {"embed": "tensor"}, BY_EMBED),
        ("a100-80g", "float8", "runs", {"tokens": "tensor"}, BY_TOKENS),
    ],
    ids=str,
)
def test_weights_over_several_gpus_stay_narrow(
    device, quantize, kernel, activations, collectives, tmp_path, tell
) -> None:
    """Each device's kernels read its parts. Nothing beside arguments and results has space for a widened one."""
    stored = NarrowFormat(dtype="int4", group=128, zeros=True) if "zero points" in quantize else None
    with triton_kernels.compiled() as made:
        program = compiled_over_four(device, quantize.split()[0], 16, stored=stored, activations=activations)
    text, temporaries = program.as_text() or "", program.memory_analysis().temp_size_in_bytes
    tell(
        "2 layers of llama-3-8b over 4 GPUs",
        device=device,
        weights=quantize,
        hidden_states=f"split by {', '.join(activations)}" if activations else "whole",
        temporaries=f"{temporaries / 2**20:.1f} MiB",
    )
    assert text.count(triton_kernels.TARGET) == 2 * (5 + 3)  # five products, and attention
    assert sum(each.name.startswith(kernel) for each in triton_kernels.assembled(made, tmp_path)) == 4
    assert temporaries < 2**23  # a device's widened part of the largest kernel has 28 MiB
    assert compiled.count_kinds(hlo.collectives(text)) == collectives


@pytest.mark.parametrize("activations", [{}, {"tokens": "tensor"}], ids=str)
def test_prompts_by_weights_over_several_gpus(activations) -> None:
    """Kernels multiply by narrow weights in place of a ring, which would widen them in memory first."""
    text = compiled_over_four("a100-80g", "float8", 2048, activations=activations).as_text() or ""
    assert text.count(triton_kernels.TARGET) == 2 * (5 + 4)
    assert "collective-permute" not in text


def test_gathered_weights_stay_narrow() -> None:
    """int4 values travel as packed half bytes, and no matrix is widened."""
    rules = {**specs.default("llama").rules, "embed": "fsdp"}
    program = compiled_over_four("h200", "int4", 16, mesh="fsdp=2,tensor=2", rules=rules, gather=("fsdp",))
    text = program.as_text() or ""
    large = {
        (opcode, dtype)
        for result, opcode in re.findall(r" = (\(.*?\)|\S+) ([\w-]+)\(", text)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", result)
        if math.prod(map(int, dims.split(","))) >= 2**21 and dims.count(",") < 3  # the pool has four axes
    }
    assert ("all-gather-done", "s8") in large
    assert {dtype for _, dtype in large} == {"s4", "s8", "u8"}
    assert text.count(triton_kernels.TARGET) == 2 * (5 + 3)


def test_samplers_write_no_probabilities(tell) -> None:
    """For 128 rows of 250,880 logits, 122 MiB."""
    name, config = model_catalog.find("bloom-560m")
    deployment = Deployment(
        name=name,
        config=replace(config, num_layers=1),
        topology=devices.parse("h200:1"),
        engine=EngineConfig(max_rows=128, buckets=(128,), max_context=2048, slots=128 * 256),
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    sizes = {}
    for variant in SamplerVariant:
        with targets.lowering(stage.mesh):
            lowered = stage.lower_choose(128, variant)
        program = lowered.compile(compiler_options.of("gpu", absent=True))
        sizes[variant.name] = program.memory_analysis().temp_size_in_bytes / 2**20
    tell("samplers of 250,880 tokens on h200", rows=128, **{name: f"{size:.1f} MiB" for name, size in sizes.items()})
    assert max(sizes["PLAIN"], sizes["TRUNCATED"]) < 8


def exchanges_of_two_layers(bucket: int, activations: Rules) -> list[overlap.Exchange]:
    """The collectives of two layers of Llama-3-70B over eight GPUs, the look-up of tokens included."""
    rows, (name, config) = 64, model_catalog.find("llama-3-70b")
    deployment = Deployment(
        name=name,
        config=replace(config, num_layers=2),
        topology=devices.parse("h200:8"),
        engine=EngineConfig(tensor=8, max_rows=rows, buckets=(bucket,), max_context=2048, slots=rows * 2048),
        spec=replace(specs.default(config.family), activations=activations),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(bucket, rows * 2048 // stage.shape.attention.block_size)
    return list(overlap.exchanges(lowered.compile(compiler_options.of("gpu", absent=True)).as_text() or ""))


def test_parts_of_hidden_states_travel_while_gpus_multiply() -> None:
    found = exchanges_of_two_layers(2048, {"tokens": "tensor"})
    under = {each.under for each in found if each.kind == "collective-permute"}
    assert under == {True}
    hidden, sent = (sum(each.sent for each in found if each.under or everything) for everything in (False, True))
    assert hidden > 0.75 * sent


@pytest.mark.parametrize(("how", "activations"), [("default", {}), ("split by tokens", {"tokens": "tensor"})])
def test_a_step_over_eight_gpus_waits_for_no_more_bytes(how, activations, tell, hold) -> None:
    """What a device sends while it does nothing else."""
    found = exchanges_of_two_layers(256, activations)
    waited = sum(each.sent for each in found if not each.under)
    tell(
        "two layers of llama-3-70b over eight GPUs",
        activations=how,
        collectives=len(found),
        sent=f"{sum(each.sent for each in found) / 2 / 1024:,.0f} KiB a layer",
        waited=f"{waited / 2 / 1024:,.0f} KiB",
    )
    assert found
    hold(
        f"h200:8, llama-3-70b {how}",
        {"collectives": len(found), "KiB a layer of synchronous collectives": round(waited / 2 / 1024)},
    )


def compile_step(stage: StagePrograms, bucket: int, n_blocks: int, dump: Path) -> tuple[str, int, float]:
    """A step's compiled program, its bytes beside arguments and results, and the seconds it took; nothing large is
    copied."""
    options = compiler_options.of("gpu", absent=True) | {"xla_dump_to": str(dump), "xla_dump_emitter_re": ".*"}
    started = time.perf_counter()
    with targets.lowering(stage.mesh):
        lowered, head = stage.lower_forward(bucket, n_blocks), stage.lower_head(stage.shape.points)
    program, head = (each.compile(options) for each in (lowered, head))
    assert not list(compiled.copies(stage, head.as_text() or "", n_blocks))
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    assert not list(compiled.copies(stage, text, n_blocks))
    return text, memory.temp_size_in_bytes, time.perf_counter() - started
