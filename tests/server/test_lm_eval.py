"""lm-evaluation-harness scored a small task over HTTP (`docs/serving.md` has the command); here the same task is scored
with the library directly."""

import json
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine

pytestmark = pytest.mark.clients

FOLDER = Path(__file__).parent / "foreign" / "lm_eval"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_the_harness_scored_over_http_what_the_library_scores() -> None:
    recorded = lines("recorded.jsonl")
    asked = [(task["beginning"], ending) for task in lines("endings.jsonl") for ending in task["endings"]]
    assert [(line["beginning"], line["ending"]) for line in recorded] == asked
    engine = Engine.from_checkpoint(DEMO_MODEL, EngineConfig(buckets=(64,), slots=2048, max_rows=8))
    with engine:
        assert engine.tokenizer is not None
        starts = [len(engine.tokenizer.encode(beginning)) for beginning, _ in asked]
        texts = [f"{beginning} {ending}" for beginning, ending in asked]
        completions = engine.generate(texts, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    for line, start, completion in zip(recorded, starts, completions, strict=True):
        assert completion.prompt_logprobs is not None
        assert completion.prompt_top_logprobs is not None
        logprobs, tops = completion.prompt_logprobs[start:], completion.prompt_top_logprobs[start:]
        assert line["logprob"] == pytest.approx(sum(logprobs), abs=1e-2)
        likeliest = [top is not None and top.logprobs[0] for top in tops]
        assert line["is_greedy"] == (list(logprobs) == likeliest)
    assert [line["is_greedy"] for line in recorded].count(True) == 1
