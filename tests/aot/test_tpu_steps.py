"""Whole steps of models, compiled for TPUs that are not there."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.iteration import SamplerVariant
from jaxserve.models import schema
from jaxserve.planning import compiled, hlo, model_catalog, targets
from jaxserve.planning.deployment import Deployment, programs
from jaxserve.planning.predict import predict
from jaxserve.runner import compiler_options
from sharding import devices, specs
from tests.aot import tpus

pytestmark = tpus.MARKS

BLOOM_176B = {"model_type": "bloom", "vocab_size": 250880, "hidden_size": 14336, "n_layer": 70, "n_head": 112}


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
    among the operations. A collective that the sparse cores of a TPU7x run is one, as on other TPUs: before its result
    is waited for, two operations prepare it and one starts it."""
    entry = re.sub(r"\n.*(ConcatBitcast| %prepare_(start|done)_).*", "", text[text.index("\nENTRY ") :])
    kinds = re.findall(r"^ .* ([a-z][\w-]*)\(", entry, re.MULTILINE)
    waited = "\n".join(line for line in text.splitlines() if "-start(" not in line)
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"}
    free |= {"copy-start", "copy-done", "slice-start", "slice-done", "call-start"}
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
    ("name", "topology", "tokens", "kept"),
    [
        ("bloom-560m", "v6e:1x1", 1, {}),
        ("bloom-560m", "v6e:1x1", 16, {}),
        ("bloom-560m", "v6e:1x1", 256, {}),
        ("llama-3-8b", "v5e:2x4", 16, {}),
        ("llama-3-8b", "v5e:2x4", 16, {"kv_cache_dtype": "int8"}),
        ("llama-3-8b", "v6e:2x4", 1, {}),
        ("llama-3-8b", "v6e:2x4", 16, {}),
        ("llama-3-8b", "v6e:2x4", 256, {}),
        ("llama-3-8b", "v6e:2x4", 256, {"kv_cache_dtype": "int8"}),
        ("qwen3-32b", "v6e:2x4", 16, {}),
        ("qwen3-32b", "v6e:2x4", 256, {}),
        ("gemma-2-9b", "v6e:2x4", 16, {}),
        ("gemma-2-9b", "v6e:2x4", 256, {}),
        ("mixtral-8x7b", "v6e:2x4", 16, {}),
        ("mixtral-8x7b", "v6e:2x4", 16, {"quantize": "int8"}),
        ("mixtral-8x7b", "v5e:2x4", 256, {}),
        ("mixtral-8x7b", "v6e:2x4", 256, {}),
        ("gpt-oss-20b", "v6e:2x4", 8, {}),
        ("gpt-oss-20b", "v6e:2x4", 16, {}),
        ("mixtral-8x7b", "v6e:2x4", 1024, {}),
        ("mixtral-8x7b", "v6e:2x4", 1024, {"quantize": "int8"}),
        ("mixtral-8x7b", "tpu7x:2x2x1", 1024, {}),
        ("gpt-oss-20b", "v6e:2x4", 256, {}),
        ("gpt-oss-20b", "v6e:2x4", 1024, {}),
        ("gpt-oss-20b", "v5e:2x2", 1024, {}),
        ("gpt-oss-20b", "tpu7x:2x2x1", 256, {}),
        ("gpt-oss-20b", "tpu7x:2x2x1", 1024, {}),
        ("gpt-oss-120b", "v6e:2x4", 16, {}),
        ("qwen3-30b-a3b", "v6e:2x2", 16, {}),
        ("qwen3-30b-a3b", "v6e:2x2", 1024, {}),
        ("qwen3-30b-a3b", "tpu7x:2x1x1", 1024, {}),
    ],
)
def test_steps_of_published_models(tell, hold, name, topology, tokens, kept):
    """Decodes of up to 16 rows, or a mixed iteration of more tokens."""
    _, config = model_catalog.find(name)
    sizes = {"max_rows": 16, "buckets": (tokens,), "max_context": 2048, "slots": 16 * 2048}
    parsed = devices.parse(topology)
    deployment = Deployment(
        name=name,
        config=config,
        topology=parsed,
        engine=EngineConfig(tensor=parsed.num_devices, dtype="bfloat16", **sizes, **kept),
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(tokens, 256, tokens <= 16)
    text = lowered.compile(compiler_options.of("tpu", absent=True)).as_text()
    figures = figures_of_step(text or "", config.num_layers)
    held = ", ".join(kept.values()) or "bfloat16"
    tell("whole models, 16 rows", model=name, devices=topology, tokens=tokens, held=held, **figures)
    assert figures["operations a layer"] < 25
    told = "".join(f", {key} {value}" for key, value in kept.items())
    hold(f"{topology}, {tokens} tokens of {name}{told}", figures)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", [16, 256])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x4", "v6e:1x1", "v6e:2x4", "tpu7x:2x2x1"])
def test_int4_weights_are_read_as_they_lie(tell, topology, tokens, zeros):
    """No step copies them, or makes an array as large as one of their matrices, on the chip either."""
    name, config = model_catalog.find("llama-3-8b")
    parsed, sizes = devices.parse(topology), {"max_rows": 16, "max_context": 2048, "slots": 16 * 2048}
    stored = schema.NarrowFormat(dtype="int4", group=128, zeros=True) if zeros else None
    deployment = Deployment(
        name=name,
        config=dataclasses.replace(config, num_layers=2, stored=stored),
        topology=parsed,
        engine=EngineConfig(tensor=parsed.num_devices, dtype="bfloat16", quantize="int4", buckets=(tokens,), **sizes),
        spec=specs.default(config.family),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    with targets.lowering(stage.mesh):
        lowered = stage.lower_forward(tokens, 256)
    program = lowered.compile(compiler_options.of("tpu", absent=True))
    text, temporaries = program.as_text() or "", program.memory_analysis().temp_size_in_bytes
    cycles = sum(map(int, re.findall(r'estimated_cycles":"(\d+)', text.split("ENTRY")[1])))
    tell(
        "2 layers of llama-3-8b in int4",
        devices=topology,
        zero_points=zeros,
        tokens=tokens,
        temporaries=f"{temporaries / 2**20:.1f} MiB",
        estimated_cycles=f"{cycles:,}",
    )
    least = 4096 * 4096 // parsed.num_devices
    assert not [each for each in tpus.large_arrays(text, least) if not each[1].startswith("bf16[512,2,128")]


@pytest.mark.parametrize(("topology", "rows"), [("v5e:1x1", 8), ("v6e:1x1", 128)])
def test_samplers_read_logits_as_they_lie(tell, topology, rows):
    """No program for whole rows of tiles copies them, or writes anything of their size."""
    deployment = Deployment(
        name="bloom-560m",
        config=models.parse_config(BLOOM_176B | {"n_layer": 1, "hidden_size": 1024, "n_head": 16}),
        topology=devices.parse(topology),
        engine=EngineConfig(dtype="bfloat16", max_rows=rows, buckets=(rows,), max_context=2048, slots=rows * 256),
        spec=specs.default("bloom"),
    )
    (stage,) = programs(deployment, targets.devices_of(deployment.topology))
    logits, temporaries = 4 * rows * 250880, {}
    for variant in (SamplerVariant.PLAIN, SamplerVariant.TRUNCATED):
        with targets.lowering(stage.mesh):
            lowered = stage.lower_choose(rows, variant)
        program = lowered.compile(compiler_options.of("tpu", absent=True))
        copies = re.findall(r" = f32\[([\d,]+)\]\S* (?:copy|transpose)\(", program.as_text() or "")
        assert not [each for each in copies if 4 * math.prod(map(int, each.split(","))) >= logits]
        temporaries[variant.name] = program.memory_analysis().temp_size_in_bytes
    assert temporaries["PLAIN"] < 2**20
    assert temporaries["TRUNCATED"] < 2**23
    sizes = {name: f"{size / 2**20:.1f} MiB" for name, size in {"logits": logits, **temporaries}.items()}
    tell("samplers of 250,880 tokens", devices=topology, rows=rows, **sizes)


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
