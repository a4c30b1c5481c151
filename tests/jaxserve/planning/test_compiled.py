"""Predictions against what the compiler makes of the engine's own programs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxserve.planning import compiled, hlo, targets
from jaxserve.planning.predict import predict
from jaxserve.planning.stage_load import Collective
from sharding import specs
from tests.jaxserve.planning.questions import BLOOM, FALCON, GPT2, LLAMA, MIXTRAL, NEOX, OPT, named, question

B, G = specs.default("bloom"), specs.default("gpt2")
L = specs.default("llama")
BY_EMBED: dict[str, Any] = {"activations": {"embed": "tensor"}}
UNTIED = {"tie_word_embeddings": False}
BY_CONTEXT: dict[str, Any] = {"activations": {"tokens": "context"}, "pool": {"slots": "context"}}


def rules(spec, **changed):
    return replace(spec, rules={**spec.rules, **changed})


COMBINATIONS = {
    "one device": question(BLOOM),
    "bloom over 4": question(BLOOM, tensor=4),
    "gpt2 over 8, its head its own": question(GPT2 | UNTIED, tensor=8),
    "gpt_neox over 4, its halves side by side": question(NEOX | {"use_parallel_residual": True}, tensor=4),
    "gpt_neox over 4, one after the other": question(NEOX | {"use_parallel_residual": False}, tensor=4),
    "opt over 4, its table narrow": question(OPT, tensor=4),
    "2 stages of 2": question(BLOOM, tensor=2, stages=2),
    "vocabulary whole": question(BLOOM, rules(B, vocab=None), tensor=4),
    "heads whole": question(BLOOM, rules(B, heads=None), tensor=4),
    "feed-forward whole": question(GPT2, rules(G, ffn=None), tensor=2),
    "pool whole": question(BLOOM, replace(B, pool={"heads": None}), tensor=4),
    "one matmul whole": question(BLOOM, replace(B, parameters={"layers.*.out.*": {"heads": None}}), tensor=4),
    "one layer whole": question(BLOOM, replace(B, parameters={"layers.1.*": {"ffn": None}}), tensor=4),
    "heads padded": question(BLOOM | {"n_head": 6, "hidden_size": 96}, replace(B, pad=frozenset({"heads"})), tensor=4),
    "vocabulary padded": question(BLOOM | {"vocab_size": 1022}, replace(B, pad=frozenset({"vocab"})), tensor=4),
    "two axes, heads over one": question(
        LLAMA, rules(L, vocab=("x", "y"), ffn=("x", "y"), heads="x"), mesh="x=2,y=4", slots=2**16
    ),
    "tokens over an axis of their own": question(
        LLAMA, replace(L, activations={"tokens": "context"}), mesh="context=4,tensor=2", slots=2**16
    ),
    "tokens and slots": question(BLOOM, replace(B, **BY_CONTEXT), mesh="context=2,tensor=4", slots=2**16),
    "copies over one axis": question(BLOOM, mesh="data=2,tensor=4"),
    "around a ring": question(BLOOM, replace(B, **BY_EMBED), tensor=4),
    "around a ring, gated": question(LLAMA, replace(L, **BY_EMBED), mesh="x=2,tensor=4"),
    "positions split": question(GPT2, rules(G, positions="tensor"), tensor=4),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "deployment",
    [
        pytest.param(deployment, id=name, marks=pytest.mark.long if i % 10 else ())
        for i, (name, deployment) in enumerate(COMBINATIONS.items())
    ],
)
def test_bytes_within_3_percent_and_collectives_equal(deployment):
    plan = predict(replace(deployment, on_cpus=True))
    stages = compiled.compile_stages(plan, jax.devices(), lambda *_: None)
    assert len(stages) == deployment.engine.stages
    for predicted, found in zip(plan.stages, stages, strict=True):
        assert predicted.total == pytest.approx(found.total, rel=0.03)
        assert compiled.count_kinds(predicted.load.collectives or ()) == compiled.count_kinds(found.collectives)
        assert payloads(deployment, predicted.load.collectives) == payloads(deployment, found.collectives)
        assert not found.surprises


def payloads(deployment, collectives) -> Counter[tuple[str, int]]:
    """Bytes of the results of collectives in the largest bucket, by kind and devices of a group."""
    tokens, counts = deployment.buckets[-1], Counter()
    for each in collectives:
        rows = 1
        if isinstance(each, Collective):
            rows = min(tokens, deployment.engine.max_rows) if each.per_row else tokens
        counts[each.kind, each.group] += round(each.times * each.nbytes * rows)
    return counts


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 4])
def test_experts_of_many_layers_share_memory_on_cpus(tensor):
    """What the experts of a layer compute is gone before the next layer's."""
    deployment = question(MIXTRAL | {"num_hidden_layers": 4}, tensor=tensor, buckets=(512,), max_rows=8)
    plan = predict(replace(deployment, on_cpus=True))
    (stage,) = compiled.compile_stages(plan, jax.devices(), lambda *_: None)
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)
    assert stage.temporaries < 0.4 * stage.total


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_a_split_embedding_is_left_to_the_compiler():
    deployment = question(BLOOM, rules(B, vocab=None, heads=None, ffn=None, embed="tensor"), tensor=4)
    plan = predict(replace(deployment, on_cpus=True))
    assert plan.stages[0].load.collectives is None
    (stage,) = compiled.compile_stages(plan, jax.devices(), lambda *_: None)
    assert stage.total == pytest.approx(plan.stages[0].total, rel=0.03)
    assert compiled.count_kinds(stage.collectives)["all-reduce"] > 4


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_weights_are_gathered_where_the_spec_says_so():
    spec = replace(rules(B, vocab=None, heads=None, ffn=None, embed="fsdp"), activations={"embed": None})
    found = []
    for gather in ((), ("fsdp",)):
        plan = predict(question(BLOOM, replace(spec, gather=gather), mesh="fsdp=4"))
        assert plan.stages[0].load.collectives is None
        (stage,) = compiled.compile_stages(plan, jax.devices(), lambda *_: None)
        found.append({each.arrays for each in stage.collectives if each.kind == "all-gather"})
    assert not {"f32[384,128]", "f32[512,128]"} & found[0]
    assert {"f32[384,128]", "f32[512,128]"} <= found[1]


HLO = """
%all-reduce-scatter.1 (input.1: bf16[8,2]) -> bf16[2,2] {
  %all-reduce.9 = bf16[8,2]{1,0:T(8,128)(2,1)} all-reduce(%input.1), replica_groups={{0,1,2,3}}
  ROOT %slice = bf16[2,2]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.9, %place, %zero)
}

ENTRY %main (x: f32[8,128]) -> f32[8] {
  %fusion = bf16[2,2]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %a = f32[8,128]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %b = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), dimensions={0}
  %c = f32[8]{0} all-gather-done(%b)
  ROOT %d = (f32[8,128]{1,0}, bf16[2,2]{1,0:T(8,128)(2,1)}) all-reduce(%p, %q)
  %e = f32[8,128]{1,0} all-reduce(%z), replica_groups=[2,4]<=[8], to_apply=%add
  %i = s8[4]{0} all-reduce(%z), replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)4}, to_apply=%add
  %f = (bf16[4,8]{1,0:T(8,128)}, bf16[4,8]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%v)
  %k = f32[8]{0} collective-permute(%v), channel_id=1, source_target_pairs={{2,1},{0,3},{1,2},{3,0}}
  %l = f32[8]{0} collective-permute(%v), channel_id=2, source_target_pairs={{2,1},{1,0}}
  %g = (f32[8]{0}, f32[16]{0}) all-reduce-start(%s, %t), to_apply=%add
  %j = ((bf16[16]{0}), bf16[16]{0}) all-reduce-start(%s), to_apply=%add
  %h = ((f32[2]{0}, f32[4]{0}), (f32[8]{0}, f32[16]{0})) all-gather-start(%s, %t), dimensions={0}
"""


def test_collectives_are_found_in_a_module():
    assert hlo.collectives(HLO) == [
        hlo.CollectiveOp("reduce-scatter", "bf16[2,2]", 8, 1, 4),
        hlo.CollectiveOp("all-reduce", "f32[8,128]", 4096, 2, 4),
        hlo.CollectiveOp("all-gather", "f32[8]", 32, 1),
        hlo.CollectiveOp("all-reduce", "f32[8,128], bf16[2,2]", 4104, 1),
        hlo.CollectiveOp("all-reduce", "s8[4]", 4, 1, 8),
        hlo.CollectiveOp("collective-permute", "bf16[4,8]", 64, 1),
        hlo.CollectiveOp("collective-permute", "f32[8]", 32, 1, 2),
        hlo.CollectiveOp("collective-permute", "f32[8]", 32, 1),
        hlo.CollectiveOp("all-reduce", "f32[8], f32[16]", 96, 1),
        hlo.CollectiveOp("all-reduce", "bf16[16]", 32, 1),
        hlo.CollectiveOp("all-gather", "f32[8], f32[16]", 96, 1),
    ]


def programs_of(deployment):
    return compiled.programs(deployment)[0]


def test_gathered_weights_and_copied_pools_are_told():
    stage = programs_of(question(BLOOM | {"hidden_size": 1024}, tensor=4))
    gathers = [hlo.CollectiveOp("all-gather", "f32[3072,1024]", 12 * 2**20, 2)]
    assert list(compiled.unforeseen(stage, gathers, [Collective("all-reduce", "embed", 4, False, 4, 5)])) == [
        "2 x all-gather of f32[3072,1024]: gathers the weights layers.*.qkv.kernel",
        "0 x all-reduce, but 5 were predicted",
        "2 x all-gather, but 0 were predicted",
    ]
    text = """
    %turned (p: f32[1024,1024]) -> f32[1024,1024] {
      ROOT %never_stored = f32[1024,1024]{0,1} copy(%p)
    }

    ENTRY %main (kernel: f32[1024,1024]) -> f32[8] {
      %fused = f32[8,1024]{1,0} fusion(%x, %kernel), kind=kOutput, calls=%turned
      %a = f32[256,2,128,64]{2,3,1,0} copy(%pool), metadata={op_name="jit(forward)/layer_0/while/body/reshape"}
      %b = f32[1024,1024]{0,1} copy(%kernel), metadata={op_name="jit(forward)/layer_0/up"}
      %c = f32[8,1024]{0,1} copy(%x)
      %d = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%kernel)
    }
    """
    assert list(compiled.copies(stage, text, 128)) == [
        "1 x copy of the pool as f32[256,2,128,64] (16.0 MiB) in every iteration of a loop",
        "1 x copy of the weights layers.*.down.kernel or layers.*.up.kernel as f32[1024,1024] (4.0 MiB)",
    ]


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
        pytest.param("v6e:2x2", None, 4096, marks=tpu),
        pytest.param("v6e:2x2", "int8", 4096, marks=tpu),
        pytest.param("h200:4", None, 4096, marks=gpu),
        pytest.param("h200:4", "int8", 512, marks=gpu),
    ],
)
def test_what_experts_compute_is_predicted(topology, quantize, bucket):
    """Large buckets, whose tokens have a row for each expert; kernels in eight bits, which TPUs widen in memory."""
    sizes = {"hidden_size": 2048, "intermediate_size": 3584, "num_local_experts": 8}
    settings = {"slots": 2**18, "dtype": "bfloat16", "attention": "auto", "tensor": 4, "quantize": quantize}
    deployment = question(MIXTRAL | sizes, topology=topology, buckets=(bucket,), **settings)
    plan = predict(deployment)
    (stage,) = compiled.compile_stages(plan, targets.devices_of(deployment.topology), lambda *_: None)
    assert stage.temporaries > (0.1 if bucket == 4096 else 0.02) * stage.total
    assert plan.stages[0].total == pytest.approx(stage.total, rel=0.03)


@pytest.mark.skipif(TPU, reason="libtpu is installed")
def test_what_is_missing_to_compile_is_told():
    with pytest.raises(ValueError, match=r"cannot compile for v5e:2x2: .* pip install 'jax\[tpu\]=="):
        targets.devices_of(question(BLOOM, topology="v5e:2x2").topology)
