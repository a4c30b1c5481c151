"""One process, many devices: the same answers however a model is laid out, and programs that do no needless work."""

import dataclasses
import re
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.iteration import SamplerVariant
from jaxserve.planning import compiled as planned
from jaxserve.planning import hlo
from jaxserve.request import Request
from jaxserve.runner import rings
from jaxserve.runner.lowering import StagePrograms
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import VOCAB
from tests.fixtures.traffic import Answers, run, traffic

SIZES = {  # by the names of all families
    "vocab_size": 104,
    "hidden_size": 32,
    "n_embd": 32,
    "eos_token_id": 2,
    "n_head": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_positions": 96,
    "max_position_embeddings": 96,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "rotary_pct": 0.5,
    "word_embed_proj_dim": 16,
}
CONFIG = EngineConfig(max_rows=4, block_size=4, slots=200, buckets=(12,), max_context=96)
REQUESTS = 40
LAYOUTS = [(tensor, stages) for tensor in (1, 2, 4, 8) for stages in range(1, 9) if 1 < tensor * stages <= 8]
assert SIZES["vocab_size"] >= VOCAB  # of the traffic


def config_of(family: str, num_layers: int) -> models.ModelConfig:
    return models.parse_config({"model_type": family, "n_layer": num_layers, "num_hidden_layers": num_layers, **SIZES})


def settings(policy: Any, tensor: int = 1, stages: int = 1, **changes) -> EngineConfig:
    return dataclasses.replace(CONFIG, slot_policy=policy, tensor=tensor, stages=stages, **changes)


@cache
def params_of(family: str, num_layers: int):
    """Random weights, large enough that the model prefers some tokens to others."""
    tree = models.build(config_of(family, num_layers)).init(0, jnp.float32)
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, tree)


def make(family: str, num_layers: int, config: EngineConfig) -> Engine:
    return Engine.from_params(config_of(family, num_layers), params_of(family, num_layers), config)


@cache
def alone(family: str, num_layers: int) -> Answers:
    """What one device answers."""
    return run(make(family, num_layers, settings("reserve")), traffic(REQUESTS, scored=True))


def check_same(engine: Engine, family: str, num_layers: int) -> None:
    expected, answers = alone(family, num_layers), run(engine, traffic(REQUESTS, scored=True))
    load = engine.load()
    assert load.compiled_after_ready == 0
    assert load.slots_used == 0
    assert load.cached_tokens > 0
    different = [name for name, tokens in expected.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= REQUESTS // 40  # a draw or a choice within a hair of the next
    for name, tokens in expected.tokens.items():
        pairs = zip(tokens, answers.tokens[name], strict=name not in different)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
        np.testing.assert_allclose(answers.logprobs[name][:same], expected.logprobs[name][:same], atol=1e-4)
        np.testing.assert_allclose(answers.prompt_logprobs[name], expected.prompt_logprobs[name], atol=1e-4)
        for each in (answers, expected):
            np.testing.assert_allclose(each.embeddings.get(name, ()), expected.embeddings.get(name, ()), atol=1e-4)
        if name not in different:
            assert answers.reasons[name] == expected.reasons[name]


@pytest.fixture(scope="module")
def six() -> Engine:
    """Three stages of two devices."""
    return make("bloom", 4, settings("reserve", 2, 3, layers_per_stage=(1, 1, 2), slots=640))


@pytest.mark.long
def test_three_stages_of_two_devices_answer_as_one_device(six) -> None:
    check_same(six, "bloom", 4)


@pytest.mark.long
def test_two_stages_of_four_devices_answer_as_one_device() -> None:
    check_same(make("gpt2", 3, settings("grow", 4, 2)), "gpt2", 3)


@pytest.mark.parametrize("family", [pytest.param("gpt_neox", marks=pytest.mark.exhaustive), "opt"])
@pytest.mark.long
def test_two_stages_of_two_devices_answer_as_one_device(family) -> None:
    check_same(make(family, 2, settings("grow", 2, 2)), family, 2)


@pytest.mark.long
@pytest.mark.parametrize(("family", "stages"), [("llama", 1), ("mixtral", 2)])
def test_four_devices_with_two_key_heads_answer_as_one(family, stages) -> None:
    engine = make(family, 2, settings("grow", 4, stages))
    check_same(engine, family, 2)
    given, held = params_of(family, 2), engine._loops[0].pipeline.params
    jax.tree.map(np.testing.assert_array_equal, held, given)


@pytest.mark.long
def test_experts_on_devices_of_their_own_answer_as_one(tmp_path) -> None:
    (tmp_path / "experts.toml").write_text('[axes]\nexpert = "tensor"\nffn = "none"\n')
    engine = make("mixtral", 2, settings("reserve", 4, sharding=str(tmp_path / "experts.toml")))
    check_same(engine, "mixtral", 2)
    gate = engine._loops[0].pipeline.stages[0].params["layers"][0]["experts"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (1, 64, 32)


@pytest.mark.long
def test_experts_of_some_layers_lie_otherwise(tmp_path) -> None:
    rules = 'axes.ffn = "none"\naxes.expert = "tensor"\n[parameters."layers.0-0.*"]\nffn = "tensor"\nexpert = "none"\n'
    (tmp_path / "experts.toml").write_text(rules)
    engine = make("mixtral", 2, settings("reserve", 4, sharding=str(tmp_path / "experts.toml")))
    check_same(engine, "mixtral", 2)
    (stage,) = engine._loops[0].pipeline.stages
    parts = [
        layer["experts"]["gate"]["kernel"].sharding.shard_shape((4, 64, 32))
        for layer in stage.params["layers"].values()
    ]
    assert parts == [(4, 16, 32), (1, 64, 32)]
    found = hlo.collectives(stage.programs.lower_forward(12, 8).compile().as_text() or "")
    assert planned.count_kinds(found) == {"all-reduce": 2 * 2 + 1}


@pytest.mark.long
def test_answers_do_not_depend_on_rules(tmp_path) -> None:
    rules = """
        [mesh]
        fsdp = 2
        [axes]
        vocab = "none"
        ffn = ["fsdp", "tensor"]
        [parameters."layers.1-2.up.*"]
        ffn = "none"
        [activations]
        tokens = "tensor"
        [pool]
        heads = "none"
    """
    (tmp_path / "rules.toml").write_text(rules)
    engine = make("gpt2", 3, settings("grow", 2, sharding=str(tmp_path / "rules.toml")))
    check_same(engine, "gpt2", 3)
    (stage,) = engine._loops[0].pipeline.stages
    exceptions = [stage.params["layers"][layer]["up"] for layer in (1, 2)]
    for leaf in jax.tree.leaves((stage.params["embed"], exceptions, stage.pool)):
        assert leaf.is_fully_replicated
    assert not stage.params["layers"][0]["up"]["kernel"].is_fully_replicated


@pytest.mark.long
def test_gathered_weights_answer_as_one_device(tmp_path) -> None:
    (tmp_path / "fsdp.toml").write_text('mesh.fsdp = 2\naxes.embed = "fsdp"\ngather.weights = "fsdp"\n')
    engine = make("gpt2", 3, settings("grow", 2, sharding=str(tmp_path / "fsdp.toml")))
    check_same(engine, "gpt2", 3)
    kernel = engine._loops[0].pipeline.stages[0].params["layers"][0]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (64, 16)


@pytest.mark.long
@pytest.mark.parametrize(("family", "split"), [("bloom", "embed"), ("llama", "embed"), ("gpt2", "tokens")])
def test_products_around_a_ring_answer_as_one_device(family, split, tmp_path, monkeypatch) -> None:
    """By tokens, as on GPUs, too."""
    monkeypatch.setitem(rings.SPLIT, "cpu", split)
    monkeypatch.setattr(rings, "FEWEST_TOKENS", 1)
    (tmp_path / "rings.toml").write_text(f'[activations]\n{split} = "tensor"\n')
    engine = make(family, 2, settings("grow", 4, sharding=str(tmp_path / "rings.toml")))
    check_same(engine, family, 2)
    (stage,) = engine._loops[0].pipeline.stages
    found = hlo.collectives(stage.programs.lower_forward(12, 8).compile().as_text() or "")
    assert planned.count_kinds(found)["collective-permute"] == 2 * 4 * 3  # layers, products, steps


@pytest.mark.weekly
@pytest.mark.parametrize("policy", ["grow", "reserve"])
@pytest.mark.parametrize("family", models.families())
@pytest.mark.parametrize(("tensor", "stages"), LAYOUTS)
def test_every_layout_of_eight_devices_answers_as_one(family, policy, tensor, stages) -> None:
    check_same(make(family, 8, settings(policy, tensor, stages)), family, 8)


def lowered(family: str, tensor: int = 1, stages: int = 1, num_layers: int = 2, **changes) -> list[StagePrograms]:
    """The stages' programs; nothing is on a device."""
    config = dataclasses.replace(config_of(family, num_layers), **changes)
    return startup.replica_programs(settings("grow", tensor, stages), models.build(config))[0][0]


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, str]]:
    """Kind and result of every collective of a program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf"= (\S+?)(?:\{{[\d,]*\}})? ({kinds})(?:-start)?\(", compiled.as_text() or "")


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("family", "bucket"), [("bloom", 12), ("gpt2", 256)])
def test_collectives_of_a_layer_and_the_head(family, bucket) -> None:
    (stage,) = lowered(family, tensor=2)
    compiled = stage.lower_forward(bucket, 2048).compile()
    found = Counter(kind for _, kind in collectives(compiled))
    assert found == {"all-reduce": 2 * 2 + 1}  # one more for the tokens' embeddings
    for points in (1, 4):
        assert collectives(stage.lower_head(points).compile()) == [
            (f"f32[{points},{SIZES['vocab_size']}]", "all-gather")
        ]
    memory = compiled.memory_analysis()
    assert memory is not None
    pool = sum(leaf.size // 2 * leaf.dtype.itemsize for leaf in jax.tree.leaves(stage.pool(2048)))
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 2


@pytest.mark.usefixtures("optimized")
def test_a_stage_in_the_middle_gathers_nothing() -> None:
    middle = lowered("bloom", tensor=2, stages=3, num_layers=3)[1]
    assert Counter(kind for _, kind in collectives(middle.lower_forward(12, 64).compile())) == {"all-reduce": 2}


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_scoring_and_choosing_gather_no_weights() -> None:
    (stage,) = lowered("gpt2", tensor=2, num_layers=1, vocab_size=20_000)
    for shape, _ in collectives(stage.lower_score(12).compile()):
        assert "20000" not in shape
        assert "10000" not in shape
    assert not collectives(stage.lower_choose(4, SamplerVariant.CONSTRAINED).compile())


def test_a_stage_holds_its_layers_and_no_more(six) -> None:
    stages = six._loops[0].pipeline.stages
    assert [sorted(stage.params["layers"]) for stage in stages] == [[0], [1], [2, 3]]
    assert [sorted(stage.params) for stage in stages] == [["embed", "layers"], ["layers"], ["embed", "head", "layers"]]
    assert sorted(stages[2].params["embed"]) == ["tokens"]  # the head; the embedding's norm is the first stage's
    for index, stage in enumerate(stages):
        mine = set(jax.devices()[2 * index : 2 * index + 2])
        for leaf in jax.tree.leaves((stage.params, stage.pool)):
            assert set(leaf.devices()) == mine
        kernel = stage.params["layers"][index]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (64, 32)
        for leaf in jax.tree.leaves(stage.pool):
            assert leaf.addressable_shards[0].data.size * 2 == leaf.size
            assert leaf.shape[0] * CONFIG.block_size == six.config.slots * len(stage.params["layers"])
    assert six.report.layers_per_stage == (1, 1, 2)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params_of("bloom", 4)))
    assert whole < six.report.weight_bytes < 1.3 * whole  # the token table twice; norms and some biases on both devices


def test_iterations_in_flight_and_token_feedback(six, monkeypatch) -> None:
    pipeline, order = six._loops[0].pipeline, []
    landed = pipeline._landed

    def note(what, call, *args):
        result = call(*args)
        order.append(what)
        return result

    for owner, name in ((pipeline, "launch"), (pipeline, "wait"), (pipeline.stages[0], "feed_back_tokens")):
        monkeypatch.setattr(owner, name, partial(note, name, getattr(owner, name)))
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [(0, Request(request_id=str(i), prompt=(5, 6, 7 + i), sampling=sampling)) for i in range(16)]
    run(six, requests)
    in_flight = most = 0
    for what in order:
        if what == "feed_back_tokens":
            landed -= 1
        elif what == "launch":
            assert landed == 0  # what has landed was fed first, and nothing else
            in_flight += 1
            most = max(most, in_flight)
        else:
            in_flight -= 1
            landed += 1
    assert most == 4


def test_new_weights_reach_every_stage(six) -> None:
    other = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, params_of("bloom", 4))
    six.update_params(other)
    for stage in six._loops[0].pipeline.stages:
        expected = jax.tree.leaves(stage.programs.model.part(other, stage.programs.layers))
        for leaf, value, wanted in zip(
            jax.tree.leaves(stage.params), expected, jax.tree.leaves(stage.programs.params()), strict=True
        ):
            np.testing.assert_array_equal(leaf, value)
            assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 3}, r"axis 'ffn' of size 128 does not divide over mesh axis 'tensor' of size 3"),
        (
            {"tensor": 4, "stages": 3},
            r"tensor 4 times stages 3 is 12, more devices than there are: 8 \(XLA_FLAGS=.*=12",
        ),
        ({"tensor": 8, "sharding": "rules.toml", "buckets": (12, 20)}, r"hidden states of 12 tokens: axis 'tokens' of"),
        ({"stages": 4}, r"stages is 4; it must be at least 1 and at most 3, the number of layers"),
        ({"stages": 2, "layers_per_stage": (3, 1)}, r"layers_per_stage is 3,1, which is 4 layers; the model has 3"),
        ({"stages": 3, "layers_per_stage": (1, 2)}, r"layers_per_stage is 1,2, which is 2 stages; stages is 3"),
    ],
)
def test_invalid_layouts_are_refused_early(changes, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text('[activations]\ntokens = "tensor"\n')
    with pytest.raises(ValueError, match=message):
        startup.replica_programs(EngineConfig(**changes), models.build(config_of("bloom", 3)))
