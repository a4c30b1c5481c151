"""Requests with a grammar in the engine: their texts are what it describes, and nobody else notices them."""

import dataclasses
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.iteration import SamplerVariant
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.matcher import GrammarError, Matcher
from tests.fixtures.texts import CASES, check_texts, constrained, printable_tokenizer, request_of
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, each_alone, run, traffic

TOKENIZER = printable_tokenizer()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"slot_policy": "reserve", "slots": 320}, marks=pytest.mark.long),
        {"slot_policy": "grow", "slots": 112},
        pytest.param({"stages": 2}, marks=pytest.mark.long),
        pytest.param({"replicas": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor": 3}, marks=pytest.mark.exhaustive),
        pytest.param({"speculate": "ngram"}, marks=pytest.mark.long),
        pytest.param({"in_flight": 1}, marks=pytest.mark.long),
        pytest.param({"scheduler": "request"}, marks=pytest.mark.long),
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_under_load_texts_are_right_and_nobody_else_notices(params, alone, settings, tmp_path) -> None:
    if "tensor" in settings:  # 97 tokens are none for three devices
        padded = tmp_path / "padded.toml"
        padded.write_text("[pad]\nvocab = true\n")
        settings = settings | {"sharding": str(padded)}
    engine = make_engine(params, tokenizer=TOKENIZER, **settings)
    plain = traffic(80)
    asked = constrained(40, plain[-1][0])
    arrivals = plain + [(step, request) for step, request, _ in asked.values()]
    answers = run(engine, arrivals)
    check_texts(answers, asked)
    different = [
        request.request_id
        for _, request in plain
        if answers.tokens[request.request_id] != alone.tokens[request.request_id]
    ]
    assert len(different) <= 2  # by rounding: `test_engine.test_under_load_as_alone` looks at each
    assert all(answers.reasons[name] == alone.reasons[name] for name in alone.reasons if name not in different)
    load = engine.load()
    assert (load.slots_used, load.compiled_after_ready) == (0, 0)
    assert (load.preemptions > 0) == ("slots" in settings and settings["slot_policy"] == "grow")
    for replica in engine._loops:
        assert not replica.pipeline._masks._texts
        assert not replica.pipeline._masks._in_flight


def test_deterministic_beside_constrained(params) -> None:
    settings: dict[str, Any] = {"deterministic": True, "buckets": (24,), "slot_policy": "reserve"}
    plain, found = traffic(30), []
    for asked in ({}, constrained(20, 30)):
        engine = make_engine(params, tokenizer=TOKENIZER, **settings)
        found.append(run(engine, plain + [(step, request) for step, request, _ in asked.values()]))
    check_texts(found[1], asked)
    for _, request in plain:
        name = request.request_id
        assert found[0].tokens[name] == found[1].tokens[name]
        assert found[0].logprobs[name] == found[1].logprobs[name]


@pytest.mark.parametrize("policy", ["reserve", "grow"])
def test_their_own_tokens_do_not_depend_on_the_others(params, policy) -> None:
    asked = constrained(24, 20)
    engine = make_engine(params, tokenizer=TOKENIZER, prefix_cache=False)
    by_itself = each_alone(engine, (request for _, request, _ in asked.values()))
    slots = 320 if policy == "reserve" else 112
    engine = make_engine(params, tokenizer=TOKENIZER, slot_policy=policy, slots=slots)
    answers = run(engine, traffic(40) + [(step, request) for step, request, _ in asked.values()])
    assert sum(answers.tokens[name] != by_itself.tokens[name] for name in asked) <= 1


def test_a_plan_without_them_is_what_it_was(params) -> None:
    engine = make_engine(params, tokenizer=TOKENIZER)
    replica = engine._loops[0]
    variants, sampled_later = [], []
    engine.record(lambda record: variants.append(record.plan.sampler))
    pipeline, launch = replica.pipeline, replica.pipeline.launch

    def spy(plan, packed):
        launch(plan, packed)
        sampled_later.append(pipeline._unsampled is not None)

    pipeline.launch = spy
    run(engine, traffic(20))
    assert SamplerVariant.CONSTRAINED not in variants
    assert not any(sampled_later)
    assert replica.pipeline._masks._threads is None
    run(engine, [(0, request_of("a", "regex"))])
    assert SamplerVariant.CONSTRAINED in variants[-10:]
    assert any(sampled_later)


@pytest.mark.parametrize("when", ["mask", "token", "panic"])
def test_a_grammar_that_fails_on_the_way_ends_its_own_request(params, alone, monkeypatch, when) -> None:
    class Panic(BaseException):
        pass

    def fails(*_):
        if when == "panic":
            raise Panic
        raise GrammarError("a bound has been reached")

    engine = make_engine(params, tokenizer=TOKENIZER)
    grammar = read("response_format", CASES["json_schema"].given)
    assert engine.grammars is not None
    engine.grammars.compile(grammar)
    monkeypatch.setattr(Matcher, "advance" if when == "token" else "allowed", fails)
    events, answers = [], Answers()
    engine.submit(request_of("a", "json_schema", grammar=grammar), events.extend)
    for _, request in traffic(6):
        engine.submit(request, answers)
    while engine.step():
        pass
    last = events[-1]
    told = "it cannot be followed (Panic)" if when == "panic" else "a bound has been reached"
    assert (last.finish_reason, last.token_ids, last.field) == (FinishReason.ERROR, (), "response_format")
    assert last.error == f"response_format: after {0 if when == 'token' else 1} tokens {told}"
    assert sum(event.finish_reason is not None for event in events) == 1
    assert all(answers.tokens[r.request_id] == alone.tokens[r.request_id] for _, r in traffic(6))
    assert engine.load().slots_used == 0


def test_ignore_eos_goes_on_as_long_as_something_may_follow(params) -> None:
    engine = make_engine(params, tokenizer=TOKENIZER)
    endless, short = Grammar(kind="regex", text="[a-z]*"), Grammar(kind="regex", text="[a-z]{0,5}")
    asked = [
        (0, request_of(f"{seed}", "regex", grammar=endless, ignore_eos=True, temperature=2.0, seed=seed))
        for seed in range(8)
    ]
    asked += [
        (0, request_of(f"s{seed}", "regex", grammar=short, ignore_eos=True, temperature=2.0, seed=seed))
        for seed in range(8)
    ]
    answers = run(engine, asked)
    assert all(answers.reasons[str(seed)] is FinishReason.LENGTH for seed in range(8))
    assert all(answers.reasons[f"s{seed}"] is FinishReason.EOS for seed in range(8))
    assert all(len(answers.tokens[f"s{seed}"]) == 5 for seed in range(8))


def test_samples_of_one_grammar_go_their_own_ways(params) -> None:
    engine = make_engine(params, tokenizer=TOKENIZER)
    request = request_of("", "json_schema", temperature=1.5, seed=1)
    asked = [
        (
            0,
            dataclasses.replace(
                request, request_id=str(index), sampling=dataclasses.replace(request.sampling, sample_index=index)
            ),
        )
        for index in range(6)
    ]
    answers = run(engine, asked)
    texts = [TOKENIZER.decode(answers.tokens[str(index)]) for index in range(6)]
    assert all(map(CASES["json_schema"].judge, texts))
    assert len(set(texts)) > 3


def test_logprobs_are_the_models_own(params) -> None:
    engine = make_engine(params, tokenizer=TOKENIZER)
    answers = run(engine, [(0, request_of("a", "regex", logprobs=20))])
    prompt = (5, 6, 7, *answers.tokens["a"])
    scored = make_engine(params, scoring=True)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    told = run(scored, [(0, Request(request_id="b", prompt=prompt, sampling=sampling))]).prompt_logprobs["b"]
    assert answers.logprobs["a"] == pytest.approx(told[2:], abs=1e-3)


def test_an_engine_without_a_tokenizer_refuses(params) -> None:
    engine = make_engine(params)
    with pytest.raises(InvalidRequest, match="grammar: needs a tokenizer"):
        engine.submit(request_of("a", "regex"), print)
    with pytest.raises(InvalidRequest, match="grammar: needs a tokenizer"):
        engine.check(request_of("a", "regex"))
