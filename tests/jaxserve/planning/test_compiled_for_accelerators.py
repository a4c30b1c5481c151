"""Predictions against what the compilers for TPUs and GPUs make of the engine's own programs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from jaxserve.planning import compiled, targets
from jaxserve.planning.predict import predict
from sharding import specs
from tests.jaxserve.planning.questions import (
    BLOOM,
    BY_CONTEXT,
    BY_EMBED,
    FALCON,
    LLAMA,
    MIXTRAL,
    named,
    payloads,
    question,
)

TPU = importlib.util.find_spec("libtpu") is not None
GPU = importlib.util.find_spec("jax_cuda12_plugin") is not None
TPUS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
tpu = pytest.mark.skipif(
    not TPU, reason="libtpu is not installed; pip install 'jax[tpu]' of this jax's version brings it"
)
gpu = pytest.mark.skipif(not GPU, reason="no CUDA wheels are installed; pip install 'jax[cuda12]' brings them")


@pytest.mark.usefixtures("optimized")
@pytest.mark.aot
@pytest.mark.parametrize(
    "topology",
    [pytest.param(name, marks=tpu) for name in ("v5e:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")]
    + [pytest.param(name, marks=gpu) for name in ("a100-40g:4", "a100-80g:2x4", "h100:4", "h200:8")],
)
def test_collectives_are_those_of_accelerators(topology):
    sizes = {"slots": 2**17, "dtype": "bfloat16", "attention": "auto"}
    deployment = question(BLOOM | {"hidden_size": 1024}, topology=topology, tensor=4, **sizes)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)
    assert not stage.surprises


@pytest.mark.usefixtures("optimized")
@pytest.mark.aot
@tpu
@pytest.mark.parametrize("family", [LLAMA, BLOOM], ids=["llama", "bloom"])
@pytest.mark.parametrize(
    "topology",
    [pytest.param(each, marks=() if each[:3] == "v6e" else pytest.mark.weekly) for each in TPUS],
)
def test_exchanges_of_split_tokens_are_those_of_tpus(topology, family):
    """With buckets so large that all-reduces could be scattered, and gathers go around rings."""
    spec = replace(specs.default(family["model_type"]), **BY_CONTEXT)
    sizes = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "mesh": "context=2,tensor=2", "buckets": (512,)}
    wide = {"hidden_size": 1024, "intermediate_size": 4096}
    deployment = question(family | wide, spec, topology, **sizes)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)
    assert payloads(deployment, plan.stages[0].load.collectives) == payloads(deployment, stage.collectives)


@pytest.mark.usefixtures("optimized")
@pytest.mark.aot
@tpu
@pytest.mark.parametrize("family", [LLAMA, BLOOM], ids=["llama", "bloom"])
@pytest.mark.parametrize(
    "topology", [pytest.param(each, marks=() if each[:3] == "v6e" else pytest.mark.weekly) for each in TPUS]
)
def test_parts_travel_around_a_ring_while_tpus_multiply(topology, family):
    spec = replace(specs.default(family["model_type"]), **BY_EMBED)
    sizes = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "tensor": 4, "buckets": (512,)}
    wide = {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32, "n_head": 32}
    deployment = question(family | wide, spec, topology, **sizes)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)
    assert payloads(deployment, plan.stages[0].load.collectives) == payloads(deployment, stage.collectives)
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)
    # Layers, products, steps, parts. Compilers put one exchange of each Llama layer before a product, not beside it.
    assert stage.sent_under_compute >= 2 * (4 * 3 - (family is LLAMA)) * (512 * 4096 * 2 // 4)


BY_HEAD = {"parameters": {"layers.*.out.kernel": {"heads": ("tensor", "attn")}}}
BY_TOKEN = {"activations": {"tokens": "attn"}}


@pytest.mark.usefixtures("optimized")
@pytest.mark.aot
@tpu
@pytest.mark.parametrize(
    ("heads", "part", "changed", "bucket"),
    [
        (64, "rows", BY_HEAD, 32),  # 8 heads for each device
        pytest.param(96, "slots", BY_HEAD, 32, marks=pytest.mark.weekly),
        pytest.param(8, "slots", BY_HEAD, 8, marks=pytest.mark.weekly),  # one tile for each device, in an all-reduce
        (8, "rows", BY_TOKEN, 32),  # 4 heads of 8 tokens for each device
        pytest.param(8, "rows", BY_TOKEN, 256, marks=pytest.mark.weekly),
        pytest.param(32, "slots", BY_TOKEN, 256, marks=pytest.mark.weekly),
        pytest.param(32, "rows", BY_TOKEN, 20, marks=pytest.mark.weekly),
        pytest.param(32, "rows", BY_TOKEN, 16, marks=pytest.mark.weekly),  # 4 tokens each, in an all-reduce
    ],
)
def test_what_parts_of_a_pool_give_is_scattered_as_by_tpus(heads, part, changed, bucket):
    base = specs.default("llama")
    spec = replace(base, rules=dict.fromkeys(base.rules) | {"heads": "tensor"}, pool={part: "attn"}, **changed)
    sizes = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "mesh": "attn=4,tensor=2", "buckets": (bucket,)}
    entries = LLAMA | {"hidden_size": 1024, "num_attention_heads": heads, "head_dim": 128}
    deployment = question(entries, spec, "v6e:2x4", max_rows=8, **sizes)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert plan.is_known
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)
    assert payloads(deployment, plan.stages[0].load.collectives) == payloads(deployment, stage.collectives)


GPUS = ("a100-80g:4", "h200:4")
PUBLISHED = (
    "llama-3-8b",
    "mistral-7b",
    "gemma-2-9b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "falcon-40b",
    "phi-3-mini-4k",
    "gpt-j-6b",
    "mpt-7b",
    "llama-3-70b",
    "qwen3-32b",
    "gpt-oss-120b",
)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "topology"),
    # Each model on one kind of TPU and on one of GPU, unless all combinations are asked for.
    [
        pytest.param(name, kind, marks=[mark] if i % len(kinds) == j else [mark, pytest.mark.weekly])
        for i, name in enumerate(PUBLISHED)
        for kinds, mark in ((TPUS, tpu), (GPUS, gpu))
        for j, kind in enumerate(kinds)
    ],
)
def test_published_models_compile_for_accelerators(name, topology):
    """Two layers of each, one with a sliding window and one without where it has both."""
    settings = {"dtype": "bfloat16", "max_rows": 32, "buckets": (64,), "max_context": 2048, "slots": 2**17, "tensor": 4}
    deployment = named(name, topology, **settings)
    windows = tuple(dict.fromkeys(deployment.config.windows)) * 2
    deployment = replace(deployment, config=replace(deployment.config, num_layers=2, windows=windows[:2]))
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)
    assert not stage.surprises


@pytest.mark.aot
@tpu
@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        (LLAMA, {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}),
        (MIXTRAL, {"hidden_size": 2048, "intermediate_size": 3584, "num_local_experts": 8}),
        (MIXTRAL, {"hidden_size": 2048, "intermediate_size": 768, "num_local_experts": 32}),
        (FALCON, {"hidden_size": 1600, "vocab_size": 65024}),
    ],
    ids=["grouped heads", "few experts", "many experts", "table of no whole tiles"],
)
def test_weights_are_read_in_place_on_a_tpu(entries, sizes):
    """No kernel of experts and no table is copied, and memory is what is predicted, padding included."""
    settings = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "tensor": 4}
    deployment = question(entries | sizes, topology="v6e:2x2", **settings)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert not stage.surprises
    assert stage.temporaries < 16 * 2**20
    held = plan.stages[0].total - plan.stages[0].activations
    assert stage.total - stage.temporaries == pytest.approx(held, rel=0.005)
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)
    assert compiled.count_kinds(plan.stages[0].load.collectives or ()) == compiled.count_kinds(stage.collectives)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "quantize", "bucket"),
    [
        pytest.param("v5p:2x2x1", None, 2048, marks=tpu),
        pytest.param("v5p:2x2x1", None, 4096, marks=tpu),
        pytest.param("v5p:2x2x1", None, 8192, marks=tpu),
        pytest.param("v6e:2x2", None, 8192, marks=tpu),
        pytest.param("v6e:2x2", "int8", 4096, marks=tpu),
        pytest.param("h200:4", None, 4096, marks=gpu),
        pytest.param("h200:4", "int8", 512, marks=gpu),
    ],
)
def test_what_experts_compute_is_predicted(topology, quantize, bucket):
    """Large buckets, whose tokens have a row for each expert. A TPU may have some of what is predicted on its chip, and
    never more in memory; int8 kernels are not widened there. With 4,096 tokens on v5p, 104 MiB of arrays are in use at
    the peak, and the compiler places them so that they span 155."""
    sizes = {"hidden_size": 2048, "intermediate_size": 3584, "num_local_experts": 8}
    settings = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "tensor": 4, "quantize": quantize}
    deployment = question(MIXTRAL | sizes, topology=topology, buckets=(bucket,), **settings)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert plan.stages[0].total > (0.95 if (topology, bucket) == ("v5p:2x2x1", 4096) else 0.97) * stage.total
    assert plan.stages[0].total < (1.1 if topology.startswith("v") else 1.03) * stage.total
    assert stage.temporaries > 0.02 * stage.total


@pytest.mark.skipif(TPU, reason="libtpu is installed")
def test_what_is_missing_to_compile_is_told():
    with pytest.raises(ValueError, match=r"cannot compile for v5e:2x2: .* pip install 'jax\[tpu\]=="):
        targets.devices_of(question(BLOOM, topology="v5e:2x2").topology)
