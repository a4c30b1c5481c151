"""Predictions against what the compiler makes of the engine's own programs, for CPUs."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from jaxserve.planning import compiled, hlo
from jaxserve.planning.predict import predict
from jaxserve.planning.stage_load import Collective
from sharding import specs
from tests.jaxserve.planning.questions import (
    BLOOM,
    BY_CONTEXT,
    BY_EMBED,
    GPT2,
    LLAMA,
    MIXTRAL,
    NEOX,
    OPT,
    payloads,
    question,
)

B, G = specs.default("bloom"), specs.default("gpt2")
L = specs.default("llama")
UNTIED = {"tie_word_embeddings": False}


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
        pytest.param(deployment, id=name, marks=pytest.mark.long if i % 15 else ())
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
