"""What is predicted: numbers that can be reckoned by hand, and errors in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxserve.iteration import SamplerVariant
from jaxserve.planning.deployment import programs
from jaxserve.planning.planner import plan
from jaxserve.planning.predict import SAMPLER_PASSES, predict, with_buckets
from jaxserve.sampling import sampler
from sharding import devices, specs
from tests.jaxserve.planning.questions import BLOOM, GPT2, LLAMA, MIXTRAL, named, question


def test_bloom_176b_on_16_devices():
    plan = predict(named("bloom-176b", "v5p:2x2x4", tensor=16))
    assert plan.num_parameters == 176_247_271_424
    (stage,) = plan.stages
    table, layer = 250_880 * 14336, 12 * 14336**2
    whole, split = 4 + 70 * 6, 70 * 7  # vectors of 14,336 numbers, or parts that make so many: float32
    assert stage.weights == 2 * (table + 70 * layer) // 16 + 4 * 14336 * (16 * whole + split) // 16 == 22_055_341_056
    assert stage.load.slot_bytes == 2 * 2 * 70 * 14336 // 16
    assert stage.pool == plan.slots * stage.load.slot_bytes
    assert stage.total + stage.free == plan.memory[1]
    assert 0 <= stage.free < plan.block_size * stage.load.slot_bytes
    assert plan.requests == plan.slots // 2048
    found = {(each.kind, each.what): each.times for each in stage.load.collectives or ()}
    assert found == {
        ("all-reduce", "embed"): 1,
        ("all-reduce", "layers.*.out"): 70,
        ("all-reduce", "layers.*.down"): 70,
        ("all-gather", "head"): 1,
    }
    qkv = next(part for part in stage.parameters if part.name == "layers.*.qkv.kernel")
    assert (qkv.count, qkv.partition, qkv.local) == (70, ("tensor", None), (2688, 14336))


def test_an_int8_pool_holds_nearly_twice_as_many_slots():
    plan, half = (
        predict(named("bloom-176b", "v5p:2x2x4", tensor=16, kv_cache_dtype=dtype)) for dtype in ("bfloat16", "int8")
    )
    heads = 70 * 112 // 16
    assert plan.stages[0].load.slot_bytes == 2 * heads * 2 * 128
    scales = 70 * 8 * 4  # in float32, for eight heads a layer
    assert half.stages[0].load.slot_bytes == 2 * (heads * 128 + scales)
    sizes = [each.stages[0].load.slot_bytes for each in (plan, half)]
    assert half.slots / plan.slots == pytest.approx(sizes[0] / sizes[1], rel=0.001)


def test_int8_weights_take_half():
    plan, half = (predict(named("bloom-176b", "v5p:2x2x4", tensor=16, quantize=how)) for how in (None, "int8"))
    assert half.stages[0].weights == pytest.approx(plan.stages[0].weights / 2, rel=0.003)  # scales, norms, biases
    assert half.num_parameters == plan.num_parameters
    found, wide = ({each.what: each.nbytes for each in each.stages[0].load.collectives or ()} for each in (half, plan))
    assert found == wide | {"embed": 14336, "embed.scales": 2}


def test_int4_weights_take_four_bits_and_a_scale_a_group():
    plan = predict(named("bloom-7b1", "v5e:1x1", quantize="int4"))
    parts = {part.name: part for part in plan.stages[0].parameters}
    up, scales = parts["layers.*.up.kernel"], parts["layers.*.up.kernel.scales"]
    assert (scales.shape, scales.axes) == ((up.shape[0], up.shape[1] // 32), up.axes)
    assert (up.nbytes, scales.nbytes) == (up.shape[0] * up.shape[1] // 2, 2 * up.shape[0] * up.shape[1] // 32)
    assert parts["embed.tokens.table"].nbytes == 250880 * 4096


def test_stages_hold_their_own_layers_and_ends():
    plan = predict(question(BLOOM, tensor=2, stages=2))
    first, last = plan.stages
    assert (first.layers, last.layers) == ((0, 1), (1, 2))
    names = [{part.name for part in stage.parameters} for stage in plan.stages]
    assert "embed.norm.scale" in names[0] - names[1]
    assert "head.norm.scale" in names[1] - names[0]
    assert "embed.tokens.table" in names[0] & names[1]  # it is the head as well
    assert first.load.hop_bytes > last.load.hop_bytes == 0


def test_heads_and_vocabulary_are_padded_on_request():
    spec = replace(specs.default("bloom"), pad=frozenset({"heads", "vocab"}))
    plan = predict(named("bloom-176b", "v5p:2x4x4", spec, tensor=32))
    assert plan.padding == {"heads": (112, 128)}  # 250,880 tokens divide
    qkv = next(part for part in plan.stages[0].parameters if part.name == "layers.*.qkv.kernel")
    assert qkv.shape == (3 * 128 * 128, 14336)
    assert plan.num_parameters == 176_247_271_424


def test_layers_that_are_split_otherwise_are_told_apart():
    spec = replace(
        specs.default("bloom"), parameters={"layers.1-2,4.up.*": {"ffn": None}, "layers.0-2.down.*": {"ffn": None}}
    )
    plan = predict(question(BLOOM | {"n_layer": 6}, spec, tensor=2, stages=2))
    counts = [{part.name: part.count for part in stage.parameters} for stage in plan.stages]
    assert counts[0]["layers.0.up.kernel"] == 1
    assert counts[0]["layers.1-2.up.kernel"] == 2
    assert counts[1]["layers.4.up.kernel"] == 1
    assert counts[1]["layers.3,5.up.kernel"] == 2
    assert counts[0]["layers.0-2.down.kernel"] == counts[1]["layers.3-5.down.kernel"] == 3
    assert counts[0]["layers.*.out.kernel"] == counts[1]["layers.*.out.kernel"] == 3
    shapes = {part.name: part.local for stage in plan.stages for part in stage.parameters}
    assert shapes["layers.1-2.up.kernel"] == (512, 128)
    assert shapes["layers.3,5.up.kernel"] == (256, 128)


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (
            named("bloom-176b", "v5p:2x4x4", tensor=32),
            r"layers.0.out.kernel: axis 'heads' of size 112 does not divide over mesh axis 'tensor' of size 32; "
            r"it does for tensor = 1, 2, 4, 7, 8, 14, 16, 28, 56, 112, or padded to 128, 14% more",
        ),
        (named("bloom-176b", "v5p:2x2x4", tensor=32), r"tensor 32 x stages 1 are 32 devices; v5p:2x2x4 has 16"),
        (named("bloom-176b", "h200:8", tensor=1), r"the weights take 328.\d GiB of each h200 device.*more stages"),
        (named("bloom-176b", "a100-40g:8", tensor=8), r"the weights take 41.\d GiB of each .*; use more devices"),
        (
            named("bloom-7b1", "v5e:1x1", buckets=(2**17,)),
            r"no memory left for keys and values: of the usable 14.72 GiB .* weights take 13.\d+ GiB",
        ),
        (question(BLOOM, slots=10**9), r"1000000000 slots|no memory left for keys and values.*; \d+ slots take"),
        (question(BLOOM, tensor=2, stages=3), r"at most 2, the number of layers"),
        (question(BLOOM, tensor=2, stages=2, layers_per_stage=(2, 0 + 1)), r"3 layers; the model has 2"),
        (
            question(BLOOM, replace(specs.default("bloom"), activations={"tokens": "tensro"}), tensor=2),
            r"\[activations\]: logical axis 'tokens' goes to 'tensro', .*'tensor'\?",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(deployment, message):
    with pytest.raises(ValueError, match=message):
        predict(deployment)


def test_buckets_are_filled_with_decodes_and_then_prompts():
    plan = predict(named("bloom-176b", "h200:8", tensor=8, max_rows=8, buckets=(4, 8, 4096)))
    assert [bucket.decodes for bucket in plan.buckets] == [4, 8, 8]
    assert plan.buckets[0].bottleneck == "memory"
    assert plan.buckets[2].bottleneck == "compute"
    double = predict(
        replace(plan.deployment, topology=devices.parse("h200:2x8"), engine=replace(plan.deployment.engine, replicas=2))
    )
    assert double.buckets[1].milliseconds == plan.buckets[1].milliseconds
    assert double.buckets[1].tokens_per_second == 2 * (plan.buckets[1].tokens_per_second or 0)


def test_gathered_weights_take_memory_of_one_layer():
    spec = specs.default("bloom")
    split = replace(spec, rules={**spec.rules, "embed": "fsdp"})
    plain, gathered = (
        predict(question(BLOOM | {"vocab_size": 64}, each, mesh="fsdp=4")).stages[0].activations
        for each in (split, replace(split, gather=("fsdp",)))
    )
    assert gathered - plain == pytest.approx(4 * 12 * 128 * 128, rel=0.03)  # less the logits, which come later


@pytest.mark.parametrize(
    ("entries", "changed", "on_cpus"),
    [
        (BLOOM, {"activations": {"tokens": "x"}, "rules": {"embed": "x", "heads": "y"}}, False),
        (BLOOM, {"parameters": {"layers.1.*": {"heads": ("x", "y")}}}, False),
        (BLOOM, {"pool": {"heads": "x"}}, False),
        (BLOOM, {"activations": {"embed": "x"}, "gather": ("y",)}, True),
        (MIXTRAL, {"rules": {"heads": "y", "expert": "x"}, "gather": ("x",)}, True),
    ],
)
def test_bytes_of_weights_made_whole_are_unknown(entries, changed, on_cpus):
    spec = specs.default(entries["model_type"])
    rules = {**dict.fromkeys(spec.rules), "heads": "y", "ffn": "y"} | changed.get("rules", {})
    spec = replace(spec, **changed | {"rules": rules})
    asked = replace(question(entries, spec, mesh="x=2,y=2"), on_cpus=on_cpus)
    (stage,) = predict(asked).stages
    assert not stage.activations_known
    kept = {"activations": {"tokens": "y"}, "parameters": {"layers.1.*": {"heads": None}}, "pool": {}, "gather": ()}
    (stage,) = predict(replace(asked, spec=replace(spec, **kept))).stages
    assert stage.activations_known


@pytest.mark.parametrize(
    ("gather", "sizes", "topology", "known"),
    [
        ((), {}, "v5p:2x2x1", True),
        (("y",), {}, "v5p:2x2x1", False),
        (("y",), {"hidden_size": 8192, "intermediate_size": 8192}, "v5p:2x2x1", True),  # 768 MiB, too many for the chip
        (("y",), {}, "h200:4", True),
    ],
)
def test_bytes_that_fit_on_the_chip_of_a_tpu_are_unknown(gather, sizes, topology, known):
    base = specs.default("llama")
    spec = replace(base, rules=dict.fromkeys(base.rules) | {"ffn": "y"}, gather=gather)
    (stage,) = predict(question(LLAMA | sizes, spec, topology, mesh="x=2,y=2")).stages
    assert stage.activations_known == known


def test_blocks_behind_the_window_are_given_back():
    whole = predict(question(LLAMA))
    windowed = replace(whole, groups=replace(whole.groups, windows=(128,)))
    blocks, spare = whole.slots // whole.block_size, whole.groups.most_tokens // whole.block_size
    assert windowed.fitting(100) == whole.slots // 100
    assert windowed.requests == (blocks - spare) // (128 // whole.block_size + 2)
    assert whole.requests == whole.slots // 2048


def test_no_device_is_started():
    program = """
from tests.jaxserve.planning.questions import BLOOM, question
from jaxserve.planning.deployment import programs
from jaxserve.planning.predict import predict
from jax._src import xla_bridge
predict(question(BLOOM, tensor=4))
print(list(xla_bridge._backends))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_gpt2_positions_are_held_whole():
    parts = {part.name: part for part in predict(question(GPT2, tensor=4)).stages[0].parameters}
    assert parts["embed.positions.table"].local == parts["embed.positions.table"].shape == (512, 128)


@pytest.mark.parametrize(
    ("name", "topology", "settings", "top"),
    [
        ("llama-3-70b", "h200:8", {"tensor": 8, "max_rows": 128}, 2048),
        ("bloom-176b", "a100-80g:8", {"tensor": 8}, 512),  # 1,024 would take more than 0.25 s
        ("gpt3-13b", "h100:1", {"max_rows": 64}, 4096),
        ("gpt3-13b", "h100:1", {"max_rows": 64, "token_budget": 300}, 300),
        ("gpt3-13b", "h100:1", {"max_rows": 64, "buckets": (8, 64)}, 64),
        ("gpt3-13b", "h100:1", {"max_rows": 64, "deterministic": True, "slot_policy": "reserve"}, 256),
    ],
)
def test_the_largest_default_bucket_follows_the_roofline(name, topology, settings, top):
    plan = predict(named(name, topology, **settings))
    assert (plan.deployment.buckets[-1], plan.buckets[-1].tokens) == (top, top)
    given = not {"token_budget", "buckets", "deterministic"}.isdisjoint(settings)
    assert plan.buckets_reason.startswith("as given" if given else f"up to {top:,} tokens by the roofline of ")


def test_larger_buckets_take_little_memory(monkeypatch):
    small, large = (
        predict(named("gpt3-13b", "h100:1", max_rows=64, buckets=buckets)) for buckets in ((8, 64, 256), None)
    )
    assert large.deployment.buckets[-1] == 4096
    assert large.slots > 0.98 * small.slots
    monkeypatch.setattr("jaxserve.planning.predict._ACTIVATION_SHARE", 1 / 512)
    held = predict(named("gpt3-13b", "h100:1", max_rows=64))
    assert held.deployment.buckets[-1] == 512
    assert "1,024 would take too much memory" in held.buckets_reason


def test_devices_of_unknown_speed_keep_the_measured_ladder():
    asked = named("gpt2", "h100:1", max_rows=8)
    engine, reason = with_buckets(asked.engine, programs(asked), None)
    assert engine.buckets == (2, 4, 8, 16, 32, 64, 128, 256)
    assert "no cost model for this device" in reason


def test_slots_and_tokens_over_an_axis_divide_work(tmp_path) -> None:
    rules = '[mesh]\ncontext = 4\ntensor = 2\n[pool]\nslots = "context"\n'
    (tmp_path / "one.toml").write_text(rules)
    (tmp_path / "tokens.toml").write_text(rules + '[activations]\ntokens = "context"\n')
    asked = {"model": "llama-3.2-1b", "topology": "v6e:2x4", "max_rows": 1, "slots": 2**18, "buckets": (64,)}
    plans = [plan(tensor=2, **asked).plan] + [
        plan(spec=tmp_path / name, **asked).plan for name in ("one.toml", "tokens.toml")
    ]
    whole, split, tokens = (each.stages[0] for each in plans)
    assert [each.pool for each in (split, tokens)] == [whole.pool // 4] * 2
    for each in (split, tokens):
        (load,), (alone,) = each.load.attention, whole.load.attention
        assert (load.slot_ops, load.slot_bytes) == (alone.slot_ops / 4, alone.slot_bytes / 4)
    assert (split.load.token_ops, tokens.load.token_ops) == (whole.load.token_ops, whole.load.token_ops / 4)


@pytest.mark.parametrize(("rows", "vocabulary"), [(8, 12_800), (16, 5120)])
def test_the_sampler_reads_logits_as_often_as_predicted(rows, vocabulary):
    """XLA counts three look-ups of a block as if they read all of the logits; CPUs read them once more."""
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
    numbers, history = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (rows, 64)))
    choose = jax.jit(partial(sampler.sample, variant=SamplerVariant.PLAIN))
    counted = choose.lower(logits, sampler.empty_rows(rows), numbers, history).compile().cost_analysis()
    passes = counted["bytes accessed"] / (4 * rows * vocabulary) - 3
    assert SAMPLER_PASSES < passes < SAMPLER_PASSES + 1.5
