"""Every feature of the engine on a family with grouped heads and on one with experts."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models, startup, weights
from jaxserve.engine import Engine
from jaxserve.multihost import flight_recorder, flight_replay
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.ngrams import NgramIndex
from jaxserve.startup import silent
from jaxserve.weights import is_matrix, placement
from tests.fixtures.texts import check_texts, constrained, printable_tokenizer
from tests.fixtures.tiny import CONFIG, VOCAB
from tests.fixtures.traffic import Answers, run, traffic
from tests.jaxserve.multihost.processes import group
from tests.jaxserve.multihost.real_host import ABORTED, CONSTRAINED, REQUESTS, as_json, config_of, requests
from tests.jaxserve.multihost.real_host import run as run_as_host
from tests.jaxserve.multihost.test_hosts import REAL, check_same
from tests.jaxserve.test_deterministic import SETTINGS, answers_of, ask
from tests.jaxserve.test_drafted_answers import drafter_of, propose_by

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "sliding_window": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 2,
}
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss")
COUNT = 40
long = pytest.mark.long


@cache
def model_of(family: str, **changes) -> tuple[models.ModelConfig, Any]:
    """Random weights, large enough that the model prefers some tokens to others."""
    config = models.parse_config({"model_type": family, **SIZES, **changes})
    tree = models.build(config).init(0, jnp.float32)
    return config, jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, tree)


def make(family: str, params: Any = None, *, grammars: bool = False, **settings) -> Engine:
    config, own = model_of(family)
    settings = dataclasses.replace(CONFIG, **{"slots": 320} | settings)
    tokenizer = printable_tokenizer() if grammars else None
    return Engine.from_params(config, params or own, settings, tokenizer=tokenizer)


@cache
def plain(family: str) -> Answers:
    """What an engine without any of the features answers."""
    return run(make(family), traffic(COUNT))


def check_as_plain(family: str, answers: Answers, allowed: int = COUNT // 40) -> None:
    expected = plain(family)
    different = [name for name, tokens in expected.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= allowed  # a draw or a choice within a hair of the next
    for name in expected.tokens.keys() - set(different):
        np.testing.assert_allclose(answers.logprobs[name], expected.logprobs[name], atol=1e-4)
        assert answers.reasons[name] == expected.reasons[name]


def check_ended(engine: Engine) -> None:
    load = engine.load()
    assert (load.slots_used, load.compiled_after_ready) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"stages": 2}, marks=long, id="stages"),
        pytest.param({"replicas": 2}, marks=long, id="replicas"),
        pytest.param({"replicas": 2, "stages": 2}, marks=long, id="replicas of stages"),
    ],
)
def test_the_same_answers_on_more_devices(family, settings) -> None:
    engine = make(family, **settings)
    check_as_plain(family, run(engine, traffic(COUNT)))
    assert all(each.iterations for each in engine.loads())
    check_ended(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", ["ngram", "model"])
@long
def test_the_same_answers_with_drafts(family, drafter, tmp_path) -> None:
    if drafter == "ngram":
        engine = make(family, speculate="ngram", speculate_tokens=7, slots=112)
        propose_by(engine, NgramIndex)
    else:
        weights.write_hf(tmp_path, *model_of(family))
        engine = make(family, speculate=str(tmp_path), speculate_tokens=5, slots=112)
        drafter_of(engine)
    check_as_plain(family, run(engine, traffic(COUNT)))
    load = engine.load()
    assert load.preemptions > 0
    assert load.accepted_tokens > (0 if drafter == "ngram" else 0.98 * load.drafted_tokens)
    assert load.drafted_tokens > 20
    check_ended(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"speculate": "ngram"}, {"stages": 2}], ids=["alone", "drafts", "stages"])
@long
def test_texts_are_held_to_grammars_and_nobody_notices(family, settings) -> None:
    engine, asked = make(family, grammars=True, **settings), constrained(20, 60)
    answers = run(engine, traffic(COUNT) + [(step, request) for step, request, _ in asked.values()])
    check_texts(answers, asked)
    check_as_plain(family, answers)
    check_ended(engine)


@pytest.mark.parametrize("family", FAMILIES)
@long
def test_answers_are_one_to_the_bit(family) -> None:
    # Wide enough that sums are taken in different orders by different programs.
    config, params = model_of(family, hidden_size=192, intermediate_size=256, moe_intermediate_size=128, num_experts=8)
    engine = Engine.from_params(config, params, dataclasses.replace(CONFIG, deterministic=True, **SETTINGS))
    (alone,) = answers_of(engine, [ask("alone", 1.0)], Random(0))
    assert set(answers_of(engine, [ask(f"m{index}", 1.0) for index in range(50)], Random(1))) == {alone}
    check_ended(engine)


def scored(engine: Engine) -> list[float]:
    """The logprobs of a prompt."""
    prompt = tuple(Random(1).randrange(3, VOCAB) for _ in range(60))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    return run(engine, [(0, Request(request_id="a", prompt=prompt, sampling=sampling))]).prompt_logprobs["a"]


@pytest.mark.parametrize("family", FAMILIES)
@long
def test_int8_weights_compute_what_they_stand_for(family) -> None:
    engine = make(family, quantize="int8", scoring=True)
    wide = jax.tree.map(
        lambda leaf: leaf.values * leaf.scales[..., None] if is_matrix(leaf) else leaf,
        engine._loops[0].pipeline.params,
        is_leaf=is_matrix,
    )
    reference = make(family, wide, scoring=True)
    found, before = scored(engine), scored(make(family, scoring=True))
    np.testing.assert_allclose(found, scored(reference), atol=2e-4)
    assert 1e-3 < np.abs(np.subtract(found, before)).max() < 0.1
    expected, answers = (run(each, traffic(COUNT)).tokens for each in (reference, engine))
    assert sum(answers[name] != tokens for name, tokens in expected.items()) <= COUNT // 20
    check_ended(engine)


@pytest.mark.parametrize("family", FAMILIES)
@long
def test_an_int8_pool_changes_answers_little(family) -> None:
    engine = make(family, kv_cache_dtype="int8", slots=112, scoring=True)
    off = np.abs(np.subtract(scored(engine), scored(make(family, scoring=True))))
    assert 0 < off.max() < 0.1
    assert off.mean() < 0.02
    alone, fresh = Answers(), make(family, kv_cache_dtype="int8", scoring=True, prefix_cache=False)
    for _, request in traffic(COUNT):
        fresh.submit(request, alone)
        while fresh.step():
            pass
    answers = run(engine, traffic(COUNT))
    assert engine.load().preemptions > 0
    # float32 in another order may round to another of 255 values
    assert sum(answers.tokens[name] != tokens for name, tokens in alone.tokens.items()) <= COUNT // 40
    check_ended(engine)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("source", ["memory", "hugging face", "orbax"])
@long
def test_kernels_of_experts_in_another_order_in_memory(source, quantize, tmp_path, monkeypatch) -> None:
    """As a TPU holds them: weights of all sources are laid out so, and the answers are the same."""
    family, path = "qwen3_moe", tmp_path / "model"
    config, params = model_of(family)
    settings = dataclasses.replace(CONFIG, slots=320, dtype="float32", quantize=quantize)
    expected = run(Engine.from_params(config, params, settings), traffic(8))
    monkeypatch.setattr(placement, "LAID_OUT", {"cpu"})
    monkeypatch.setattr(startup, "program_cache", lambda config: None)  # their programs are told apart by the platform
    if source == "memory":
        engine = Engine.from_params(config, params, settings)
    else:
        weights.write_hf(path, config, params)
        if source == "orbax":
            weights.convert(path, tmp_path / "saved")
            path = tmp_path / "saved"
        engine = Engine.from_checkpoint(path, settings)

    def orders() -> set[tuple[int, ...]]:
        held = engine._loops[0].pipeline.stages[0].params["layers"][1]["experts"]["up"]["kernel"]
        return {leaf.format.layout.major_to_minor for leaf in jax.tree.leaves(held)}

    assert orders() == ({(0, 2, 1)} if quantize is None else {(0, 2, 1), (0, 1)})
    assert run(engine, traffic(8)).tokens == expected.tokens
    engine.update_params(params)
    assert (0, 2, 1) in orders()
    assert run(engine, traffic(8)).tokens == expected.tokens


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    weights.write_hf(path, *model_of(request.param, vocab_size=104))
    (path / "tokenizer.json").write_text(printable_tokenizer().to_json())
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("checkpoint", "hosts", "stages"),
    # Each family is split in one way daily, and in the other weekly.
    [
        pytest.param(name, 2, stages, id=f"{way}-{name}", marks=pytest.mark.weekly if (i + stages) % 2 else ())
        for stages, way in ((2, "stages"), (1, "tensor"))
        for i, name in enumerate(FAMILIES)
    ],
    indirect=["checkpoint"],
)
def test_hosts_answer_as_one_and_replay(checkpoint, hosts, stages, tmp_path) -> None:
    told = {"model": str(checkpoint), "tensor": hosts // stages, "stages": stages}
    with group(REAL, [told] * hosts, tmp_path, JAX_PLATFORMS="cpu") as running:
        outcome = running[0].until(lambda line: "answers" in line)
        assert [host.code() for host in running] == [0] * hosts
    alone = run_as_host(Engine.from_checkpoint(checkpoint, config_of({})), requests())
    check_same(outcome, as_json(alone))
    given = Answers()
    given.tokens = outcome["answers"]["tokens"]
    given.reasons = {name: FinishReason(reason) for name, reason in outcome["answers"]["reasons"].items()}
    check_texts(given, constrained(CONSTRAINED, traffic(REQUESTS)[-1][0]))
    recording = flight_recorder.read(Path(outcome["records"][0]))
    found = flight_replay.replay(recording, checkpoint, cache=None, progress=silent)
    assert found.iterations == len(recording.entries) > 100
    assert found.unanswered == 0
    assert found.requests >= REQUESTS - len(ABORTED)
    assert len(found.differences) <= REQUESTS // 40
