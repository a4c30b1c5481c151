"""Engines that hold keys and values in eight bits: half the memory, nearly the same answers, the same guarantees."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fixtures.tiny import BLOOM, VOCAB, make_engine, opinionated
from tests.fixtures.traffic import Answers, each_alone, run, traffic

REQUESTS = 50


@cache
def params():
    return opinionated(0)


def make(dtype: str, **settings) -> Engine:
    return make_engine(params(), kv_cache_dtype=dtype, **{"buckets": (12,), "slots": 320} | settings)


@cache
def alone() -> Answers:
    """Each request's own run with an int8 pool."""
    return each_alone(make("int8", prefix_cache=False), (request for _, request in traffic(REQUESTS)))


def check_as_alone(engine: Engine) -> None:
    answers = run(engine, traffic(REQUESTS))
    assert engine.load().cached_tokens > 0
    assert engine.load().slots_used == 0
    assert engine.load().compiled_after_ready == 0
    different = [name for name, tokens in alone().tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= REQUESTS // 50  # float32 in another order may round to another of 255 values


@pytest.mark.parametrize(("policy", "slots"), [pytest.param("reserve", 320, marks=pytest.mark.long), ("grow", 112)])
def test_under_load_as_alone(policy, slots) -> None:
    engine = make("int8", slot_policy=policy, slots=slots)
    check_as_alone(engine)
    assert (engine.load().preemptions > 0) == (policy == "grow")


def test_sizes_follow_what_the_pool_holds() -> None:
    reports = {dtype: make(dtype).report for dtype in ("auto", "bfloat16", "int8")}
    assert [report.kv_cache_dtype for report in reports.values()] == ["float32", "bfloat16", "int8"]
    assert {report.slots for report in reports.values()} == {320}
    numbers = 320 * 2 * 2 * BLOOM.hidden_size  # slots, layers, keys and values
    assert reports["auto"].pool_bytes == 4 * numbers
    assert reports["bfloat16"].pool_bytes == 2 * numbers
    assert reports["int8"].pool_bytes == numbers + 4 * numbers // BLOOM.head_dim


def test_answers_change_little() -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(1).integers(3, VOCAB, 60))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logprobs = [
        run(
            make(dtype, scoring=True),
            [(0, Request(request_id="a", prompt=prompt, sampling=sampling))],
        ).prompt_logprobs["a"]
        for dtype in ("float32", "int8")
    ]
    off = np.abs(np.subtract(*logprobs))
    assert 0 < off.max() < 0.1
    assert off.mean() < 0.02


@pytest.mark.long
def test_heads_and_their_scales_are_split_over_devices() -> None:
    entries = {"model_type": "gpt2", "n_layer": 2, "vocab_size": 104, "n_embd": 32, "n_head": 8, "n_positions": 96}
    config = models.parse_config(entries)
    tree = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, models.build(config).init(0, jnp.float32))
    settings = EngineConfig(max_rows=4, block_size=4, slots=200, buckets=(12,), max_context=96, kv_cache_dtype="int8")
    one, two = (Engine.from_params(config, tree, dataclasses.replace(settings, tensor=tensor)) for tensor in (1, 2))
    assert two.report.pool_bytes == one.report.pool_bytes
    expected, answers = (run(engine, traffic(20)).tokens for engine in (one, two))
    assert sum(answers[name] != tokens for name, tokens in expected.items()) <= 1


def test_a_backend_that_cannot_hold_it_says_so(monkeypatch) -> None:
    from pallas_kernels.xla import XlaBackend

    monkeypatch.setattr(XlaBackend, "supports", lambda _self, shape: f"pool of {shape.pool_dtype}")
    with pytest.raises(ValueError, match=r"no attention backend can serve .* not xla: pool of int8"):
        make("int8")
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8'; it must be one of auto, float32, bfloat16, int8"):
        EngineConfig(kv_cache_dtype="fp8")  # type: ignore[arg-type]
