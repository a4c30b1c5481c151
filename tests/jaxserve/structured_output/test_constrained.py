"""Requests with a grammar in the engine: their texts are what it describes, and nobody else notices them."""

import dataclasses
import json
import threading
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequest
from jaxserve.iteration import SamplerVariant
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.structured_output import masks
from jaxserve.structured_output.grammar import read
from jaxserve.structured_output.matcher import GrammarError, Matcher
from tests.fixtures.texts import CASES, SCHEMA, check_texts, constrained, is_json, printable_tokenizer
from tests.fixtures.tiny import make_engine
from tests.fixtures.traffic import Answers, each_alone, run, traffic

TOKENIZER = printable_tokenizer()
WAIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def alone(params) -> Answers:
    """Requests without a grammar, each in a run of its own."""
    return each_alone(make_engine(params, prefix_cache=False), (request for _, request in traffic(80)))


@pytest.mark.parametrize(
    "settings",
    [
        {"slot_policy": "reserve", "slots": 320},
        {"slot_policy": "grow", "slots": 112},
        {"stages": 2},
        pytest.param({"replicas": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor": 3}, marks=pytest.mark.exhaustive),
        {"speculate": "ngram"},
        {"in_flight": 1},
        {"scheduler": "request"},
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


def request_of(name: str, case: str, **sampling: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": 80, "temperature": 0.0, "grammar": read("grammar", CASES[case].given)}
    return Request(request_id=name, prompt=(5, 6, 7), sampling=SamplingParams(**fields | sampling))


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


def test_the_layers_run_before_the_mask_is_known(params) -> None:
    """The next iteration is launched before this one's token is read, and sampled afterwards."""
    engine = make_engine(params, tokenizer=TOKENIZER)
    pipeline, order = engine._loops[0].pipeline, []
    launch, sample, take = pipeline.launch, pipeline._enqueue_sampling, pipeline._take_oldest

    def spy_launch(plan, packed):
        order.append(("launch", plan.sequence))
        launch(plan, packed)

    def spy_sample(*args):
        assert pipeline._unsampled is not None
        order.append(("sample", pipeline._unsampled.plan.sequence))
        sample(*args)

    def spy_take():
        plan, result = take()
        order.append(("take", plan.sequence))
        return plan, result

    pipeline.launch, pipeline._enqueue_sampling, pipeline._take_oldest = spy_launch, spy_sample, spy_take
    run(engine, [(0, request_of("a", "regex"))])
    when = {step: index for index, step in enumerate(order)}
    last = max(sequence for _, sequence in order)
    assert last >= 5
    for sequence in range(1, last):
        assert when["launch", sequence] < when["take", sequence - 1] < when["sample", sequence]


class Held:
    """GrammarMasks of texts after the first token are computed when a test says so."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        look = masks.GrammarState.update_mask

        def slowly(text):
            self.begun.release()
            assert self.may_end.wait(WAIT_SECONDS)
            look(text)

        monkeypatch.setattr(masks.GrammarState, "update_mask", slowly)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_late_mask_delays_its_own_request_only(params, alone, monkeypatch, stages) -> None:
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER, stages=stages)
    answers, plain = Answers(), [request for _, request in traffic(12)]
    try:
        engine.submit(request_of("late", "json_schema"), answers)
        for request in plain:
            engine.submit(request, answers)
        while len(answers.reasons) < len(plain):
            assert engine.step()
        assert held.begun.acquire(timeout=WAIT_SECONDS)
        assert len(answers.tokens["late"]) == 1, "the first mask comes with the grammar"
        assert engine._loops[0].scheduler.withdrawals > 0
        assert all(answers.tokens[r.request_id] == alone.tokens[r.request_id] for r in plain)
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert answers.reasons["late"] is FinishReason.EOS
    assert CASES["json_schema"].judge(TOKENIZER.decode(answers.tokens["late"]))
    assert engine.load().slots_used == 0


def test_a_late_last_token_is_chosen_later(params, monkeypatch) -> None:
    """At its limit a request is as good as gone; a late mask brings it back."""
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER, max_rows=2)
    answers = Answers()
    try:
        engine.submit(request_of("late", "json_schema", max_tokens=2), answers)
        for number in range(6):
            sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=str(number), prompt=(9, number + 3), sampling=sampling), answers)
        while len(answers.reasons) < 6:
            assert engine.step()
        assert "late" not in answers.reasons
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert (len(answers.tokens["late"]), answers.reasons["late"]) == (2, FinishReason.LENGTH)


def test_an_abort_while_the_mask_is_late(params, monkeypatch) -> None:
    held, engine = Held(monkeypatch), make_engine(params, tokenizer=TOKENIZER)
    answers = Answers()
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    try:
        engine.submit(request_of("late", "json_schema"), answers)
        engine.submit(Request(request_id="plain", prompt=(9, 3), sampling=sampling), answers)
        while not held.begun.acquire(blocking=False):
            assert engine.step()
        engine.abort("late")
        while len(answers.reasons) < 2:
            assert engine.step()
    finally:
        held.may_end.set()
    while engine.step():
        pass
    assert answers.reasons == {"late": FinishReason.ABORTED, "plain": FinishReason.LENGTH}
    again = run(engine, [(0, request_of("late", "json_schema"))])
    assert CASES["json_schema"].judge(TOKENIZER.decode(again.tokens["late"]))


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


def test_weights_are_replaced_after_a_late_stop(params) -> None:
    """A plan whose choice of tokens waits for masks is under way when its last request ends."""
    engine = make_engine(params, tokenizer=TOKENIZER)
    answers = Answers()
    engine.submit(request_of("a", "choice"), answers)
    while not answers.reasons:
        engine.step()
    engine.update_params(params)
    again = run(engine, [(0, request_of("a", "choice"))])
    assert again.tokens == answers.tokens


# The demo model, whose tokenizer has tokens of many characters.


@pytest.fixture(scope="module")
def demo():
    config = EngineConfig(max_rows=4, buckets=(8, 32), slots=2048, max_context=256, scoring=False)
    with Engine.from_checkpoint(DEMO_MODEL, config) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_texts_of_the_demo_model(demo, case, temperature) -> None:
    completions = demo.generate(
        ["It was a", "She said", "Mr. Darcy"], grammar=case.given, temperature=temperature, max_tokens=100, seed=5
    )
    for completion in completions:
        assert completion.finish_reason is FinishReason.EOS
        assert case.judge(completion.text), completion.text


def test_any_object_of_the_demo_model(demo) -> None:
    (completion,) = demo.generate(["It was a"], grammar={"type": "json_object"}, max_tokens=200, seed=5, top_k=3)
    if completion.finish_reason is FinishReason.EOS:
        assert isinstance(json.loads(completion.text), dict)
    else:
        assert completion.text.lstrip().startswith("{")


def test_a_stream_of_the_demo_model(demo) -> None:
    import asyncio

    async def scenario() -> tuple[str, FinishReason | None]:
        text, reason = "", None
        async for delta in demo.stream("It was a", grammar=CASES["json_schema"].given, max_tokens=100, seed=3):
            text, reason = text + delta.text, delta.finish_reason
        return text, reason

    text, reason = asyncio.run(scenario())
    assert reason is FinishReason.EOS
    assert is_json(text, SCHEMA)


def test_hostile_grammars_are_refused(demo) -> None:
    before = demo.load().generated_tokens  # iterations of an earlier request may still be landing
    with pytest.raises(InvalidRequest, match=r"^grammar: cannot be followed: lexer error"):
        demo.generate(["a"], grammar={"type": "regex", "value": "(a{1000}){1000}"})
    with pytest.raises(InvalidRequest, match=r"^grammar: cannot be compiled: unclosed group"):
        demo.generate(["a"], grammar={"type": "regex", "value": "(a"})
    assert demo.load().generated_tokens == before
