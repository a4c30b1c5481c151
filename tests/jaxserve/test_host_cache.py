"""Blocks that were evicted come back from host memory: the answers are those of an engine that computes them again."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.multihost.config import ClusterConfig, check_settings
from jaxserve.request import Request
from jaxserve.runner import host_blocks
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.slot_pool import SlotPool
from jaxserve.scheduler.state import allocation_of
from tests.fixtures.tiny import VOCAB, make_engine
from tests.fixtures.traffic import Answers, run, traffic
from tests.jaxserve import test_alternating_windows as alternating

MEMORY = 1 << 22
# Bitwise the same answers wherever a prefix comes from. Prompts are cut at multiples of 20; 24 blocks hold one request.
EXACT = {"deterministic": True, "slot_policy": "reserve", "slots": 96, "buckets": (24,), "max_rows": 3}


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, length).tolist())


def request(name: str, tokens: tuple[int, ...], salt: str = "") -> Request:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt=tokens, sampling=sampling, cache_salt=salt)


def ask(engine: Engine, name: str, tokens: tuple[int, ...], salt: str = "") -> tuple[list[int], list[float], int]:
    """The tokens, logprobs and cached tokens of a request that has the engine to itself."""
    answers, before = Answers(), engine.load().cached_tokens
    engine.submit(request(name, tokens, salt), answers)
    while engine.step():
        pass
    return answers.tokens[name], answers.logprobs[name], engine.load().cached_tokens - before


def evict(engine: Engine) -> None:
    """Fill the pool with other prompts."""
    for seed in (101, 102):
        ask(engine, f"other{seed}", prompt(seed, 80))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8"},
        pytest.param({"attention": "xla"}, marks=pytest.mark.long),
        pytest.param({"stages": 2}, marks=pytest.mark.long),
        pytest.param({"tensor": 3, "attention": "xla"}, marks=pytest.mark.long),
        pytest.param({"tensor": 3, "stages": 2, "kv_cache_dtype": "int8"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_comes_back_is_what_was_stored(params, settings) -> None:
    engine = make_engine(params, host_cache=MEMORY, **EXACT, **settings)
    tokens = prompt(1, 60)
    *cold, cached = ask(engine, "cold", tokens)
    assert cached == 0
    *warm, on_device = ask(engine, "warm", tokens)
    assert on_device == 40
    evict(engine)
    assert engine.load().host_cache_loaded == 0
    *back, from_host = ask(engine, "back", tokens)
    assert from_host == on_device
    assert cold == warm == back  # to the bit
    load = engine.load()
    assert load.host_cache_loaded == on_device // 4
    assert load.host_cache_stored >= load.host_cache_blocks > 0
    assert load.host_cache_corrupt == load.compiled_after_ready == load.slots_used == 0
    checksums = 8 * settings.get("stages", 1) * settings.get("tensor", 1)
    assert load.host_cache_bytes == load.host_cache_blocks * (engine.report.pool_bytes // 24 + checksums)


def test_other_salts_find_nothing(params) -> None:
    engine = make_engine(params, host_cache=MEMORY, **EXACT)
    tokens = prompt(1, 60)
    ask(engine, "one", tokens, "one")
    evict(engine)
    assert ask(engine, "two", tokens, "two")[2] == 0
    evict(engine)
    assert ask(engine, "again", tokens, "one")[2] == 40


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_corrupt_block_is_computed_again(params, stage) -> None:
    engine = make_engine(params, host_cache=MEMORY, stages=2, **EXACT)
    tokens = prompt(1, 60)
    *cold, _ = ask(engine, "cold", tokens)
    evict(engine)
    host, pool = engine._loops[0]._host, engine._loops[0].scheduler.pool
    assert isinstance(pool, SlotPool)
    assert host is not None
    assert pool.host is not None
    key = pool.host._keys[0, allocation_of(request("", tokens)).digests(6, pool.block_size)[5]]  # the sixth block
    part = host.held[key][stage]
    assert part is not None
    leaves, tree = jax.tree.flatten(part.data)
    flipped = np.array(leaves[-1])
    flipped.view(np.uint8).reshape(-1)[-1] ^= 1
    leaves[-1] = jax.device_put(flipped, leaves[-1].sharding)
    host.held[key][stage] = part._replace(data=jax.tree.unflatten(tree, leaves))
    *back, cached = ask(engine, "back", tokens)
    assert back == cold
    assert cached == 20  # of the chunks of 20 tokens, the one without the corrupt block
    assert engine.load().host_cache_corrupt == 1
    evict(engine)
    assert ask(engine, "later", tokens)[2] == 40  # stored anew


def test_answers_under_load_are_those_without(params) -> None:
    arrivals = traffic(120)
    expected = run(make_engine(params, slots=112), arrivals)
    engine = make_engine(params, slots=112, host_cache=MEMORY)
    answers, load = run(engine, arrivals), engine.load()
    different = [name for name, tokens in expected.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= 1  # a draw or a choice within a hair of the next
    assert (load.slots_used, load.compiled_after_ready, load.host_cache_corrupt) == (0, 0, 0)
    assert load.host_cache_loaded > 50


@pytest.mark.long
def test_layers_with_a_window_come_back_too() -> None:
    expected = run(alternating.make(), alternating.arrivals())
    engine = alternating.make(slots=112, host_cache=MEMORY, stages=2)
    answers, load = run(engine, alternating.arrivals()), engine.load()
    different = [name for name, tokens in expected.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= 1
    assert (load.slots_used, load.host_cache_corrupt) == (0, 0)
    assert load.host_cache_loaded > 10


def test_few_copies_are_on_their_way_at_a_time(params, monkeypatch) -> None:
    monkeypatch.setattr(host_blocks, "DEVICE_BYTES", 1)
    engine = make_engine(params, host_cache=MEMORY, **EXACT)
    tokens = prompt(1, 80)
    *cold, _ = ask(engine, "cold", tokens)
    evict(engine)
    *back, cached = ask(engine, "back", tokens)
    assert (back, cached) == (cold, 60)  # more than the 8 blocks of a launch, one launch after another


def test_new_weights_forget_the_host_too(params) -> None:
    engine = make_engine(params, host_cache=MEMORY, **EXACT)
    tokens = prompt(1, 60)
    ask(engine, "cold", tokens)
    evict(engine)
    engine.update_params(jax.tree.map(lambda leaf: leaf * 1.01, params))
    assert engine.load().host_cache_bytes == 0
    assert ask(engine, "again", tokens)[2] == 0
    host = engine._loops[0]._host
    assert host is not None
    assert len(host.held) == engine.load().host_cache_blocks


def test_settings_that_do_not_go_with_it(params) -> None:
    with pytest.raises(ValueError, match=r"^host_cache is 5 without prefix_cache"):
        EngineConfig(host_cache=5, prefix_cache=False)
    with pytest.raises(ValueError, match=r"^host_cache is 5; with scheduler request it must be None"):
        EngineConfig(host_cache=5, scheduler="request")
    with pytest.raises(ValueError, match=r"^host_cache is 5 bytes, less than one block of \d+"):
        make_engine(params, host_cache=5)
    cluster = ClusterConfig(hosts=2, host=0, coordinator="a:1", shared_secret=b"s" * 32)
    with pytest.raises(ValueError, match=r"^host_cache is 5; several hosts support none"):
        check_settings(EngineConfig(host_cache=5, stages=2), cluster)
