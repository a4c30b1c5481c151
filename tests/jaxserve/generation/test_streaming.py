"""Calls from Python: lists of prompts, and streams."""

import asyncio
import dataclasses
from typing import Any

import pytest

from jaxserve import Engine, EngineConfig
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.request import FinishReason
from jaxserve.text.chat_template import ChatTemplate
from tests.fixtures.texts import printable_tokenizer
from tests.fixtures.tiny import BLOOM, make_engine, opinionated

PROMPTS = [[5 + i, 6, 7 + i] for i in range(20)]


@pytest.fixture(scope="module")
def engine():
    with make_engine(opinionated(0), max_queued_requests=3) as engine:
        yield engine


def test_many_prompts_in_order_within_queue_bounds(engine) -> None:
    together = engine.generate(PROMPTS, max_tokens=6, temperature=0.0)
    alone = [engine.generate([prompt], max_tokens=6, temperature=0.0)[0] for prompt in PROMPTS[:3]]
    assert [c.token_ids for c in together[:3]] == [c.token_ids for c in alone]
    assert all(c.finish_reason in (FinishReason.LENGTH, FinishReason.EOS) for c in together)
    assert all(c.prompt_tokens == 3 for c in together)


def test_long_prompts_wait_for_queue_tokens(engine, monkeypatch) -> None:
    alone = [engine.generate([prompt], max_tokens=6, temperature=0.0)[0] for prompt in PROMPTS[:6]]
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_queued_tokens=4))
    together = engine.generate(PROMPTS[:6], max_tokens=6, temperature=0.0)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_search_of_more_beams_than_may_wait_finds_the_same(engine, monkeypatch) -> None:
    found = engine.beam_search([5, 6, 7], n=6, max_tokens=4)
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_queued_requests=100))
    wide = engine.beam_search([5, 6, 7], n=6, max_tokens=4)
    assert [one.token_ids for one in found] == [one.token_ids for one in wide]


def test_a_queue_that_is_full_of_others_refuses_a_call(engine, monkeypatch) -> None:
    def full(*_):
        raise QueueFull("others wait")

    monkeypatch.setattr(engine, "submit", full)
    with pytest.raises(QueueFull):
        engine.generate([[5]], max_tokens=2)


def test_a_seed_is_drawn_reported_and_repeats_the_answer(engine) -> None:
    first, second = engine.generate([[5, 6]] * 2, max_tokens=12, ignore_eos=True)
    assert first.seed != second.seed
    assert engine.generate([[5, 6]], max_tokens=12, ignore_eos=True, seed=first.seed)[0].token_ids == first.token_ids


def test_one_bad_prompt_is_refused_before_anything_runs(engine) -> None:
    before = engine.load().generated_tokens
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        engine.generate([[5], [BLOOM.vocab_size]], max_tokens=4)
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        engine.generate([[5]], temprature=0.5)
    assert engine.load().generated_tokens == before


def test_a_stream_brings_an_iteration_at_a_time(engine) -> None:
    async def collect() -> list:
        return [delta async for delta in engine.stream([5, 6], max_tokens=5, temperature=0.0, ignore_eos=True)]

    deltas = asyncio.run(collect())
    assert [len(delta.token_ids) for delta in deltas] == [1] * 5
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    whole = engine.generate([[5, 6]], max_tokens=5, temperature=0.0, ignore_eos=True)[0]
    assert whole.token_ids == tuple(token for delta in deltas for token in delta.token_ids)


def test_leaving_a_stream_early_ends_the_request(engine) -> None:
    async def leave() -> None:
        stream = engine.stream([5, 6], max_tokens=90, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    engine.generate([[5]], max_tokens=2)  # a turn of the loop later
    assert engine.load().running == 0
    assert engine.load().slots_used == 0


def test_a_prompt_may_be_a_chat() -> None:
    tokenizer = printable_tokenizer()
    tokenizer.chat_template = ChatTemplate(
        "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}",
        {},
    )
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    greedy: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with make_engine(opinionated(0), tokenizer=tokenizer) as engine:

        async def streamed() -> tuple[int, ...]:
            return tuple([token async for delta in engine.stream(chat, **greedy) for token in delta.token_ids])

        answers = engine.generate([chat, chat | {"add_generation_prompt": False, "max_tokens": 2}], **greedy)
        assert [each.prompt_tokens for each in answers] == [len("user:Hi<bot>"), len("user:Hi")]
        assert [each.token_ids for each in answers] == [
            engine.generate(text, **greedy | {"max_tokens": most})[0].token_ids
            for text, most in (("user:Hi<bot>", 6), ("user:Hi", 2))
        ]
        assert engine.generate(chat, **greedy)[0].token_ids == asyncio.run(streamed()) == answers[0].token_ids
        searched: dict[str, Any] = {"n": 2, "max_tokens": 3}
        by_chat, by_text = (engine.beam_search(prompt, **searched) for prompt in (chat, "user:Hi<bot>"))
        assert [each.token_ids for each in by_chat] == [each.token_ids for each in by_text]
        with pytest.raises(InvalidRequest, match="messages: has a message whose content is 7"):
            engine.generate({"messages": [{"role": "user", "content": 7}]})


def test_settings_are_checked_with_the_model() -> None:
    with pytest.raises(ValueError, match="max_rows is 0"):
        make_engine(opinionated(0), max_rows=0)
    learned = dataclasses.replace(BLOOM, max_position=64)
    with pytest.raises(ValueError, match="positions for 64 tokens"):
        Engine.from_params(learned, opinionated(0), EngineConfig(max_context=65))
