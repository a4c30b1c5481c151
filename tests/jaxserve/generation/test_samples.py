"""Several samples of one prompt, on a real engine: what they would be alone, and the prompt computed once."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequest
from jaxserve.generation.completion import Completion
from jaxserve.generation.samples import PromptScores, best, expand_samples, without_fork_scores
from jaxserve.request import Request, TokenEvent
from jaxserve.runner import kv_cache
from jaxserve.sampling_params import SamplingParams
from pallas_kernels import api
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, each_alone, run, traffic

PROMPT = tuple(3 + i * i % 90 for i in range(30))  # seven blocks of 4, and half of one


def samples(count: int, name: str = "s", prompt: tuple[int, ...] = PROMPT, **sampling) -> list[Request]:
    numbers = iter(range(count))
    chosen = SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True} | sampling)
    request = Request(request_id="", prompt=prompt, sampling=chosen)
    return expand_samples(request, count, lambda: f"{name}{next(numbers)}")


def apart(requests: list[Request]) -> list[Request]:
    return [dataclasses.replace(request, fork_of=None) for request in requests]


@pytest.fixture(scope="module")
def alone(params) -> Answers:
    """Each sample's own run, and that of other requests."""
    requests = [*apart(samples(5)), *(request for _, request in traffic(20))]
    return each_alone(make_engine(params, prefix_cache=False), requests)


# Each takes half a minute of a processor, and samples share nothing with them but the scheduler that the others hold.
COSTLY: list[dict[str, Any]] = [
    {"in_flight": 1},
    {"slots": 112},
    {"stages": 2},
    {"replicas": 2},
    {"speculate": "ngram"},
    {"max_rows": 3},
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        {"slot_policy": "reserve"},
        {"slots": 112, "prefix_cache": False, "stages": 2},
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in COSTLY),
    ],
    ids=str,
)
def test_samples_are_what_they_would_be_alone(params, alone, settings) -> None:
    engine = make_engine(params, **settings)
    arrivals = [(4, request) for request in samples(5)] + traffic(20)
    answers = run(engine, arrivals)
    different = [name for name, tokens in alone.tokens.items() if answers.tokens[name] != tokens]
    assert len(different) <= 1  # a choice that hangs on the last bits
    assert len({tuple(answers.tokens[f"s{index}"]) for index in range(5)}) == 5
    load = engine.load()
    assert (load.slots_used, load.compiled_after_ready) == (0, 0)


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_split_blocks_are_copied_locally() -> None:
    entries = {"model_type": "gpt2", "n_layer": 2, "vocab_size": 104, "n_embd": 32, "n_head": 8, "n_positions": 96}
    config = models.parse_config(entries)
    tree = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, models.build(config).init(0, jnp.float32))
    settings = EngineConfig(max_rows=6, block_size=4, slots=400, buckets=(6, 24), max_context=96, prefix_cache=False)
    wanted = samples(4)
    single = run(Engine.from_params(config, tree, settings), [(40 * i, each) for i, each in enumerate(apart(wanted))])
    engine = Engine.from_params(config, tree, dataclasses.replace(settings, tensor=2))
    answers = run(engine, [(0, request) for request in wanted])
    assert sum(answers.tokens[name] != tokens for name, tokens in single.tokens.items()) <= 1
    assert engine.load().cached_tokens == 3 * 29
    (stage,) = engine._loops[0].pipeline.stages
    assert not re.search("all-gather|all-reduce|collective-permute|all-to-all", stage._copy.as_text())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_keys_and_values_are_copied_as_they_are(params, dtype) -> None:
    engine = make_engine(params, kv_cache_dtype=dtype, prefix_cache=False)
    wanted = samples(4)
    expected = run(engine, [(30 * index, request) for index, request in enumerate(apart(wanted))])
    answers = run(engine, [(0, request) for request in wanted])
    assert sum(answers.tokens[name] != tokens for name, tokens in expected.tokens.items()) <= 1


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:29], PROMPT[:28], PROMPT[:3], PROMPT[:1]], ids=len)
def test_the_prompt_is_computed_once(params, prompt) -> None:
    engine = make_engine(params, prefix_cache=False, buckets=(6, 12, 48))
    answers = Answers()
    for request in samples(6, prompt=prompt):
        engine.submit(request, answers)
    engine.step()
    engine.step()
    length = len(prompt)
    shared, own = (length - 1) // 4, math.ceil((length + 1) / 4) - (length - 1) // 4
    assert engine.load().slots_used <= 4 * (shared + 6 * (own + 1))
    while engine.step():
        pass
    load = engine.load()
    assert load.prompt_tokens == (length if length > 1 else 0)  # a chunk of one token counts as a decode
    assert load.cached_tokens == 5 * (length - 1)
    assert load.generated_tokens == 120


def test_deterministic_samples_are_the_same_to_the_bit(params) -> None:
    settings = {"deterministic": True, "slot_policy": "reserve", "buckets": (24,), "slots": 900}
    wanted = samples(4)
    together = run(make_engine(params, **settings), [(0, request) for request in wanted])
    engine = make_engine(params, prefix_cache=False, **settings)
    single = run(engine, [(40 * index, request) for index, request in enumerate(apart(wanted))])
    assert together.tokens == single.tokens
    assert together.logprobs == single.logprobs


def test_samples_that_are_aborted_leave_nothing_behind(params) -> None:
    engine, answers = make_engine(params), Answers()
    for request in samples(6, max_tokens=60):
        engine.submit(request, answers)
    engine.abort("s0")
    engine.abort("s3")
    for _ in range(6):
        engine.step()
    engine.abort("s1")
    while engine.step():
        pass
    assert {name for name, tokens in answers.tokens.items() if len(tokens) == 60} == {"s2", "s4", "s5"}
    assert engine.load().slots_used == 0


@pytest.mark.long
def test_samples_go_to_one_replica(params) -> None:
    engine, answers = make_engine(params, replicas=2), Answers()
    for request in samples(4):
        engine.submit(request, answers)
    holders = [[replica.holds(f"s{index}") for replica in engine._loops] for index in range(4)]
    assert holders == [[True, False]] * 4
    assert engine.load().outstanding_tokens == len(PROMPT) + 3 + 4 * 20
    while engine.step():
        pass


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_copying_blocks_makes_nothing_of_the_pools_size(params) -> None:
    engine = make_engine(params)
    (stage,) = engine._loops[0].pipeline.stages
    memory = stage._copy.memory_analysis()
    assert memory.alias_size_in_bytes >= engine.report.pool_bytes
    assert memory.temp_size_in_bytes < engine.report.pool_bytes / 50


@pytest.mark.parametrize("name", api.MODULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_blocks_copy_is_the_block_in_every_layer(name, dtype, in_turn) -> None:
    n_blocks, layers = 7, 3
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "alibi": False}
    shape = api.AttentionShape(dtype=np.dtype("float32"), pool_dtype=jnp.dtype(dtype), **heads).with_blocks(128, 256)
    described = api.load(name).pool(shape, n_blocks * layers)
    leaves, tree = jax.tree.flatten(described)
    rng = np.random.default_rng(0)
    before = [rng.integers(0, 100, leaf.shape).astype(leaf.dtype) for leaf in leaves]
    assert all(len(leaf) >= n_blocks * layers for leaf in before)
    copies = np.array([[5, 0], [5, 3], [1, 6], [-1, -1]], np.int32)
    first_blocks = [[n_blocks * layer for layer in range(layers)]]
    copy = jax.jit(partial(kv_cache.copy_blocks, first_blocks=first_blocks, in_turn=in_turn))
    copied = copy(jax.tree.unflatten(tree, before), copies)
    for old, new in zip(before, jax.tree.leaves(copied), strict=True):
        expected = old.copy()
        for layer in range(layers):
            for source, target in copies[:3] + layer * n_blocks:
                expected[target] = old[source]
        np.testing.assert_array_equal(np.asarray(new).astype(np.float32), expected.astype(np.float32))


def test_prompt_scores_of_the_first_are_told_of_all() -> None:
    wanted = samples(3, prompt_logprobs=1)
    assert [without_fork_scores(request).sampling.prompt_logprobs for request in wanted] == [1, None, None]
    assert without_fork_scores(wanted[1]).sampling.sample_index == 1
    told = PromptScores(wanted).copy_to_forks(TokenEvent("s0", (7,), (-1.0,), (), ((-2.0, None),)))
    assert [(event.request_id, event.token_ids, event.prompt_logprobs) for event in told] == [
        ("s0", (7,), ((-2.0, None),)),
        ("s1", (), ((-2.0, None),)),
        ("s2", (), ((-2.0, None),)),
    ]
    other = TokenEvent("s1", (7,), (-1.0,))
    assert PromptScores(wanted).copy_to_forks(other) == [other]


def test_samples_and_terms_from_python(params) -> None:
    with make_engine(params, scoring=True) as engine:
        before = engine.load().prompt_tokens
        made = engine.generate([PROMPT, PROMPT[:9]], n=3, max_tokens=8, seed=1, prompt_logprobs=0, ignore_eos=True)
        assert engine.load().prompt_tokens - before == 30 + 9
        assert [one.prompt_tokens for one in made] == [30] * 3 + [9] * 3
        assert made[0].prompt_logprobs == made[1].prompt_logprobs == made[2].prompt_logprobs
        assert len(made[0].prompt_logprobs or ()) == 30
        assert len({one.token_ids for one in made[:3]}) == 3
        drawn = engine.generate([PROMPT], n=4, max_tokens=8, seed=1, logprobs=0, ignore_eos=True)
        chosen = engine.generate([PROMPT], n=2, best_of=4, max_tokens=8, seed=1, ignore_eos=True)
        assert [one.token_ids for one in chosen] == [one.token_ids for one in best(drawn, 2)]
        with pytest.raises(InvalidRequest, match="best_of: is 1; it must be a whole number from 2"):
            engine.generate([PROMPT], n=2, best_of=1)
        for timeout in (-1, math.nan, "5"):
            with pytest.raises(InvalidRequest, match=f"timeout: is {timeout!r}; it must be a number above 0"):
                engine.generate([PROMPT], timeout=timeout)  # pyright: ignore[reportArgumentType]
        engine.generate([PROMPT], max_tokens=1, timeout=math.inf)
        with pytest.raises(TimeoutError):
            engine.generate([PROMPT], max_tokens=60, ignore_eos=True, timeout=1e-9)
        seen: list[Request] = []
        submit = engine.submit
        engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]
        engine.generate([PROMPT], max_tokens=2, priority=3, cache_salt="mine")
        assert (seen[0].priority, seen[0].cache_salt) == (3, "mine")


def test_the_best_are_the_likeliest_on_average() -> None:
    def completion(*logprobs: float) -> Completion:
        return Completion(request_id="", text="", token_ids=(1,) * len(logprobs), finish_reason=None, logprobs=logprobs)

    long, short, worst = completion(-1.0, -1.0, -1.0), completion(-2.0), completion(-3.0)
    assert best([worst, short, long], 2) == [long, short]  # a sum would favour the short one
