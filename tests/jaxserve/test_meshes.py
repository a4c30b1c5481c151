"""One process, many devices: the same answers however a model is laid out, and programs that do no needless work."""

import re
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup, weights
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.lowering import StagePrograms
from jaxserve.request import Request, SamplingParams
from tests.fixtures import parity
from tests.fixtures.tiny import VOCAB
from tests.fixtures.traffic import Answers, run, traffic

SIZES = {"vocab_size": 104, "hidden_size": 32, "n_embd": 32, "n_head": 8, "n_positions": 96, "eos_token_id": 2}
CONFIG = EngineConfig(max_rows=4, block_size=4, buckets=(12,), max_context=96)
SLOTS = {"grow": 160, "reserve": 320}
REQUESTS = 40
LAYOUTS = [(tensor, stages) for tensor in (1, 2, 4, 8) for stages in range(1, 9) if 1 < tensor * stages <= 8]
assert SIZES["vocab_size"] >= VOCAB  # of the traffic


def config_of(family: str, num_layers: int) -> models.ModelConfig:
    return models.parse_config({"model_type": family, "n_layer": num_layers, **SIZES})


def settings(policy: str, tensor: int = 1, stages: int = 1, layers_per_stage=None) -> EngineConfig:
    changes = {"slots": SLOTS[policy], "slot_policy": policy, "tensor": tensor, "stages": stages}
    fields = {name: getattr(CONFIG, name) for name in EngineConfig.__dataclass_fields__}
    return EngineConfig(**{**fields, **changes, "layers_per_stage": layers_per_stage})


@cache
def params_of(family: str, num_layers: int):
    """Random weights, large enough that the model prefers some tokens to others."""
    tree = models.build(config_of(family, num_layers)).init(0, jnp.float32)
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, tree)


def serve(family: str, num_layers: int, config: EngineConfig) -> tuple[Engine, Answers]:
    engine = Engine.from_params(config_of(family, num_layers), params_of(family, num_layers), config)
    return engine, run(engine, traffic(REQUESTS, scored=True))


@cache
def alone(family: str, num_layers: int) -> Answers:
    """What one device answers."""
    return serve(family, num_layers, settings("reserve"))[1]


def check_same(family: str, num_layers: int, config: EngineConfig) -> None:
    engine, answers = serve(family, num_layers, config)
    expected = alone(family, num_layers)
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
        if name not in different:
            assert answers.reasons[name] == expected.reasons[name]


@pytest.mark.parametrize(
    ("family", "policy", "tensor", "stages", "layers_per_stage"),
    [("bloom", "grow", 2, 2, (1, 2)), ("gpt2", "reserve", 4, 1, None), ("gpt2", "grow", 1, 3, None)],
)
def test_many_devices_answer_as_one(family, policy, tensor, stages, layers_per_stage) -> None:
    check_same(family, 3, settings(policy, tensor, stages, layers_per_stage))


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", SLOTS)
@pytest.mark.parametrize("family", ["bloom", "gpt2"])
@pytest.mark.parametrize(("tensor", "stages"), LAYOUTS)
def test_every_layout_of_eight_devices_answers_as_one(family, policy, tensor, stages) -> None:
    check_same(family, 8, settings(policy, tensor, stages))


def lowered(family: str, tensor: int = 1, stages: int = 1, num_layers: int = 3, **changes) -> list[StagePrograms]:
    """The stages' programs; nothing is on a device."""
    config = models.parse_config({"model_type": family, "n_layer": num_layers, **SIZES, **changes})
    return list(startup.plan(settings("grow", tensor, stages), models.build(config)).stages)


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, str]]:
    """Kind and result of every collective of a program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf"= (\S+?)(?:\{{[\d,]*\}})? ({kinds})(?:-start)?\(", compiled.as_text() or "")


@pytest.mark.parametrize("bucket", [12, 256])
@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_a_layer_needs_two_all_reduces_and_nothing_is_gathered_but_logits(family, bucket) -> None:
    (stage,) = lowered(family, tensor=2)
    compiled = stage.lower_forward(bucket, 512).compile()
    found = Counter(kind for _, kind in collectives(compiled))
    assert found == {"all-reduce": 2 * 3 + 1, "all-gather": 1}  # one more for the tokens' embeddings
    (gathered,) = [shape for shape, kind in collectives(compiled) if kind == "all-gather"]
    assert gathered == f"f32[4,{SIZES['vocab_size']}]"
    memory = compiled.memory_analysis()
    assert memory is not None
    pool = sum(leaf.size // 2 * leaf.dtype.itemsize for leaf in jax.tree.leaves(stage.pool(512)))
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 2


def test_a_stage_in_the_middle_gathers_nothing() -> None:
    middle = lowered("bloom", tensor=2, stages=3)[1]
    assert Counter(kind for _, kind in collectives(middle.lower_forward(12, 64).compile())) == {"all-reduce": 2}


def test_scoring_and_choosing_gather_no_weights() -> None:
    (stage,) = lowered("gpt2", tensor=2, vocab_size=20_000)
    for shape, _ in collectives(stage.lower_score(12).compile()):
        assert "20000" not in shape
        assert "10000" not in shape
    assert not collectives(stage.lower_choose(4, startup.SamplerVariant.FULL).compile())


def test_a_stage_holds_its_layers_and_no_more() -> None:
    config = settings("grow", tensor=2, stages=3)
    engine = Engine.from_params(config_of("bloom", 3), params_of("bloom", 3), config)
    stages = engine._pipeline.stages
    assert [sorted(stage.params["layers"]) for stage in stages] == [[0], [1], [2]]
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
            assert leaf.shape[0] * 4 == SLOTS["grow"]
    assert engine.report.layers_per_stage == (1, 1, 1)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params_of("bloom", 3)))
    assert whole < engine.report.weight_bytes < 1.3 * whole  # the token table twice, norms and some biases on both devices


@pytest.mark.parametrize("saved", ["hugging face", "orbax"])
@pytest.mark.parametrize("name", ["bloom-4-heads", "gpt2-untied"])
def test_checkpoints_are_read_to_where_they_are_used(name, saved, tmp_path) -> None:
    path = parity.read(parity.FOLDER / f"{name}.json").write(tmp_path / "model")
    model = models.build(weights.read_config(path))
    whole = weights.load(path, model, jnp.dtype("float32"))
    if saved == "orbax":
        weights.convert(path, tmp_path / "saved")
        path = tmp_path / "saved"
    stages = startup.plan(EngineConfig(tensor=2, stages=2, dtype="float32"), model).stages
    params = weights.load(path, model, jnp.dtype("float32"), place=startup.placement(stages))
    for stage in stages:
        part = model.part(params, stage.layers)
        expected = jax.tree.leaves(model.part(whole, stage.layers))
        for wanted, leaf, value in zip(jax.tree.leaves(stage.params()), jax.tree.leaves(part), expected, strict=True):
            np.testing.assert_array_equal(leaf, value)
            is_table = model.config.tie_embeddings and leaf.shape[0] == model.config.vocab_size
            assert leaf.sharding == wanted.sharding or (is_table and stage.is_last)


def test_stages_work_on_other_rows_and_tokens_go_back_when_they_are_known(monkeypatch) -> None:
    config = settings("grow", stages=3)
    engine = Engine.from_params(config_of("gpt2", 3), params_of("gpt2", 3), config)
    pipeline, order, rows = engine._pipeline, [], {}

    def note(what, call, *args):
        order.append((what, args[0].sequence if what == "launch" else None))
        return call(*args)

    def waited(call):
        plan, result = call()
        order.append(("wait", plan.sequence))
        return plan, result

    launch = pipeline.launch
    monkeypatch.setattr(pipeline, "wait", partial(waited, pipeline.wait))
    monkeypatch.setattr(pipeline, "launch", partial(note, "launch", launch))
    monkeypatch.setattr(pipeline.stages[0], "feed", partial(note, "feed", pipeline.stages[0].feed))
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [(0, Request(request_id=str(i), prompt=(5, 6, 7 + i), sampling=sampling)) for i in range(16)]
    run(engine, requests)
    in_flight, landed, most = [], 0, 0
    for what, sequence in order:
        if what == "launch":
            in_flight.append(sequence)
            most = max(most, len(in_flight))
            assert landed == 0  # what has landed is fed before anything is launched
        elif what == "wait":
            assert sequence == in_flight.pop(0)
            landed += 1
        else:
            landed -= 1
    assert most == 4
    del rows


def test_new_weights_reach_every_stage() -> None:
    config = settings("reserve", tensor=2, stages=2)
    engine = Engine.from_params(config_of("bloom", 3), params_of("bloom", 3), config)
    other = models.build(config_of("bloom", 3)).init(1, jnp.float32)
    engine.update_params(jax.tree.map(np.asarray, other))
    for stage in engine._pipeline.stages:
        expected = jax.tree.leaves(stage.programs.model.part(other, stage.programs.layers))
        for leaf, value, wanted in zip(
            jax.tree.leaves(stage.params), expected, jax.tree.leaves(stage.programs.params()), strict=True
        ):
            np.testing.assert_array_equal(leaf, value)
            assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 3}, r"axis 'heads' of size 8 does not divide over mesh axis 'tensor' of size 3"),
        ({"tensor": 4, "stages": 3}, r"3 stages of 4 devices are 12 devices; there are 8 \(XLA_FLAGS=.*=12"),
        ({"stages": 4}, r"stages is 4; it must be at least 1 and at most 3, the number of layers"),
        ({"stages": 2, "layers_per_stage": (3, 1)}, r"layers_per_stage is 3,1, which are 4 layers; the model has 3"),
        ({"stages": 3, "layers_per_stage": (1, 2)}, r"layers_per_stage is 1,2, which are 2 stages; stages is 3"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_a_weight_is_read(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        startup.plan(EngineConfig(**changes), models.build(config_of("bloom", 3)))
