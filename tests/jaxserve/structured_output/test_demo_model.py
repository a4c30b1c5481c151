"""Grammars and the demo model, whose tokenizer has tokens of many characters."""

import asyncio
import json

import pytest

from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason
from tests.fixtures.texts import CASES, SCHEMA, is_json


@pytest.fixture(scope="module")
def demo():
    config = EngineConfig(max_rows=4, buckets=(8, 32), slots=2048, max_context=256, scoring=False)
    with Engine.from_checkpoint(DEMO_MODEL, config) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_texts_of_the_demo_model(demo, case, temperature) -> None:
    completions = demo.generate(
        ["It was a", "She said", "Mr. Darcy"], grammar=case.given, temperature=temperature, max_tokens=100, seed=5
    )
    for completion in completions:
        assert completion.finish_reason is FinishReason.EOS
        assert case.judge(completion.text), completion.text


@pytest.mark.long
def test_any_object_of_the_demo_model(demo) -> None:
    (completion,) = demo.generate(["It was a"], grammar={"type": "json_object"}, max_tokens=200, seed=5, top_k=3)
    if completion.finish_reason is FinishReason.EOS:
        assert isinstance(json.loads(completion.text), dict)
    else:
        assert completion.text.lstrip().startswith("{")


def test_a_stream_of_the_demo_model(demo) -> None:
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
