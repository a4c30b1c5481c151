"""Which collectives a sharding is known to have, and where the compiler decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.planning.plan import Plan
from jaxserve.planning.predict import predict
from sharding import specs
from tests.jaxserve.planning.questions import BLOOM, GPTJ, LLAMA, MIXTRAL, NEOX, question

EMBED_SPLIT = {"vocab": None, "heads": None, "ffn": None, "embed": "tensor"}


def test_routers_are_whole_where_experts_are_split():
    spec = specs.default("mixtral")
    by_expert = {**spec.rules, "expert": "tensor", "ffn": None}
    (stage,) = predict(question(MIXTRAL, replace(spec, rules=by_expert), tensor=4)).stages
    found = {part.name: part.whole for part in stage.parameters}
    assert found["layers.*.experts.router.kernel"]
    assert not found["layers.*.experts.gate.kernel"]
    whats = [each.what for each in stage.load.collectives or ()]
    assert whats == ["embed", "layers.*.out", "layers.*.experts", "head"]
    split = replace(spec, rules={**by_expert, "router": "tensor"})
    assert not predict(question(MIXTRAL, split, tensor=4)).is_known


@pytest.mark.parametrize("changed", [{"activations": {"tokens": "tensor"}}, {"rules": EMBED_SPLIT}])
def test_what_the_compiler_decides_is_unknown(changed):
    """No collective that is not known is counted as free."""
    plan = predict(question(BLOOM, replace(specs.default("bloom"), **changed), tensor=4))
    assert not plan.is_known
    assert {(each.milliseconds, each.tokens_per_second, each.bottleneck) for each in plan.buckets} == {(None,) * 3}
    assert plan.slots == 8192
    with pytest.raises(ValueError, match="the speed of this sharding is unknown"):
        plan.roofline()


@pytest.mark.parametrize(
    ("entries", "changed", "topology"),
    [
        (LLAMA, {"pool": {"rows": "other"}}, "v5p:2x2x2"),
        (LLAMA, {"rules": {"ffn": ("tensor", "context")}}, "v5p:2x2x2"),
        (LLAMA, {}, "h200:8"),
        (MIXTRAL, {}, "v5p:2x2x2"),
        (GPTJ, {}, "v5p:2x2x2"),
        (NEOX | {"use_parallel_residual": False}, {}, "v5p:2x2x2"),  # a quarter of each head is rotated
    ],
)
def test_only_held_exchanges_of_tokens_are_known(entries, changed, topology):
    spec = replace(specs.default(entries["model_type"]), activations={"tokens": "context"})
    spec = replace(spec, **changed | {"rules": {**spec.rules, **changed.get("rules", {})}})
    (stage,) = predict(question(entries, spec, topology, mesh="other=2,context=2,tensor=2")).stages
    assert stage.load.collectives is None
    if entries is LLAMA:
        spec = replace(specs.default("llama"), activations=spec.activations)
        (stage,) = predict(question(entries, spec, mesh="other=2,context=2,tensor=2")).stages
        assert [each.carried(8, 4) for each in stage.load.collectives or () if each.what == "the last layer"] == [4096]


@pytest.mark.parametrize(
    ("topology", "mesh", "heads", "kind"),
    [
        ("v5p:2x2x2", {"attn": 8}, 8, "all-reduce"),  # over all of a box
        ("v5p:2x2x2", {"attn": 4, "tensor": 2}, 8, "reduce-scatter"),
        ("v5p:2x4x1", {"attn": 8}, 8, "reduce-scatter"),
        ("v6e:4x4", {"attn": 16}, 16, "all-reduce"),  # over all of a square
        ("v6e:2x4", {"attn": 8}, 8, "reduce-scatter"),
        ("v6e:2x2", {"attn": 4}, 8, "reduce-scatter"),
        ("tpu7x:2x2x2", {"attn": 16}, 16, "reduce-scatter"),
        ("v6e:4x4", {"stage": 2, "attn": 8}, 8, None),  # over all devices of a stage, some of the slice's
        ("v6e:2x4", {"stage": 2, "attn": 4}, 8, "reduce-scatter"),
        ("v6e:4x4", {"stage": 2, "attn": 4, "tensor": 2}, 8, "reduce-scatter"),
        ("tpu7x:2x2x2", {"stage": 2, "attn": 8}, 8, "reduce-scatter"),
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 64, "reduce-scatter"),  # to 8 heads for each device
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 192, "reduce-scatter"),  # 24
        ("h200:8", {"attn": 4, "tensor": 2}, 64, "reduce-scatter"),
    ],
)
def test_tpus_scatter_heads_but_over_all_of_a_box(topology, mesh, heads, kind):
    (stage, *_) = _by_rows(topology, mesh, heads, {"parameters": {"layers.*.out.kernel": {"heads": _BY_HEAD}}}).stages
    if kind is None:
        assert stage.load.collectives is None
        return
    whole = 2 * 16 * heads // mesh.get("tensor", 1)
    assert [each[:3] for each in stage.load.collectives or () if each.what == "layers.*.attend"] == [
        (kind, "layers.*.attend", whole // mesh["attn"] if kind == "reduce-scatter" else whole)
    ]


@pytest.mark.parametrize(
    ("topology", "mesh", "heads", "bucket", "kind"),
    [
        ("v5p:2x2x2", {"attn": 8}, 64, 256, "all-reduce"),
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 64, 16, "all-reduce"),  # 4 tokens for each device
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 64, 20, "reduce-scatter"),
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 16, 32, "all-reduce"),  # 8 tokens of 128 numbers
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 18, 32, "reduce-scatter"),
        ("v6e:2x4", {"attn": 4, "tensor": 2}, 16, 36, "reduce-scatter"),
    ],
)
def test_tpus_scatter_tokens_but_few_of_them(topology, mesh, heads, bucket, kind):
    (stage,) = _by_rows(topology, mesh, heads, {"activations": {"tokens": "attn"}}, bucket=bucket).stages
    assert [each.kind for each in stage.load.collectives or () if each.what == "layers.*.attend"] == [kind]


@pytest.mark.parametrize(("bucket", "kind"), [(8, "all-reduce"), (16, "reduce-scatter")])
def test_tpus_scatter_heads_of_more_than_one_tile(bucket, kind):
    rules = {"parameters": {"layers.*.out.kernel": {"heads": _BY_HEAD}}}
    (stage,) = _by_rows("v6e:2x4", {"attn": 4, "tensor": 2}, 64, rules, bucket=bucket).stages
    assert [each.kind for each in stage.load.collectives or () if each.what == "layers.*.attend"] == [kind]


_BY_HEAD = ("tensor", "attn")  # the axes of heads and of rows


def _by_rows(topology: str, mesh: dict[str, int], heads: int, changed: dict[str, Any], *, bucket: int = 16) -> Plan:
    """A plan of LLaMA with heads of 16 numbers and the pool's rows over "attn"."""
    axes = mesh if "tensor" in mesh else mesh | {"tensor": 1}
    base = specs.default("llama")
    spec = replace(base, rules=dict.fromkeys(base.rules) | {"heads": "tensor"}, pool={"rows": "attn"}, **changed)
    entries = LLAMA | {"num_attention_heads": heads, "head_dim": 16}
    sizes = {"mesh": ",".join(f"{axis}={size}" for axis, size in axes.items()), "slots": 2**17, "buckets": (bucket,)}
    return predict(question(entries, spec, topology, dtype="bfloat16", max_rows=min(bucket, 16), **sizes))


@pytest.mark.parametrize(
    ("entries", "changed", "topology"),
    [
        (LLAMA, {"pool": {"rows": "other"}}, "v5p:2x2x2"),
        (LLAMA, {"pool": {"heads": None}}, "v5p:2x2x2"),
        (LLAMA, {"rules": {"ffn": ("tensor", "context")}}, "v5p:2x2x2"),
        (LLAMA, {"rules": {"heads": None}}, "v5p:2x2x2"),
        (LLAMA, {"activations": {"embed": "tensor", "tokens": "context"}}, "v5p:2x2x2"),
        (LLAMA, {"gather": ("other",)}, "v5p:2x2x2"),
        (LLAMA, {}, "h200:8"),
        (MIXTRAL, {}, "v5p:2x2x2"),
        (GPTJ, {}, "v5p:2x2x2"),
    ],
)
def test_only_held_exchanges_around_rings_are_known(entries, changed, topology):
    base = replace(specs.default(entries["model_type"]), activations={"embed": "tensor"})
    spec = replace(base, **changed | {"rules": {**base.rules, **changed.get("rules", {})}})
    (stage,) = predict(question(entries, spec, topology, mesh="other=2,context=2,tensor=2")).stages
    assert stage.load.collectives is None
    if entries is LLAMA:
        (stage,) = predict(question(entries, base, mesh="other=2,context=2,tensor=2")).stages
        assert {each.over for each in stage.load.collectives or ()} == {("tensor",)}
